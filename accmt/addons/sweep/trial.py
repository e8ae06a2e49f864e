"""A trial of a sweep, in the user's program.

`accmt sweep` starts the program as it is, with the path of `trial.json` in the environment. The Trainer is created with
the trial's hyper-parameters, arguments and folders, and `fit` writes how the trial ended to `outcome.json`.

A trial never runs beside itself. The worker that starts it holds the lock of the trial's folder; the main process of
the program holds that of the folder `process` in it. If the worker is gone, the program stops itself as after SIGTERM:
at the next step, with a checkpoint. A program that is started after it waits until then.
"""

from __future__ import annotations

import atexit
import copy
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accmt.addons.fork.lineage import FORK_FILE, Origin, note_fork
from accmt.addons.launches import TRIAL_VARIABLE
from accmt.addons.run_folders import is_locked
from accmt.addons.trackers.spec import find_specs
from accmt.callbacks import Callback
from accmt.errors import (
    ArgumentError,
    ArgumentFileError,
    HyperParameterError,
    NonFiniteError,
    Preempted,
    ProcessFailedError,
    fail,
    nearest,
)
from accmt.files import FolderLock, FolderTakenError, dumps, loads, write_text
from accmt.messages import say, warn, warn_once
from accmt.options.checks import number_in
from accmt.options.hyperparameters import HyperParameters
from accmt.processes import on_main_process, run_on_main_process
from accmt.registry import FIT_VARIABLE
from accmt.saving.model_folder import write_hps
from accmt.secrets import hide

STORAGE_VARIABLE = "ACCMT_SWEEP_STORAGE"
TRIAL_FILE = "trial.json"
OUTCOME_FILE = "outcome.json"
PROCESS_FOLDER = "process"
FIT_FILE = ".fit"
"""Written when `fit` begins, with the token of the start."""

_WATCH_S = 1.0
_OUTAGE_S = 600.0


