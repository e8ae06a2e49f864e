"""Evaluates the checkpoints of a run in the user's program, in place of `Trainer.fit`.

Each checkpoint is restored as for a resumed run, and then evaluated as the run itself would have done at this step. The
rows go to a history of their own, in the folder `evaluations` of the run folder: each file has one writer. What is done
is recorded after each checkpoint; an evaluation that a kill has interrupted is repeated, and its rows are superseded.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from accmt.addons.best_models import BestModels
from accmt.addons.evaluate_beside.program import Request
from accmt.addons.fork.beginning import find_fork, settings_at
from accmt.addons.hub import PushToHub
from accmt.callbacks import build_callbacks
from accmt.checkpoint.manifest import Checkpoint, Manifest, examine, read_manifest
from accmt.checkpoint.retention import list_published
from accmt.engine.accelerator import build_accelerator
from accmt.errors import ArgumentError, explain
from accmt.files import current_folder, dumps, is_locked, loads, write_text
from accmt.loop.evaluation import evaluate_and_count
from accmt.messages import warn
from accmt.options import Settings
from accmt.processes import broadcast_object, is_main_process, run_on_main_process
from accmt.recovery.restart import Recovery, free_finished
from accmt.recovery.shutdown import watching
from accmt.registry import FIT_VARIABLE
from accmt.run import Run
from accmt.setup.build import build_run
from accmt.setup.datasets import UserData
from accmt.setup.inputs import check_metrics
from accmt.setup.model import detach_run
from accmt.setup.same_on_processes import reporting_failed_setup
from accmt.setup.torch_flags import running, working
from accmt.state import TrainingState
from accmt.tracking import Tracking, resolve_trackers, sync_run
from accmt.tracking.delivery_state import DeliveryFile
from accmt.tracking.history import EVALUATIONS_FOLDER, HISTORY_FILE, read_rows
from accmt.tracking.tracking import RunStatus
from accmt.trainer.modules import as_module

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
    check_metrics(own.settings)
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
        raise ArgumentError(explain(where, f"a training of {model_path}", expected, do))
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
            settings.tracking, ledger=False, monitor=replace(settings.tracking.monitored, record_goodput=False)
        ),
        running=replace(
            settings.running,
            callbacks=[one for one in callbacks if not isinstance(one, publishing)],
            verbose=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            profiler=None,
            max_time=None,
        ),
        handling=replace(settings.handling, handlers=None),
    )


# ---- What is done


@dataclass
class _State:
    """What is recorded after each evaluation.

    Attributes:
        evaluated: The checkpoints, oldest first: step, digest of the manifest, and the line of the history before.
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

    def go_back(self, step: int) -> bool:
        """Forget the evaluations from a step on: the run has made these steps again. Returns whether there were any."""
        gone = [one for one in self.evaluated if one["step"] >= step]
        if gone:
            self.line = min(one["line"] for one in gone)
            self.evaluated = [one for one in self.evaluated if one["step"] < step]
            self.step = self.evaluated[-1]["step"] if self.evaluated else None
        return bool(gone)


