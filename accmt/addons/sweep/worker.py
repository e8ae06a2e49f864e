"""Runs the trials of a sweep: `Sweep`, behind `accmt sweep`."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from accmt.addons.fork import fork_checkpoint
from accmt.addons.launches import TRIAL_VARIABLE
from accmt.addons.sweep.claims import Claims, LeasedClaims, trial_folder
from accmt.addons.sweep.results import Lines, SweepResult, TrialResult, build_page
from accmt.addons.sweep.spec import SCRIPT, TRAINER, SweepSpec, read_spec
from accmt.addons.sweep.study import OUTAGES, SweepStudy, fork_of, outcome_of, parent_of
from accmt.addons.sweep.trial import FIT_FILE, OUTCOME_FILE, STORAGE_VARIABLE, TRIAL_FILE, Plan
from accmt.checkpoint.retention import list_published
from accmt.errors import ArgumentError, ArgumentFileError, fail
from accmt.files import loads, place_beside, write_text
from accmt.processes import num_processes
from accmt.registry import ARGUMENTS_VARIABLE, FIT_VARIABLE

_POLL_S = 0.05
_OTHERS_S = 1.0
_SHOW_S = 2.0
_STARTS = 5  # of a trial that is interrupted again and again without progress
_STARTS_BEFORE_FIT = 2  # of a program that ends with an error before it creates a Trainer
_LAST_LINES = 20
_LOG_FILE = "output.log"
BEST = "best"
"""The link to the folder of the best trial."""

Target = Sequence[str] | Callable[..., Any]


@dataclass
class _Running:
    """A trial that runs in a program of its own."""

    plan: Plan
    slot: int
    process: subprocess.Popen[bytes] | None = None
    progress: tuple[int, ...] = ()
    starts: int = 0


class Sweep:
    """Searches hyper-parameters with a training script or function.

    A killed sweep continues where it was: call `run` again. `docs/sweeps.md` explains the search space.

    Args:
        space: The search space, by dotted key.
        objective: The name of a logged value; or a dict with its direction, "min" or "max"; or several.
        **others: The other keys of `sweep.yaml`, such as `trials=20`, `pruner="median"`, `folder="out/sweep"`.

    Raises:
        ArgumentError: Anything is invalid; the message lists every error.

    Examples:
        >>> sweep = Sweep({"optim.lr": {"log_uniform": [1e-5, 1e-3]}}, "accuracy", trials=20, name="news")
        >>> sweep.spec.objectives[0].maximizes
        True
    """

    def __init__(self, space: Mapping[str, Any] | None = None, objective: Any = None, **others: Any) -> None:
        given = {"space": space, "objective": objective, **others}
        self.spec: SweepSpec = read_spec({key: value for key, value in given.items() if value is not None})
        self._begin()

    def _begin(self) -> None:
        self._running: dict[int, _Running] = {}
        self._stop: str | None = None
        self._num_failed = 0
        self._looks_at = 0.0
        self._is_waiting = False
        self._view = Lines()
        self._shown_at = 0.0

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], **others: Any) -> Sweep:
        """Read a sweep from a YAML or JSON file.

        Args:
            path: The file.
            **others: Keys that replace those of the file.
        """
        sweep = cls.__new__(cls)
        sweep.spec = read_spec(Path(path))
        if others:
            storage = {} if sweep.spec.storage is None else {"storage": sweep.spec.storage}
            sweep.spec = read_spec({**sweep.spec.source, **storage, **others})
        sweep._begin()
        return sweep

    def result(self) -> SweepResult:
        """Return the trials so far."""
        with closing(SweepStudy(self.spec)) as study:
            return self._collect(study)

    def report(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write an HTML page about the trials so far, which needs no network, and return its path.

        Args:
            path: The file; None: `report.html` in the sweep's folder.
        """
        file = self.spec.folder / "report.html" if path is None else Path(path)
        with closing(SweepStudy(self.spec)) as study:
            write_text(file, build_page(self.spec, study.optuna_study(), self._collect(study)))
        return file

    def run(self, target: Target, *, view: Lines | None = None) -> SweepResult:
        """Run trials until the budget is spent, and return them.

        Args:
            target: The command that starts the training script, such as `["python", "train.py"]`; or a function that
                trains once. It may accept the values of `script.<name>` keys as keyword arguments. Functions run in
                this process, one at a time.
            view: How the trials are shown meanwhile; None: a line for each that ends.

        Raises:
            ArgumentError: The study cannot be used, or no trial can succeed.
            KeyboardInterrupt: After Ctrl-C; the running trials were stopped with a checkpoint.
        """
        if num_processes() > 1:
            do = (
                "run it in one process, which launches the trials: accmt sweep sweep.yaml -- accmt launch -N 2 train.py"
            )
            raise fail(ArgumentError, "Sweep.run", got=f"{num_processes()} processes", expected="one process", do=do)
        if callable(target) and self.spec.parallel > 1:
            got, do = f"parallel={self.spec.parallel} with a function", "pass the command of a script, or parallel=1"
            raise fail(ArgumentError, "Sweep.run", got=got, expected="one trial at a time", do=do)
        with closing(SweepStudy(self.spec)) as study:
            if study.begin() and (trials := self.spec.folder / "trials").exists():
                trials.rename(place_beside(trials))
            self._begin()
            self._view = Lines() if view is None else view
            result = self._collect(study, self._run_trials(study, target))
        if result.best is not None:
            link = self.spec.folder / f".{BEST}"
            link.unlink(missing_ok=True)
            link.symlink_to(result.best.folder.relative_to(self.spec.folder))
            link.replace(self.spec.folder / BEST)
        if self._stop is not None:
            raise KeyboardInterrupt(f"{self._stop}: the sweep stops; the same command continues it")
        return result

    def _run_trials(self, study: SweepStudy, target: Target) -> str:
        """Run trials until the sweep ends, and return why; "" if its budget is spent."""
        claims = Claims(self.spec.folder) if self.spec.storage is None else LeasedClaims(self.spec)
        why: str | None = None
        with self._hearing_signals(), self._killing_lost(claims):
            try:
                while why is None:
                    why = self._advance_or_wait(study, claims, target)
            finally:
                for running in self._running.values():  # they stop with a checkpoint
                    _signal(running, signal.SIGTERM)
                for running in self._running.values():
                    if running.process is not None:
                        running.process.wait()
                self._running = {}
                claims.close()
                self._view.close()
        return why

    # ---- Which trial runs next

    def _advance_or_wait(self, study: SweepStudy, claims: Claims, target: Target) -> str | None:
        try:
            why = self._advance(study, claims, target)
        except OUTAGES as error:
            if not self._is_waiting:
                self._view.say(f"the sweep waits for its database: {error}")
            self._is_waiting = True
            time.sleep(_OTHERS_S)
            return None
        self._is_waiting = False
        return why

    def _advance(self, study: SweepStudy, claims: Claims, target: Target) -> str | None:
        """Start what can be started, and look after what runs; return why the sweep ends, "" for its regular end."""
        for number in self._kill_lost(claims):
            self._view.say(f"the lease of trial {number} is lost: it stops, and another worker continues it")
            del self._running[number]
            claims.release(number)
        while self._stop is None and len(self._running) < self.spec.parallel and time.monotonic() >= self._looks_at:
            found = self._next(study, claims)
            if found is not None:
                why = self._start(study, claims, target, found)
                if why is not None:
                    return why
                continue
            self._looks_at = time.monotonic() + _OTHERS_S  # another worker that runs trials may die
            if not self._running and all(trial.state.is_finished() for trial in study.trials()):
                return ""
        for running in list(self._running.values()):
            if running.process is None or running.process.poll() is not None:  # None: the database was away
                why = self._look_at_end(study, claims, target, running)
                if why is not None:
                    return why
        if self._stop is not None and not self._running:
            return self._stop
        if time.monotonic() >= self._shown_at:
            self._shown_at = time.monotonic() + _SHOW_S
            self._view.show(self._collect(study))
        time.sleep(_POLL_S)
        return None

    def _kill_lost(self, claims: Claims) -> list[int]:
        """Kill the trials that this worker may no longer run, and return their numbers."""
        lost = [number for number in claims.lost() if number in self._running]
        for number in lost:
            _signal(self._running[number], signal.SIGKILL)
        return lost

    @contextmanager
    def _killing_lost(self, claims: Claims) -> Iterator[None]:
        """Kill them in a thread, too: the main one may wait for an answer of the database."""
        if self.spec.storage is None:
            yield
            return
        has_ended = threading.Event()

        def watch() -> None:
            while not has_ended.wait(_OTHERS_S):
                with suppress(KeyError):  # the main thread has removed it
                    self._kill_lost(claims)

        threading.Thread(target=watch, name="accmt-lost-leases", daemon=True).start()
        try:
            yield
        finally:
            has_ended.set()

    def _next(self, study: SweepStudy, claims: Claims) -> int | None:
        """Hold the next trial and return its number; None if there is none now.

        It is one that was interrupted, one that may continue after a pause, or a new one.
        """
        if self.spec.population is not None:
            with claims.suggesting():
                study.evolve(self._set_aside, self._fork)
        for trial in study.trials():
            number = trial.number
            if not study.has_to_run(trial) or number in self._running or not claims.take(number):
                continue
            if study.has_to_run(study.trial(number)):  # now that nobody else can finish it
                return number
            claims.release(number)
        with claims.suggesting():
            # First: while others decide below, another worker's trial may pause.
            are_waiting = all(trial.state.is_finished() or study.paused(trial) is not None for trial in study.trials())
            if study.promote():  # and another worker may take the promoted trial
                waiting = (trial.number for trial in study.trials() if study.has_to_run(trial))
                return next((number for number in waiting if number not in self._running and claims.take(number)), None)
            trials, spec = study.trials(), self.spec
            outcomes = [study.spent(trial) for trial in trials]
            budget = (
                (sum(parent_of(trial) is None for trial in trials), spec.trials),
                (sum(one.get("steps", 0) for one in outcomes), spec.max_steps),
                (sum(one.get("seconds", 0.0) for one in outcomes) / 3600, spec.max_hours),
            )
            if any(limit is not None and used >= limit for used, limit in budget):
                if are_waiting and not study.evolve(self._set_aside, self._fork):
                    study.end_paused()
                return None
            number = len(trials)
            if not claims.holds(number):
                self._set_aside(number)
            if not claims.take(number):
                return None
            study.create()
        return number

    def _set_aside(self, number: int) -> None:
        """Rename the folder of a trial that is about to be created: one that exists is of a study that was deleted."""
        folder = trial_folder(self.spec.folder, number)
        if folder.exists():
            folder.rename(place_beside(folder))

    def _fork(self, parent: int, child: int) -> None:
        """Copy the newest checkpoint of a trial to a new one, unless that has one."""
        source, folder = (trial_folder(self.spec.folder, number) / "checkpoints" for number in (parent, child))
        if folder.is_dir() and list_published(folder):
            return
        published = list_published(source)
        if not published:
            got, do = f"no checkpoint in {source}", "Trainer(checkpoint_every=...), in a local folder"
            raise fail(ArgumentError, f"the fork of trial {parent}", got=got, expected="a checkpoint to fork", do=do)
        fork_checkpoint(published[-1], folder, run_name=f"{self.spec.name}-{child:04d}")

    # ---- One trial

    def _start(self, study: SweepStudy, claims: Claims, target: Target, number: int) -> str | None:
        """Start a held trial, or finish it if its program had ended already."""
        values, spec = study.values_of(study.trial(number)), self.spec
        of_script = _part_of(values, SCRIPT)
        plan = Plan(
            folder=trial_folder(spec.folder, number),
            token="" if callable(target) else secrets.token_hex(8),
            sweep=spec.name,
            sweep_folder=spec.folder,
            number=number,
            hps={key: value for key, value in values.items() if key.partition(".")[0] not in (SCRIPT, TRAINER)},
            trainer=_part_of(values, TRAINER),
            objectives={one.name: one.maximizes for one in spec.objectives},
            takes=spec.takes,
            seed=spec.seed,
            parent=fork_of(study, study.trial(number)),
            stop_at=study.stop_of(study.trial(number)),
            spec=spec.source,
        )
        slots = {running.slot for running in self._running.values()}
        running = _Running(plan, slot=next(slot for slot in range(spec.parallel) if slot not in slots))
        self._running[number] = running
        outcome = plan.folder / OUTCOME_FILE
        if outcome.exists():
            ended = loads(outcome.read_text())
            if ended["state"] != "paused" or ended["stop_at"] == plan.stop_at:
                return self._finish(study, claims, running)
            outcome.unlink()  # of an earlier pause
        if callable(target):
            plan.write()
            error = _call(target, plan, of_script, self._environment(running))
            if error is not None and plan.has_result:
                self._view.say(f"trial {number}: the function raised after fit: {error}")
            return self._finish(study, claims, running)
        self._launch(running, [*target, *_as_flags(of_script)])
        return None

    def _environment(self, running: _Running) -> dict[str, str]:
        """Return what the program of a trial finds in its environment."""
        own = {
            FIT_VARIABLE: "sweep_fit",
            ARGUMENTS_VARIABLE: "sweep_arguments",
            TRIAL_VARIABLE: str(running.plan.folder / TRIAL_FILE),
        }
        if self.spec.storage is not None:
            own[STORAGE_VARIABLE] = self.spec.storage
        return {**own, **share_of(running.slot, self.spec.parallel)}

    def _launch(self, running: _Running, command: Sequence[str]) -> None:
        running.plan.write()
        running.starts += 1
        with (running.plan.folder / _LOG_FILE).open("ab") as log:
            try:
                running.process = subprocess.Popen(
                    command,
                    env={**os.environ, **self._environment(running)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the worker, which asks the trials to stop
                )
            except OSError as error:
                do = "accmt sweep sweep.yaml -- python train.py"
                raise fail(
                    ArgumentError, "accmt sweep", got=str(error), expected="a command that can be started", do=do
                ) from None

    def _look_at_end(self, study: SweepStudy, claims: Claims, target: Any, running: _Running) -> str | None:
        """Finish a trial whose program has ended, or start it again where it was interrupted."""
        exit_code = 0 if running.process is None else running.process.returncode
        plan = running.plan
        if (plan.folder / OUTCOME_FILE).exists():
            if exit_code != 0 and plan.has_result:
                log = plan.folder / _LOG_FILE
                self._view.say(
                    f"trial {plan.number}: the program ended with exit code {exit_code} after fit: see {log}"
                )
            return self._finish(study, claims, running)
        if self._stop is not None:
            del self._running[plan.number]
            claims.release(plan.number)
            return None
        progress = _progress(plan, study.trial(plan.number))
        if progress != running.progress:
            running.progress, running.starts = progress, 1
        marker = plan.folder / FIT_FILE
        has_fitted = marker.exists() and marker.read_text() == plan.token
        is_killed = exit_code < 0 or exit_code > 128
        if exit_code == 0 and not has_fitted:
            got = "the program ended without a call of Trainer.fit"
            plan.write_outcome("failed", error=got, is_of_all=True)
        elif running.starts >= (_STARTS if has_fitted or is_killed else _STARTS_BEFORE_FIT):
            last_lines = (plan.folder / _LOG_FILE).read_text(errors="replace").splitlines()[-_LAST_LINES:]
            got = "\n".join([f"exit code {exit_code}, {running.starts} times without progress:", *last_lines])
            plan.write_outcome("failed", error=got, is_of_all=not has_fitted and not is_killed)
        else:
            self._view.say(f"trial {plan.number} was interrupted (exit code {exit_code}); it continues")
            values = study.values_of(study.trial(plan.number))
            running.plan = Plan(**{**vars(plan), "token": secrets.token_hex(8)})
            self._launch(running, [*target, *_as_flags(_part_of(values, SCRIPT))])
            return None
        return self._finish(study, claims, running)

    def _finish(self, study: SweepStudy, claims: Claims, running: _Running) -> str | None:
        """Store how a trial ended; return why the sweep ends with it."""
        plan = running.plan
        outcome = loads((plan.folder / OUTCOME_FILE).read_text())
        if outcome["state"] == "paused":
            study.pause(plan.number, outcome)
        else:
            study.finish(plan.number, outcome)
        del self._running[plan.number]
        claims.release(plan.number)
        self._looks_at = 0.0
        reached = zip(plan.objectives, outcome.get("values", ()), strict=False)
        values = ", ".join(f"{name} {value:.6g}" for name, value in reached)
        where = f" at step {outcome['step']}" if values else ""
        error = f": {outcome['error'].splitlines()[0]}" if outcome.get("error") else ""
        self._view.say(f"trial {plan.number} {outcome['state']}: {values or 'no result'}{where}{error}")
        self._num_failed = self._num_failed + 1 if outcome["state"] == "failed" else 0
        if outcome.get("is_of_all"):  # unless another trial has an evaluation
            others = [trial for trial in study.trials() if trial.number != plan.number]
            if not any(trial.intermediate_values or trial.values for trial in others):
                return f"every trial would fail like trial {plan.number}:\n{outcome['error']}"
        if self._num_failed >= self.spec.max_failures:
            return f"{self._num_failed} trials in a row failed; the last one, trial {plan.number}:\n{outcome['error']}"
        return None

    @contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        """Stop after SIGINT or SIGTERM when the trials have stopped; the second Ctrl-C kills them."""

        def hear(number: int, _: object) -> None:
            is_again, self._stop = self._stop is not None, signal.Signals(number).name
            for running in self._running.values():
                _signal(running, signal.SIGKILL if is_again and number == signal.SIGINT else signal.SIGTERM)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # ---- What came of it

    def _collect(self, study: SweepStudy, why: str | None = "") -> SweepResult:
        trials = study.trials()
        names, maximizes = [one.name for one in self.spec.objectives], self.spec.objectives[0].maximizes
        results = []
        for trial in trials:
            outcome, reports = outcome_of(trial) or study.paused(trial) or {}, trial.intermediate_values
            model = outcome.get("model")
            values, step = outcome.get("values") or (), outcome.get("step")
            if not outcome and reports:  # it is running
                step = (max if maximizes else min)(reports, key=reports.__getitem__)
                values = (reports[step],)
            result = TrialResult(
                number=trial.number,
                state=outcome.get("state", "running"),
                values=study.values_of(trial),
                objectives=dict(zip(names, values, strict=False)),
                step=step,
                steps=outcome.get("steps", max(reports, default=0)),
                seconds=outcome.get("seconds", 0.0),
                folder=trial_folder(self.spec.folder, trial.number),
                model=None if model is None else Path(model),
                error=outcome.get("error"),
                parent=parent_of(trial),
            )
            results.append(result)
        complete = [one for one in results if one.state == "complete"]
        # Those that no other complete one beats; of one objective, all with the best value.
        best = {trial.number for trial in study.optuna_study().best_trials} if complete else set()
        pareto = tuple(one for one in complete if one.number in best)
        is_finished = why == "" and bool(trials) and all(trial.state.is_finished() for trial in trials)
        ended = [one.seconds for one in results if one.state != "running"]
        left = None if self.spec.trials is None else max(0, self.spec.trials - len(ended))
        seconds = None if not ended or left is None else left * sum(ended) / len(ended) / self.spec.parallel
        return SweepResult(tuple(results), next(iter(pareto), None), pareto, is_finished, why or None, seconds)


def share_of(slot: int, parallel: int) -> dict[str, str]:
    """Return the share of this machine's cores and GPUs for one of several trials at a time, as environment variables.

    Variables that the user has set stay; the GPUs among them are divided.
    """
    if parallel == 1:
        return {}
    share = {}
    if "OMP_NUM_THREADS" not in os.environ:
        share["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // parallel))
    devices = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]
    if _VISIBLE not in os.environ:
        import torch

        devices = [str(index) for index in range(torch.cuda.device_count())]
    if devices:
        each = len(devices) // parallel
        own = devices[slot * each : (slot + 1) * each] if each else [devices[slot % len(devices)]]
        share[_VISIBLE] = ",".join(own)
    return share


_VISIBLE = "CUDA_VISIBLE_DEVICES"


def _call(
    function: Callable[..., Any], plan: Plan, of_script: Mapping[str, Any], environment: Mapping[str, str]
) -> str | None:
    """Call a user's function as a trial, and return its error, which is the trial's unless that has ended before."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        function(**of_script)
    except Exception as error:  # noqa: BLE001 - one trial's error must not end the others
        shown = f"{type(error).__name__}: {error}"
        is_of_all = isinstance(error, ArgumentError) and not isinstance(error, ArgumentFileError)
        plan.write_outcome("failed", error=shown, is_of_all=is_of_all)
        return shown
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}
    got = "the function ended without a call of Trainer.fit"
    plan.write_outcome("failed", error=got, is_of_all=True)  # only if nothing else was written
    return None


def _signal(running: _Running, number: int) -> None:
    """Send a signal to all processes of a trial."""
    if running.process is not None and running.process.poll() is None:
        try:
            os.killpg(running.process.pid, number)
        except ProcessLookupError:
            return


def _part_of(values: Mapping[str, Any], first: str) -> dict[str, Any]:
    return {key.removeprefix(f"{first}."): value for key, value in values.items() if key.startswith(f"{first}.")}


def _as_flags(of_script: Mapping[str, Any]) -> list[str]:
    """Return the flags of a script: `--name=value`; True is `--name`, and False nothing."""
    flags = []
    for name, value in of_script.items():
        if isinstance(value, bool):
            flags += [f"--{name}"] if value else []
        else:
            flags.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
    return flags


def _progress(plan: Plan, trial: FrozenTrial) -> tuple[int, ...]:
    """Return how far a trial is, to see whether it got any further: its newest report, and its newest checkpoint."""
    checkpoints = [path.name for path in (plan.folder / "checkpoints").glob("step-*")]
    numbers = [int(name.partition("-")[2]) for name in checkpoints if name.partition("-")[2].isdecimal()]
    return max(trial.intermediate_values, default=-1), max(numbers, default=-1)