@dataclass(frozen=True)
class Plan:
    """What a worker asks of a trial: the content of `trial.json`.

    Attributes:
        folder: The trial's folder.
        token: Identifies the start of the program that this is for; "" if the trial is a function in the worker.
        sweep: The name of the sweep, and its folder.
        number: The number of the trial.
        hps: Hyper-parameters by dotted key.
        trainer: Arguments of the Trainer by dotted key.
        objectives: Names of the objectives, with whether higher is better.
        takes: Which evaluation counts: "best" or "last".
        seed: The seed of a Trainer that has none.
        parent: The trial that this one was forked from, as `number`, `step` and `values`; None for others.
        stop_at: The optimizer step at whose evaluation, or the next one, the trial pauses; None: at no step.
        spec: The sweep as it was written, to open its study.
    """

    folder: Path
    token: str
    sweep: str
    sweep_folder: Path
    number: int
    hps: Mapping[str, Any]
    trainer: Mapping[str, Any]
    objectives: Mapping[str, bool]
    takes: str
    seed: int
    parent: Mapping[str, Any] | None
    stop_at: int | None
    spec: Mapping[str, Any]

    def write(self) -> None:
        """Write it to the trial's folder."""
        paths = {"folder": str(self.folder), "sweep_folder": str(self.sweep_folder)}
        write_text(self.folder / TRIAL_FILE, dumps({**vars(self), **paths}, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read it from a file."""
        read = loads(path.read_text())
        return cls(**{**read, "folder": Path(read["folder"]), "sweep_folder": Path(read["sweep_folder"])})

    @property
    def title(self) -> str:
        """The name of the trial's run."""
        return f"{self.sweep}-{self.number:04d}"

    @property
    def where(self) -> str:
        """The trial's name for messages."""
        return f"trial {self.number} of sweep {self.sweep!r}"

    @property
    def has_result(self) -> bool:
        """Whether the trial has ended, and not because of an error in `fit`."""
        file = self.folder / OUTCOME_FILE
        return file.exists() and loads(file.read_text())["state"] not in ("failed", "diverged")

    def write_outcome(self, state: str, **facts: Any) -> None:
        """Write how the trial ended, once."""
        if not (self.folder / OUTCOME_FILE).exists():
            write_text(self.folder / OUTCOME_FILE, dumps({"state": state, **facts}, indent=2) + "\n")


_fitted: set[str] = set()  # tokens of trials whose `fit` was called
_watched: set[str] = set()


def _read_plan() -> Plan:
    return Plan.read(Path(os.environ[TRIAL_VARIABLE]))


def trial_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Trainer's arguments with those of the trial in their place."""
    plan = _read_plan()
    is_trial = os.environ.get(FIT_VARIABLE) == "sweep_fit"  # and not `accmt replay` of one
    if is_trial:
        _begin(plan)
    changed = dict(arguments)
    changed["hps_config"] = HyperParameters.from_config(changed["hps_config"], plan.hps)
    for key, value in plan.trainer.items():
        name, *keys = key.split(".")
        changed[name] = _set_in(changed[name], keys, value)
    if changed["checkpointer"] is not None:
        got, do = "a custom checkpointer, which all trials would share", 'checkpoint="s3://...", or leave it out'
        raise fail(
            ArgumentError,
            "Trainer(checkpointer=...)",
            got=got,
            expected="checkpoints in a folder or at a URL of each trial",
            do=do,
        )
    model_path, checkpoint = str(changed["model_path"]), changed["checkpoint"]
    logging_dir, own = str(changed["logging_dir"]), changed["callbacks"]
    options = changed["tracker_options"]
    options = {} if options is None else dict(options) if isinstance(options, Mapping) else options.to_dict()
    config = {**(options.get("config") or {}), "sweep": plan.sweep, "trial": plan.number}
    tracker_kwargs = dict(changed["tracker_kwargs"])
    for spec in find_specs(changed["log_with"]):  # one group for the sweep in W&B, and a tag in MLflow
        given = {**spec.init_kwargs, **tracker_kwargs.get(spec.name, {})}
        if spec.name == "wandb":
            tracker_kwargs["wandb"] = {"group": plan.sweep, **given}
        elif spec.name == "mlflow":
            tracker_kwargs["mlflow"] = {**given, "tags": {"sweep": plan.sweep, **(given.get("tags") or {})}}
    changed.update(
        track_name=changed["track_name"] or Path(model_path).name,
        model_path=f"{model_path}/{plan.title}" if "://" in model_path else plan.folder / "model",
        checkpoint=f"{checkpoint}/{plan.title}" if "://" in str(checkpoint) else plan.folder / "checkpoints",
        resume="auto",
        run_name=plan.title,
        logging_dir=logging_dir if "://" in logging_dir else plan.sweep_folder / "logs",
        seed=plan.seed if changed["seed"] is None else changed["seed"],
        tracker_options={**options, "config": config},
        tracker_kwargs=tracker_kwargs,
        callbacks=[
            *(own if isinstance(own, list | tuple) else [] if own is None else [own]),
            *([TrialReports(plan)] if is_trial else []),
        ],
    )
    return changed


def _set_in(value: Any, keys: list[str], new: Any) -> Any:
    """Return an argument with a new value, or with a new value of an entry in it."""
    if not keys:
        return new
    held = dict(value) if isinstance(value, Mapping) else {} if value is None else value.to_dict()
    first, *others = [number_in(key) if number_in(key) is not None else key for key in keys]
    return {**held, first: _set_in(held.get(first), [*map(str, others)], new)}


# ---- The program


@on_main_process
def _begin(plan: Plan) -> None:
    """Wait until no other start of this trial runs, and watch the worker; end if the trial is another program's now."""
    if not plan.token or plan.token in _watched:
        return
    _watched.add(plan.token)
    (plan.folder / PROCESS_FOLDER).mkdir(exist_ok=True)
    is_waiting = False
    while True:
        try:
            FolderLock.take(plan.folder / PROCESS_FOLDER)  # until this process ends
            break
        except FolderTakenError as holder:
            if not is_waiting:
                say(f"trial {plan.number} waits for {holder}, which still runs it")
            is_waiting = True
            time.sleep(_WATCH_S / 4)
        if not _is_wanted(plan):
            break
    if not _is_wanted(plan):
        raise SystemExit(1)
    threading.Thread(target=_watch, args=(plan,), name="accmt-sweep", daemon=True).start()
    atexit.register(_record_error, plan)


def _record_error(plan: Plan) -> None:
    """Write why the program ended without `fit`, whose own errors are written there; a kill writes nothing."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, Exception) and plan.token not in _fitted:
        write_failure(plan, error)


def _is_wanted(plan: Plan) -> bool:
    """Return whether this is the newest start of a trial that has not ended."""
    return not (plan.folder / OUTCOME_FILE).exists() and Plan.read(plan.folder / TRIAL_FILE).token == plan.token


def _watch(plan: Plan) -> None:
    """Stop this process as after SIGTERM when its worker is gone, or has given the trial to another one."""
    while is_locked(plan.folder) and Plan.read(plan.folder / TRIAL_FILE).token == plan.token:
        time.sleep(_WATCH_S)
        if (plan.folder / OUTCOME_FILE).exists():
            return
    warn(f"the worker of trial {plan.number} is gone: the trial stops, and `accmt sweep` continues it")
    os.kill(os.getpid(), signal.SIGTERM)


def write_failure(plan: Plan, error: Exception, **facts: Any) -> None:
    """Write that a trial failed, and whether every other one would fail for the same reason."""
    is_of_all = isinstance(error, HyperParameterError | ArgumentError)
    if isinstance(error, ArgumentFileError):  # of a path that the trial has, or of a hub that does not answer
        is_of_all = False
    plan.write_outcome("failed", error=f"{type(error).__name__}: {error}", is_of_all=is_of_all, **facts)


# ---- The run


def fit_trial(trainer: Any, module: Any, *data: Any, **others: Any) -> Any:
    """Run `trainer.fit` as the trial, and write how it ended.

    Processes: collective.
    """
    plan = _read_plan()
    outcome = plan.folder / OUTCOME_FILE
    if (plan.token and plan.token in _fitted) or outcome.exists():
        got, do = "a second call of `fit`", "put the other training into another program"
        second = fail(
            ArgumentError, plan.where, got=got, expected="one training per trial, whose objective counts", do=do
        )
        if trainer.is_main and plan.has_result:
            outcome.unlink()
            write_failure(plan, second)
        raise second
    _fitted.add(plan.token)
    if trainer.is_main:
        write_text(plan.folder / FIT_FILE, plan.token)
    reports = next(one for one in trainer.settings.running.callbacks if isinstance(one, TrialReports))
    mode = os.environ.pop(FIT_VARIABLE)
    try:
        state = trainer.fit(module, *data, **others)
        if trainer.is_main:
            reports.write_end()
        return state
    except ProcessFailedError:  # the process that failed writes why, and one that was killed is started again
        raise
    except NonFiniteError as error:
        if trainer.is_main:
            plan.write_outcome("diverged", error=str(error), **reports.facts())
        raise
    except Exception as error:
        write_failure(plan, error, **reports.facts())
        raise
    finally:
        os.environ[FIT_VARIABLE] = mode
        reports.close()


class TrialReports(Callback):
    """Reports the objective after each evaluation, and ends training where the trial is pruned.

    Its state is part of the checkpoints, so a resumed trial has exactly the reports up to where it resumes.
    """

    order = math.inf  # after the best model was saved

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._reports: list[tuple[int, list[float]]] = []
        self._logged: dict[str, float] = {}
        self._pruned_at: int | None = None
        self._study: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TrialReports:
        return copy.copy(self)

    def state_dict(self) -> dict[str, Any]:
        reports = [[step, values] for step, values in self._reports]
        return {
            "trial": self._plan.number,
            "reports": reports,
            "logged": dict(self._logged),
            "pruned_at": self._pruned_at,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["trial"] != self._plan.number:  # of the member that this one was forked from
            return
        self._reports = [(step, list(values)) for step, values in state["reports"]]
        self._logged, self._pruned_at = dict(state["logged"]), state["pruned_at"]

    def on_fit_start(self) -> None:
        """Check that the run has the trial's values, and end a run that was resumed after it was pruned."""
        plan, run = self._plan, self.trainer.run
        used = run.settings.hps.to_dict()["hps"]
        for key, wanted in plan.hps.items():
            first = key.split(".")[0].replace("optimizer", "optim")
            got = repr(_find(used, key))
            if first in run.set_by_module:
                got = f"{type(self.module).__name__}.get_{'optimizer' if first == 'optim' else 'scheduler'}"
            elif key == "batch_size" and run.loaders.takes_user_batches:
                size = run.loaders.user_batch_size
                if size == (wanted[0] if isinstance(wanted, list | tuple) else wanted):
                    continue
                got = f"a DataLoader with batch_size={size}"
            elif _is_same(_find(used, key), wanted):
                continue
            got = f"{got}: the script sets it itself"
            do = f"leave {key} to the hyper-parameters, or sweep script.<flag>"
            raise fail(
                ArgumentError, f"{key} of {plan.where}", got=got, expected=f"{wanted!r}, the trial's value", do=do
            )
        run_on_main_process(self._write_origin)
        if self._pruned_at is not None or self._has_reached_stop:
            self.trainer.should_stop = True
            run.interruption.pass_point()

    def _write_origin(self) -> None:
        """Write the hyper-parameters to the trial's folder, and in a fork, which run it comes from."""
        plan, run, parent = self._plan, self.trainer.run, self._plan.parent
        hps = run.settings.hps.to_dict()
        write_hps(plan.folder, hps)
        folder = run.tracking.run_folder
        if parent is None or (folder / FORK_FILE).exists():
            return
        name = f"{plan.sweep}-{parent['number']:04d}"
        before, now = parent["values"], {**plan.hps, **{f"trainer.{key}": value for key, value in plan.trainer.items()}}
        parent_folder = folder.absolute().with_name(name)
        origin = Origin(
            run_name=run.tracking.run_name,
            run_folder=str(folder.absolute()),
            parent={"run_name": name, "run_folder": str(parent_folder), "run_ids": {}, "taken": []},
            step=parent["step"],
            checkpoint_step=parent["step"],
            hps=hide(hps["hps"]),
            arguments={},
            parent_hps={},
            changes=[f"{key}: {before[key]} -> {now[key]}" for key in now if before.get(key) != now[key]],
            model_path=str(run.settings.model_folder),
        )
        note_fork(parent_folder, folder.absolute(), {"step": origin.step, "changes": origin.changes})
        origin.write(folder)

    def on_log(self, values: Mapping[str, Any]) -> None:
        """Keep the newest value of an objective that is logged between evaluations."""
        self._logged.update({name: float(value) for name, value in values.items() if name in self._plan.objectives})

    def on_evaluation_end(self, metrics: Mapping[str, float]) -> None:
        """Report the objective, and end training if the trial is pruned."""
        if self.state.last_evaluation_step is None:  # before training
            return
        step = self.state.global_step
        values = [self._read(name, metrics) for name in self._plan.objectives]
        self._reports = [(at, held) for at, held in self._reports if at != step] + [(step, values)]
        if len(values) == 1 and run_on_main_process(lambda: self._report(step, values[0])):
            self._pruned_at = step
            say(f"trial {self._plan.number} is pruned at step {step}")
            self.trainer.should_stop = True
        elif self._has_reached_stop:
            self.trainer.should_stop = True

    @property
    def _has_reached_stop(self) -> bool:
        stop = self._plan.stop_at
        return stop is not None and bool(self._reports) and self._reports[-1][0] >= stop

    def _read(self, name: str, metrics: Mapping[str, float]) -> float:
        """Return the value of an objective; of several validation sets, their mean."""
        key = name.replace("@", "__")
        loss = self.trainer.settings.tracking.val_loss_metric_name
        key = key.replace("valid_loss", loss, 1) if key.startswith("valid_loss") else key
        of_sets = [value for each, value in metrics.items() if each.startswith(f"{key}__")]
        if key in metrics or of_sets:
            return float(metrics[key]) if key in metrics else math.fsum(of_sets) / len(of_sets)
        if name in self._logged:
            return self._logged[name]
        known = sorted({*metrics, *self._logged})
        near = nearest(name, known)
        do = f"write `objective: {near}`" if near else f"return it from validation_step, or self.log({name!r}, value)"
        do = do if metrics else "pass validation data to fit"
        where = f"the objective {name!r} of {self._plan.where}"
        raise fail(
            ArgumentError,
            where,
            got=f"an evaluation with {', '.join(known) or 'nothing'}",
            expected=f"{name!r} in it",
            do=do,
        )

    def _report(self, step: int, value: float) -> bool:
        """Report on the main process; a database that cannot be reached is waited for."""
        from accmt.addons.sweep.spec import read_spec  # imports optuna, only here
        from accmt.addons.sweep.study import OUTAGES, SweepStudy

        storage, deadline = os.environ.get(STORAGE_VARIABLE), time.monotonic() + _OUTAGE_S
        while True:
            try:
                if self._study is None:
                    written = {**self._plan.spec, **({} if storage is None else {"storage": storage})}
                    self._study = SweepStudy(read_spec(written, checks_keys=False))
                return bool(self._study.report(self._plan.number, step, value))
            except OUTAGES as error:
                if time.monotonic() > deadline:
                    warn(f"trial {self._plan.number} stops: the database of the sweep cannot be reached: {error}")
                    raise Preempted(1) from error  # it continues from its checkpoint
                warn_once(f"the trial waits for the database of the sweep: {error}", about="the database of the sweep")
                time.sleep(_WATCH_S)

    def close(self) -> None:
        """Close the connection to the study."""
        if self._study is not None:
            self._study.close()
            self._study = None

    def facts(self) -> dict[str, Any]:
        """Return what the trial has reached so far."""
        facts: dict[str, Any] = {"pruned_at": self._pruned_at}
        run = getattr(getattr(self, "trainer", None), "_run", None)
        if run is not None:
            folder = run.settings.model_folder
            facts |= {"steps": run.state.global_step, "seconds": round(run.clock.elapsed_s, 3)}
            facts |= {"run_folder": str(run.tracking.run_folder), "model": str(folder) if folder.is_dir() else None}
        finite = [report for report in self._reports if all(map(math.isfinite, report[1]))]
        if not finite:
            return facts
        step, values = finite[-1]
        if self._plan.takes == "best":
            [maximizes] = self._plan.objectives.values()
            step, values = (max if maximizes else min)(finite, key=lambda report: report[1][0])
        return {**facts, "step": step, "values": values}

    def write_end(self) -> None:
        """Write how a run that came to its end ended."""
        plan, facts = self._plan, self.facts()
        if not self._reports:
            do = "pass validation data to fit, and evaluate at least once"
            error = fail(ArgumentError, plan.where, got="no evaluation", expected="one with the objective", do=do)
            write_failure(plan, error, **facts)
        elif "values" not in facts:
            plan.write_outcome("diverged", error="the objective was not finite in any evaluation", **facts)
        else:
            run = self.trainer.run
            state = "complete" if self._pruned_at is None else "pruned"
            if self._has_reached_stop and self._pruned_at is None and not run.cadence.is_finished(run.state):
                state, facts["stop_at"] = "paused", plan.stop_at
            plan.write_outcome(state, **facts)


def _find(values: Any, key: str) -> Any:
    for part in key.replace("optimizer.", "optim.", 1).split("."):
        if isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        else:
            values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _is_same(used: Any, wanted: Any) -> bool:
    """Return whether a recorded value is the wanted one; a component's name stands for its `type`."""
    if isinstance(used, Mapping) and isinstance(wanted, str):
        return wanted in (used.get("type"), used.get("path"), used.get("data"))
    if isinstance(used, Mapping) and isinstance(wanted, Mapping):
        return all(_is_same(used.get(key), value) for key, value in wanted.items())
    if isinstance(used, list | tuple) and isinstance(wanted, list | tuple):
        return list(used) == list(wanted)
    if isinstance(used, list | tuple) and used and all(one == used[0] for one in used):  # one batch size for all
        return bool(used[0] == wanted)
    return bool(used == wanted) or (wanted in (None, -1, False) and used in (None, -1, False))