@dataclass(frozen=True)
class _Next:
    """What to do next: evaluate a checkpoint, end, or, with neither, wait."""

    folder: Path | None = None
    step: int = 0
    digest: str = ""
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

    def run(self) -> None:
        """Evaluate until there is nothing left.

        Processes: collective.
        """
        build_accelerator(self._trainer.settings.running)  # the process group, for the first decision
        count = 0
        try:
            while not (following := run_on_main_process(self._find_next)).is_over:
                if following.folder is None:
                    time.sleep(min(_POLL_S, self._request.wait_s))
                    continue
                count += self._evaluate(following)
        except BaseException as error:
            self._close(self._find_status())
            if isinstance(error, KeyboardInterrupt):
                _print("stopped; the same command continues with the checkpoint that was interrupted")
                raise SystemExit(_AFTER_CTRL_C) from None
            raise
        status = broadcast_object(self._find_status())
        self._close(status)
        if is_main_process():
            if status != "RUNNING":
                self._deliver_rest()
            _print(f"{count} checkpoint{'s' if count != 1 else ''} evaluated")

    def _find_next(self) -> _Next:
        is_over = not self._request.watches or self._is_run_over()  # before the list: nothing is published afterwards
        state = self._state if self._tracking is not None else _State.read(self._folder)
        done = {one["digest"] for one in state.evaluated} | self._skipped
        found = []
        for folder in list_published(Path(self._request.checkpoints)):
            manifest = read_manifest(folder)
            if not isinstance(manifest, Manifest) or manifest.info.get("run_name") != self._request.run_name:
                continue
            if (digest := manifest.digest) not in done:
                found.append((manifest.sequence, _Next(folder, manifest.step, digest)))
        return min(found, key=lambda one: one[0])[1] if found else _Next(is_over=is_over)

    def _is_run_over(self) -> bool:
        """Return whether the run is complete, or has stopped so long ago that nobody resumes it."""
        history = self._run_folder / HISTORY_FILE
        if _read_last(history).get("status") == "FINISHED":
            return True
        silent_s = time.time() - history.stat().st_mtime
        return silent_s > self._request.wait_s and not is_locked(self._run_folder)

    def _find_status(self) -> RunStatus:
        """Return the status of the run for trackers."""
        status: RunStatus = _read_last(self._run_folder / HISTORY_FILE).get("status", "KILLED")
        return "RUNNING" if is_locked(self._run_folder) else status

    def _evaluate(self, following: _Next) -> bool:
        """Evaluate a checkpoint; return whether it still existed."""
        held = run_on_main_process(lambda: self._hold(following))
        if held is None:
            return False
        try:
            self._begin(following.step)
            before = 0 if self._tracking is None else int(self._tracking.state_dict()["line"])
            values = self._evaluate_weights(held)
        finally:
            run_on_main_process(lambda: shutil.rmtree(held.parent, ignore_errors=True))
        run_on_main_process(lambda: self._record(following, before))
        self._state = broadcast_object(self._state)
        if is_main_process():
            shown = ", ".join(f"{name} {value:.5g}" for name, value in values.items())
            _print(f"step {following.step:,}: {shown or 'no results'}")
        return True

    def _hold(self, following: _Next) -> Path | None:
        """Link the files of a checkpoint into a folder of our own, so that the run may delete it meanwhile.

        Processes: main only.
        """
        checkpoint = following.folder
        if checkpoint is None:
            return None
        place = checkpoint.parent.with_name(f"{checkpoint.parent.name}.evaluated")
        shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
        held = place / checkpoint.name
        try:
            _link(checkpoint, held)
            found = examine(held)
        except FileNotFoundError:
            found = None
        if isinstance(found, Checkpoint) and found.manifest.digest == following.digest:
            return held
        shutil.rmtree(place, ignore_errors=True)
        if found is None or isinstance(found, Checkpoint) or not checkpoint.exists():
            reason = "the run has deleted it meanwhile; checkpoint_options={'max_checkpoints': 3} keeps more"
        else:
            reason = found.reason
        self._skipped.add(following.digest)
        warn(f"step {following.step:,} is not evaluated: {reason}")
        return None

    def _begin(self, step: int) -> None:
        """Open the history and the trackers, unless they are open and the run has not gone back since."""
        if self._tracking is not None:
            if not self._state.go_back(step):
                return
            self._close("RUNNING")
        tracking = self._build_tracking()
        run_on_main_process(lambda: self._start(tracking, step))
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

    def _start(self, tracking: Tracking, step: int) -> None:
        """Start the trackers, in which the rows are added to those of the run.

        Processes: main only.
        """
        if self._tracking is None:
            self._state = _State.read(self._folder)
            self._state.go_back(step)
            self._note_rule()
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

    def _note_rule(self) -> None:
        state, rule = self._state, self._request.save_best
        if rule is not None and state.evaluated and rule != state.save_best:
            what = f"{len(state.evaluated)} checkpoints were evaluated before without --save-best {rule}"
            warn(f"{what}: only later ones can be the best; to evaluate all again, delete {self._folder}")

    def _evaluate_weights(self, checkpoint: Path) -> dict[str, float]:
        """Restore a checkpoint, and evaluate as the run would have done after this step.

        Processes: collective.
        """
        trainer = self._trainer
        trainer.state, trainer._run, trainer.chosen_checkpoint = TrainingState(), None, checkpoint
        with reporting_failed_setup():
            run: Run = build_run(trainer, self._module, self._user_data, Recovery())
        trainer._run = run
        try:
            self._restore(run)
            run.saver.claim(run)
            if not (run.val_loaders or run.features.add_results):
                got = "a program that passes no validation data to `fit`"
                do = 'pass them to `fit`, and Trainer(evaluate_every_n_steps="never") if the run is not to use them'
                raise ArgumentError(explain(f"evaluation of {self._run_folder}", got, "validation data", do))
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

    def _record(self, following: _Next, before: int) -> None:
        state, tracked = self._state, {} if self._tracking is None else self._tracking.state_dict()
        state.evaluated.append({"step": following.step, "digest": following.digest, "line": before})
        state.line, state.step, state.save_best = tracked["line"], tracked["step"], self._request.save_best
        state.write(self._folder)

    def _close(self, status: RunStatus) -> None:
        if self._tracking is not None:
            self._tracking.finish(status)

    def _deliver_rest(self) -> None:
        """Deliver the rows to the trackers that had to wait for the end of the run."""
        if self._tracking is not None and self._tracking.held_back():
            for one in sync_run(self._folder):
                if one.problem is not None:
                    got = f"{one.num_left} rows not delivered ({one.problem})"
                    do = f"accmt sync {self._folder}"
                    warn(explain(f"the tracker {one.tracker}", got, "all rows delivered", do))


def _evaluate_as_fit(run: Run) -> dict[str, float]:
    state = run.state
    if state.train_step == 0 and state.epoch > 0:  # at the end of an epoch, fit evaluates before it counts the epoch
        state.epoch -= 1
        state.now.is_last_training_batch = True
    state.now.fn, state.now.status, state.now.stage = "fit", "running", "train"
    with run.features.running(), run.trained.noting_new_layers(), watching(run):
        run.module.tracker = next(iter(run.tracking.loggers), None)
        for hook in (*run.hooks.on_resume, *run.hooks.on_fit_start):
            hook()
        run.stepper.begin_training()
        run.trained.begin()
        values = dict(evaluate_and_count(run))
        run.stepper.end_training()
    state.now.status = "finished"
    return values


def _link(source: Path, target: Path) -> None:
    """Copy a folder by hard links, or as files where the file system has none."""
    for path in sorted(source.rglob("*")):
        copied = target / path.relative_to(source)
        if path.is_dir():
            copied.mkdir(parents=True, exist_ok=True)
            continue
        copied.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, copied)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copyfile(path, copied)


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
