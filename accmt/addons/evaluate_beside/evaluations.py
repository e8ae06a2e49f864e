"""Evaluates the checkpoints and models of a run in the user's program, in place of `Trainer.fit`.

Each checkpoint is restored as for a resumed run, and then evaluated as the run itself would have done at this step. A
model folder has only weights and counters. The rows go to a history of their own, in the folder `evaluations` of the
run folder: each file has one writer. What is done is recorded after each evaluation; one that a kill has interrupted is
repeated, and its rows are superseded.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from accmt.addons.averaging import WeightAverage
from accmt.addons.best_models import BestModels
from accmt.addons.evaluate_beside.program import Request
from accmt.addons.evaluate_beside.published import (
    Lineage,
    Origin,
    Published,
    find_checkpoints,
    find_models,
    hold,
    let_go,
    read_model,
)
from accmt.addons.fork.beginning import find_fork, settings_at
from accmt.addons.hub import PushToHub
from accmt.addons.launches import read_launches
from accmt.addons.models_in_fit import as_module
from accmt.addons.run_folders import is_locked
from accmt.addons.sync import sync_run
from accmt.addons.trackers.delivery_state import DeliveryFile
from accmt.addons.trackers.spec import resolve_trackers
from accmt.callbacks import Callback, build_callbacks
from accmt.checks import check_stage, reporting_failed_setup
from accmt.engine.accelerator import build_accelerator
from accmt.errors import ArgumentError, explain, fail
from accmt.files import current_folder, dumps, loads, write_text
from accmt.loaders import UserData
from accmt.loop.evaluation import evaluate_and_count
from accmt.messages import warn
from accmt.options import Settings
from accmt.processes import broadcast_object, is_main_process, run_on_main_process
from accmt.registry import FIT_VARIABLE
from accmt.run import Run
from accmt.run.restart import Recovery, free_finished
from accmt.run.shutdown import watching
from accmt.saving import read_status
from accmt.saving.model_folder import STATUS_NAME
from accmt.setup.build import build_run
from accmt.setup.model import detach_run
from accmt.setup.torch_flags import running, working
from accmt.state import TrainingState
from accmt.tracking import Tracking
from accmt.tracking.history import EVALUATIONS_FOLDER, HISTORY_FILE, read_rows
from accmt.tracking.tracking import RunStatus

STATE_FILE = "evaluated.json"

_POLL_S = 2.0
_TAIL_BYTES = 1 << 16
_AFTER_CTRL_C = 130
_CARRIED = ("evaluations_done", "eval_global_step", "last_evaluation_step")
"""Counters that an uninterrupted run has from its evaluations, and its checkpoints without evaluations lack."""


def evaluate_fit(
    trainer: Any,
    module: Any,
    train_dataset: Any = None,
    val_dataset: Any = None,
    *,
    datamodule: Any = None,
    **kwargs: Any,
) -> NoReturn:
    """Evaluate the checkpoints of the run, and end the program.

    Processes: collective.
    """
    request = Request.read()
    own: Any = copy.copy(trainer)  # a subclass may have another constructor
    own.settings = _change(trainer.settings, request)
    own.registered_savings = []
    check_stage("arguments", own.settings)
    del os.environ[FIT_VARIABLE]
    user_data = UserData("fit", {"train": train_dataset, "validate": val_dataset}, datamodule)
    trained = as_module(module, kwargs, own.hps)
    with running(own, trained), working(own.settings.running), user_data.ending("fit"):
        own._user_data = user_data
        _Evaluations(own, trained, user_data, request).run()
    own.close()
    raise SystemExit(0)


def _change(settings: Settings, request: Request) -> Settings:
    """Return the settings of the run, without everything that only training needs or that writes to its folders."""
    if settings.checkpoints.fork is not None:
        fork = find_fork(settings)
        settings = settings_at(settings, fork, fork.origin.step)
    model_path = str(current_folder() / settings.model_folder)
    if model_path != request.run_model_path:
        expected = f"that of {request.run_model_path}: only the first fit of a program can be evaluated"
        do = "put the other training into another program, or restore the arguments"
        where = "the first trainer.fit of the program"
        raise fail(ArgumentError, where, got=f"a training of {model_path}", expected=expected, do=do)
    place = Path(request.run_folder, EVALUATIONS_FOLDER)
    callbacks = build_callbacks(settings.running.callbacks)
    publishing = PushToHub, BestModels  # what they publish is the run's
    return replace(
        settings,
        saving=replace(
            settings.saving,
            model_path=request.model_path,
            model_saving=request.save_best,
            model_saving_below=None,
            model_saving_above=None,
            patience=None,
        ),
        checkpoints=replace(
            settings.checkpoints,
            checkpoint=place / "checkpoints",  # never written
            resume=False,
            checkpoint_every=None,
            checkpointer=None,
            fork=None,
        ),
        evaluation=replace(settings.evaluation, evaluate_every_n_steps=None, eval_when_start=False),
        tracking=replace(
            settings.tracking,
            ledger=False,
            monitor=replace(settings.tracking.monitored, record_goodput=False, goodput=False, price_per_hour=None),
        ),
        running=replace(
            settings.running,
            callbacks=[one for one in callbacks if not isinstance(one, publishing)],
            verbose=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            profiler=None,
            max_time=None,
            seed=request.seed if settings.running.seed is None else settings.running.seed,
        ),
        handling=replace(settings.handling, handlers=None),
    )


# ---- What is done


@dataclass
class _State:
    """What is recorded after each evaluation.

    Attributes:
        evaluated: What was evaluated, in this order: its origin and digest, the results, and the line of the history
            before.
        line: The number of lines in the history.
        step: The step of the last row.
        save_best: The rule by which the best model was saved.
        run_id: The owner of the best model.
        selection: The best values so far, and which models are saved.
        counters: Counters of evaluations.
        best_metrics: The best value of each result.
    """

    evaluated: list[dict[str, Any]] = field(default_factory=list)
    line: int = 0
    step: int | None = None
    save_best: str | None = None
    run_id: str | None = None
    selection: dict[str, Any] = field(default_factory=lambda: {"best": {}, "chosen": [], "saved_at": {}})
    counters: dict[str, Any] = field(default_factory=dict)
    best_metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> _State:
        try:
            return cls(**loads((folder / STATE_FILE).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return cls()

    def write(self, folder: Path) -> None:
        write_text(folder / STATE_FILE, dumps(asdict(self), indent=2) + "\n")

    def find(self, published: Published) -> dict[str, Any] | None:
        """Return the entry of a checkpoint or model, or of another one of the same step; None if there is none."""
        known = (
            one for one in self.evaluated if one["digest"] == published.digest or _origin_of(one) == published.origin
        )
        return next(known, None)

    def forget(self, lineage: Lineage) -> bool:
        """Forget the evaluations of steps that the run has made again. Returns whether there were any."""
        gone = [one["line"] for one in self.evaluated if not lineage.has(_origin_of(one))]
        if gone:
            self.line = min(gone)
            self.evaluated = [one for one in self.evaluated if one["line"] < self.line]
            self.step = self.evaluated[-1]["step"] if self.evaluated else None
        return bool(gone)


def _origin_of(entry: Mapping[str, Any]) -> Origin:
    return Origin(entry.get("run_id"), entry.get("attempt"), entry["step"])


@dataclass(frozen=True)
class _Next:
    """What to do next: evaluate something, end, or, with neither, wait."""

    published: Published | None = None
    is_over: bool = False


# ---- The evaluations


class _Evaluations:
    def __init__(self, trainer: Any, module: Any, user_data: UserData, request: Request) -> None:
        self._trainer = trainer
        self._module = module
        self._user_data = user_data
        self._request = request
        self._run_folder = Path(request.run_folder)
        self._folder = self._run_folder / EVALUATIONS_FOLDER
        self._state = _State()
        self._tracking: Tracking | None = None
        self._skipped: set[str] = set()
        self._named_is_done = False
        self._callbacks = [
            (callback, copy.deepcopy(callback.state_dict()))
            for callback in trainer.settings.running.callbacks or ()
            if type(callback).load_state_dict is not Callback.load_state_dict
        ]

    def run(self) -> None:
        """Evaluate until there is nothing left.

        Processes: collective.
        """
        build_accelerator(self._trainer.settings.running)  # the process group, for the first decision
        counts = {False: 0, True: 0}
        try:
            while not (following := run_on_main_process(self._find_next)).is_over:
                if following.published is None:
                    time.sleep(min(_POLL_S, self._request.wait_s))
                    continue
                counts[following.published.is_model] += self._evaluate(following.published)
        except BaseException as error:
            self._close(self._find_status())
            if isinstance(error, KeyboardInterrupt):
                _print("stopped; the same command continues with what was interrupted")
                raise SystemExit(_AFTER_CTRL_C) from None
            raise
        status = broadcast_object(self._find_status())
        self._close(status)
        if not is_main_process():
            return
        if status != "RUNNING" and self._tracking is not None and self._tracking.held_back():
            for one in sync_run(self._folder):  # the rows that had to wait for the end of the run
                if one.problem is not None:
                    got, do = f"{one.num_left} rows not delivered ({one.problem})", f"accmt sync {self._folder}"
                    warn(explain(f"the tracker {one.tracker}", got, "all rows delivered", do))
        if self._request.model is None:
            numbers = [(counts[False], "checkpoint"), *([(counts[True], "model")] if counts[True] else [])]
            done = " and ".join(f"{number} {what}{'s' if number != 1 else ''}" for number, what in numbers)
            _print(f"{done} evaluated")

    def _find_next(self) -> _Next:
        request = self._request
        if request.model is not None:
            return self._find_named(Path(request.model))
        is_over = not request.watches
        if request.watches:  # before the list: nothing is published afterwards
            history = self._run_folder / HISTORY_FILE
            has_finished = _read_last(history).get("status") == "FINISHED"
            silent_s = time.time() - history.stat().st_mtime  # after a while, nobody resumes it
            is_over = has_finished or (silent_s > request.wait_s and not is_locked(self._run_folder))
        state = self._state if self._tracking is not None else _State.read(self._folder)
        lineage = self._read_lineage()
        found = find_checkpoints(Path(request.checkpoints), request.run_name)
        found += find_models(Path(request.run_model_path), without=Path(request.model_path))
        left = [
            one
            for one in found
            if lineage.has(one.origin) and one.digest not in self._skipped and state.find(one) is None
        ]
        return _Next(min(left, key=lambda one: one.order)) if left else _Next(is_over=is_over)

    def _find_named(self, folder: Path) -> _Next:
        """Return the model that was named, once; a model of the run that has a row is only printed."""
        if self._named_is_done:
            return _Next(is_over=True)
        self._named_is_done = True
        named = read_model(folder) or Published(folder, Origin(None, None, 0), "", is_model=True)
        entry = _State.read(self._folder).find(named) if self._adds_row(named) else None
        if entry is None:
            return _Next(named)
        _print(f"{_describe(named)}: {_describe_values(entry['values'])} (it was evaluated before)")
        return _Next(is_over=True)

    def _adds_row(self, published: Published) -> bool:
        """Return whether the history of the run gets a row."""
        return bool(published.digest) and self._read_lineage().has(published.origin)

    def _read_lineage(self) -> Lineage:
        return Lineage.of(read_launches(self._run_folder))

    def _find_status(self) -> RunStatus:
        """Return the status of the run for trackers."""
        status: RunStatus = _read_last(self._run_folder / HISTORY_FILE).get("status", "KILLED")
        return "RUNNING" if is_locked(self._run_folder) else status

    def _evaluate(self, published: Published) -> bool:
        """Evaluate a checkpoint or a model; return whether it still existed."""
        held = run_on_main_process(lambda: self._hold(published))
        if held is None:
            return False
        adds_row = run_on_main_process(lambda: self._adds_row(published))
        try:
            if adds_row:
                self._begin()
            else:
                self._trainer.chosen_tracking = self._build_tracking()  # which is not started
            before = 0 if self._tracking is None else int(self._tracking.state_dict()["line"])
            values = self._evaluate_weights(held, is_model=published.is_model)
        finally:
            run_on_main_process(lambda: let_go(held))
        if adds_row:
            run_on_main_process(lambda: self._record(published, before, values))
            self._state = broadcast_object(self._state)
        if is_main_process():
            of_no_run = "" if adds_row else " (it is not part of the history of the run)"
            _print(f"{_describe(published)}: {_describe_values(values)}{of_no_run}")
        return True

    def _hold(self, published: Published) -> Path | None:
        """Return a folder with the files, or None if the run has deleted or replaced them.

        Processes: main only.
        """
        beside, models = published.folder, Path(self._request.run_model_path)
        if not published.is_model:
            beside = beside.parent
        elif beside.is_relative_to(models):
            beside = models
        held = hold(published, beside=beside, otherwise=self._folder)
        if isinstance(held, Path):
            return held
        self._skipped.add(published.digest)
        warn(f"{_describe(published)} is not evaluated: {held}")
        return None

    def _begin(self) -> None:
        """Open the history and the trackers, unless they are open and the run has not gone back since."""
        lineage = broadcast_object(self._read_lineage())
        if self._tracking is not None:
            if not self._state.forget(lineage):
                return
            self._close("RUNNING")
        tracking = self._build_tracking()
        run_on_main_process(lambda: self._start(tracking, lineage))
        self._state = broadcast_object(self._state)
        self._tracking = self._trainer.chosen_tracking = tracking

    def _build_tracking(self) -> Tracking:
        settings, request = self._trainer.settings, self._request
        return Tracking(
            resolve_trackers(settings.tracking.log_with),
            track_name=request.track_name,
            run_name=request.run_name,
            logging_dir=settings.tracking.logging_dir,
            home=settings.home,
            tracker_kwargs=settings.tracking.tracker_kwargs,
            is_main_process=is_main_process(),
            verbose=False,
            offline=settings.tracking.tracker_options.offline,
            folder=self._folder,
        )

    def _start(self, tracking: Tracking, lineage: Lineage) -> None:
        """Start the trackers, in which the rows are added to those of the run.

        Processes: main only.
        """
        if self._tracking is None:
            self._state = _State.read(self._folder)
            self._state.forget(lineage)
            num_before, rule = len(self._state.evaluated), self._request.save_best
            if rule is not None and num_before and rule != self._state.save_best:
                what = f"{num_before} evaluations were made before without --save-best {rule}"
                warn(f"{what}: only later ones can be the best; to evaluate all again, delete {self._folder}")
        delivered = DeliveryFile.read(self._run_folder)
        accounts = {} if delivered is None else delivered.accounts
        tracking.load_state_dict(
            {
                "run_name": self._request.run_name,
                "run_ids": {key: one.run_id for key, one in accounts.items() if one.run_id is not None},
                "attempt": 0 if delivered is None else delivered.attempt - 1,
                "line": self._state.line,
                "step": self._state.step,
            }
        )
        rows = read_rows(self._run_folder / HISTORY_FILE)
        config: dict[str, Any] = {}
        for row in rows:
            config = row.get("config", config)
        tracking.start(config)

    def _evaluate_weights(self, held: Path, *, is_model: bool) -> dict[str, float]:
        """Restore a checkpoint or a model, and evaluate as the run would have done after this step.

        Processes: collective.
        """
        trainer = self._trainer
        trainer.state, trainer._run = TrainingState(), None
        trainer.chosen_checkpoint = None if is_model else held
        with reporting_failed_setup():
            if is_model:
                trainer.state.load_state_dict(_read_counters(held))
            run: Run = build_run(trainer, self._module, self._user_data, Recovery())
            if is_model:  # callbacks start as the program builds them
                for callback, state in self._callbacks:
                    callback.load_state_dict(copy.deepcopy(state))
                for average in (one for one in run.callbacks if isinstance(one, WeightAverage)):
                    average.average, average.num_averaged = {}, 0  # the saved weights are what was evaluated
                run.module.load_weights(held)
        trainer._run = run
        try:
            self._restore(run)
            run.saver.claim(run)
            if not (run.val_loaders or run.features.add_results):
                got = "a program that passes no validation data to `fit`"
                do = 'pass them to `fit`, and Trainer(evaluate_every_n_steps="never") if the run is not to use them'
                raise fail(
                    ArgumentError, f"evaluation of {self._run_folder}", got=got, expected="validation data", do=do
                )
            values = _evaluate_as_fit(run)
            run.saver.require_saved(run.settings.model_folder)
            self._state.selection = run.saver.selection.state_dict()
            self._state.run_id = run.saver.run_id
            self._state.counters = {name: getattr(run.state, name) for name in _CARRIED}
            self._state.best_metrics = dict(run.state.best_metrics)
            return values
        finally:
            run.saver.release()
            detach_run(run)
            free_finished(run.stepper.optimizer)

    def _restore(self, run: Run) -> None:
        """Restore what the evaluations before have left, instead of what the run had in its checkpoint."""
        state = self._state
        run.saver.selection.load_state_dict(state.selection)
        if state.run_id is not None:
            run.saver.run_id = state.run_id
            if run.saver.selection.names:
                run.saver.forget_missing(run.settings.model_folder, state.run_id)
        for name, value in state.counters.items():
            if value is not None:
                setattr(run.state, name, max(value, getattr(run.state, name) or 0))
        run.state.best_metrics.update(state.best_metrics)

    def _record(self, published: Published, before: int, values: dict[str, float]) -> None:
        state, tracked = self._state, {} if self._tracking is None else self._tracking.state_dict()
        entry = {**published.origin._asdict(), "digest": published.digest, "line": before, "values": values}
        state.evaluated.append(entry)
        state.line, state.step, state.save_best = tracked["line"], tracked["step"], self._request.save_best
        state.write(self._folder)

    def _close(self, status: RunStatus) -> None:
        if self._tracking is not None:
            self._tracking.finish(status)


def _evaluate_as_fit(run: Run) -> dict[str, float]:
    state = run.state
    if state.train_step == 0 and state.epoch > 0:  # at the end of an epoch, fit evaluates before it counts the epoch
        state.epoch -= 1
        state.now.is_last_training_batch = True
    state.now.fn, state.now.status, state.now.stage = "fit", "running", "train"
    with run.features.running(), watching(run):
        run.module.tracker = next(iter(run.tracking.loggers), None)
        for hook in (*run.hooks.on_resume, *run.hooks.on_fit_start):
            hook()
        run.stepper.begin_training()
        run.trained.begin()
        values = dict(evaluate_and_count(run))
        run.stepper.end_training()
    state.now.status = "finished"
    return values


def _read_counters(folder: Path) -> dict[str, Any]:
    """Return the counters of a model's step, as they were before the evaluation at which it was saved."""
    counters = TrainingState().state_dict()
    if (folder / STATUS_NAME).exists():
        status = read_status(folder)
        counters |= {name: status[name] for name in counters if name in status}
        if counters["evaluations_done"] and counters["last_evaluation_step"] == counters["global_step"]:
            counters["evaluations_done"] -= 1
            counters["eval_global_step"] -= counters["val_step"]
    return counters


def _describe(published: Published) -> str:
    model = f"model {published.folder}" if published.is_model else ""
    step = f"step {published.step:,}" if published.digest else ""
    return ", ".join(filter(None, (step, model)))


def _describe_values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.5g}" for name, value in values.items()) or "no results"


def _read_last(history: Path) -> Mapping[str, Any]:
    """Return the last complete line of a history; empty if there is none."""
    with history.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().split(b"\n")
    for line in reversed(lines):
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                return row
    return {}


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
