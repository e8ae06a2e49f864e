"""The study of a sweep: Optuna's, written so that a kill leaves no half of anything.

A trial is suggested on a copy of the study in memory, by a sampler that is seeded with the study's seed and the number
of the trial, and then stored in one operation. So what is suggested depends only on the trials before, and a process
that is killed leaves either a whole trial or none. A decision to prune is made on such a copy, too, and stored before
it takes effect; a trial that is resumed before that point finds it and does the same.
"""

from __future__ import annotations

import fcntl
import os
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import optuna
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from accmt.addons.sweep.spec import Parameter, SweepSpec
from accmt.data.seeding import derive_seed
from accmt.errors import ArgumentError, fail
from accmt.files import dumps, loads
from accmt.libraries.versions import release_of

STATES = {
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "diverged": TrialState.PRUNED,  # so that samplers learn that these values are bad, which they do not from failures
    "failed": TrialState.FAIL,
}

OUTAGES = (optuna.exceptions.StorageInternalError, SQLAlchemyError)
"""What is raised when a database cannot be reached."""

JOURNAL_FILE = "study.journal"
_IDENTITY = "accmt"
_OUTCOME = "accmt:outcome"
_DECISION = "accmt:decision:"
_PAUSED = "accmt:paused:"
_STOP = "accmt:stop"
_PARENT = "accmt:parent"
_ROUND = "accmt:round:"
_ROUNDS = "accmt:rounds"
_LONGEST = 2000


class SweepStudy:
    """The trials of a sweep.

    Args:
        spec: The sweep.

    Raises:
        ArgumentError: The storage cannot be opened, or its study is of another search space.
    """

    def __init__(self, spec: SweepSpec) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.spec = spec
        self.storage = _open_storage(spec)
        try:
            self._id = self.storage.get_study_id_from_name(spec.name)
        except KeyError:
            try:
                self._id = self._create()
            except optuna.exceptions.DuplicatedStudyError:  # another worker was faster
                self._id = self.storage.get_study_id_from_name(spec.name)

    def _create(self) -> int:
        kinds = StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE
        return self.storage.create_new_study([kinds[one.maximizes] for one in self.spec.objectives], self.spec.name)

    def begin(self) -> bool:
        """Claim the study for this search space, and return whether its trials were deleted.

        That is so if all of them failed: the search space may change until then.

        Raises:
            ArgumentError: It has finished trials of another search space, or was made by another release of Optuna.
        """
        identity = loads(dumps({**self.spec.identity(), "optuna": optuna.__version__}))
        stored = self.storage.get_study_user_attrs(self._id).get(_IDENTITY)
        trials = self.trials()
        if stored is None and trials:
            self._reject("trials that accmt did not make", "a study of accmt", "set another `name`")
        before = identity if stored is None else stored
        if release_of(before["optuna"])[0] != release_of(optuna.__version__)[0]:
            do = f"pip install optuna=={before['optuna']}, or set another `name`"
            self._reject(f"a study of Optuna {before['optuna']}", f"one of Optuna {optuna.__version__}", do)
        changed = [key for key in identity if key != "optuna" and before[key] != identity[key]]
        begins_again = all(trial.state == TrialState.FAIL for trial in trials)
        if changed and not begins_again:
            got = "; ".join(f"{key}: {_describe_change(before[key], identity[key])}" for key in changed)
            expected = "the search space, objective, seed, sampler and pruner with which its trials were made"
            self._reject(got, expected, "restore them, or start another sweep with another `name`")
        if begins_again and (trials or changed):
            self.storage.delete_study(self._id)
            self._id, stored = self._create(), None
        if stored is None:
            self.storage.set_study_user_attr(self._id, _IDENTITY, identity)
        return begins_again and bool(trials)

    def _reject(self, got: str, expected: str, do: str) -> NoReturn:
        raise fail(
            ArgumentError,
            f"the study of sweep {self.spec.name!r} in {self.spec.folder}",
            got=got,
            expected=expected,
            do=do,
        )

    def close(self) -> None:
        """Close the connections to a database."""
        self.storage.remove_session()
        if isinstance(self.storage, optuna.storages.RDBStorage):
            self.storage.engine.dispose()

    def optuna_study(self) -> optuna.Study:
        """Return the study as Optuna has it, for its visualizations."""
        return optuna.load_study(study_name=self.spec.name, storage=self.storage)

    def trials(self) -> list[FrozenTrial]:
        """Return all trials, in order."""
        return self.storage.get_all_trials(self._id)

    def trial(self, number: int) -> FrozenTrial:
        """Return one trial."""
        return self.storage.get_trial(self._id_of(number))

    def _id_of(self, number: int) -> int:
        """Return the id of a trial in the storage."""
        return self.storage.get_trial_id_from_study_id_trial_number(self._id, number)

    def values_of(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return the values that a trial sets, by key."""
        drawn = {one.key: one.value(trial.params[one.key]) for one in self.spec.parameters if one.key in trial.params}
        return {**self.spec.fixed, **drawn}

    def create(self) -> FrozenTrial:
        """Suggest the next trial, and store it. Only one process may do so at a time."""
        copied, changes = self._copy()
        number = len(copied.trials)
        copied.sampler = self.spec.make_sampler(number)
        trial = copied.ask()
        listed = self.spec.listed[number] if self.spec.listed else None
        values = dict(self.spec.fixed)
        for one in self.spec.parameters:
            if listed is not None:
                continue
            if one.is_active(values):
                values[one.key] = one.value(_draw(trial, one))
        template = copied.trials[number]
        if listed is not None:
            params, distributions = {}, {}
            for one in self.spec.parameters:
                if one.key in listed:
                    drawn: Any = one.distribution
                    index = [*one.choices].index(listed[one.key])
                    params[one.key], distributions[one.key] = drawn.choices[index], drawn
            template.params, template.distributions = params, distributions
        template.datetime_start = datetime.now()
        for key, value in changes().items():
            self.storage.set_study_system_attr(self._id, key, value)
        return self.storage.get_trial(self.storage.create_new_trial(self._id, template))

    def _copy(self) -> tuple[optuna.Study, Any]:
        """Return a copy of the study in memory, and a function that returns the attributes that were set on it since.

        Samplers and pruners may store what they need for later trials as attributes of the study.
        """
        memory = InMemoryStorage()
        study_id = memory.create_new_study(self.storage.get_study_directions(self._id), self.spec.name)
        before = self.storage.get_study_system_attrs(self._id)
        for key, value in before.items():
            memory.set_study_system_attr(study_id, key, value)
        for trial in self.trials():
            paused = self.paused(trial)
            if paused is not None:  # from which samplers learn as from pruned ones, but not from running ones
                trial.state, trial.values, trial.datetime_complete = TrialState.PRUNED, paused["values"], datetime.now()
            memory.create_new_trial(study_id, trial)

        def changes() -> dict[str, Any]:
            after = memory.get_study_system_attrs(study_id)
            return {key: value for key, value in after.items() if key not in before or before[key] != value}

        return optuna.load_study(study_name=self.spec.name, storage=memory), changes

    def report(self, number: int, step: int, value: float) -> bool:
        """Store the objective at an optimizer step, and return whether the trial is pruned there.

        A decision that was already made for this step is returned again.
        """
        trial = self.trial(number)
        key = f"{_DECISION}{step}"
        if trial.intermediate_values.get(step) != value:  # also if both are NaN
            self.storage.set_trial_intermediate_value(self._id_of(trial.number), step, value)
        if not self.spec.prunes:
            return False
        decision = trial.user_attrs.get(key)
        if decision is None:
            copied, _ = self._copy()
            # The pruner may store what it needs for later trials as attributes of this one, such as rungs.
            prunes = bool(self.spec.make_pruner().prune(copied, copied.trials[number]))
            after = copied.trials[number].system_attrs
            attributes = {name: held for name, held in after.items() if trial.system_attrs.get(name) != held}
            decision = {"prunes": prunes, "attributes": attributes}
            self.storage.set_trial_user_attr(self._id_of(trial.number), key, decision)
        for name, held in decision["attributes"].items():
            self.storage.set_trial_system_attr(self._id_of(trial.number), name, held)
        return bool(decision["prunes"])

    # ---- Trials that pause: successive halving, and population-based training

    def stop_of(self, trial: FrozenTrial) -> int | None:
        """Return the optimizer step at which a trial pauses next; None: at none."""
        halving, population = self.spec.halving, self.spec.population
        if halving is not None:
            stop: int | None = trial.user_attrs.get(_STOP, halving.steps[0])
            return stop if stop in halving.steps else None
        if population is not None:
            rounds = self._attributes().get(_ROUNDS, 0)
            return None if rounds >= population.rounds else population.every * (rounds + 1)
        return None

    def _attributes(self) -> dict[str, Any]:
        return self.storage.get_study_user_attrs(self._id)

    def paused(self, trial: FrozenTrial) -> dict[str, Any] | None:
        """Return how a trial was when it paused where it should; None if it runs or has finished."""
        if trial.state.is_finished():
            return None
        held: dict[str, Any] | None = trial.user_attrs.get(f"{_PAUSED}{self.stop_of(trial)}")
        return held

    def has_to_run(self, trial: FrozenTrial) -> bool:
        """Return whether a trial has not ended and may run now: it has not paused, and its checkpoint is there."""
        if trial.state.is_finished() or self.paused(trial) is not None:
            return False
        parent = trial.user_attrs.get(_PARENT)  # a fork gets its checkpoint during the round in which it is made
        return parent is None or self._attributes().get(_ROUNDS, 0) > parent["round"]

    def spent(self, trial: FrozenTrial) -> Mapping[str, Any]:
        """Return the outcome of a trial, or that of its last pause; empty if it has neither ended nor paused."""
        pauses = [held for name, held in trial.user_attrs.items() if name.startswith(_PAUSED)]
        return outcome_of(trial) or max(pauses, key=lambda one: one["steps"], default={})

    def pause(self, number: int, outcome: Mapping[str, Any]) -> None:
        """Store that a trial has paused."""
        trial = self.trial(number)
        self.storage.set_trial_user_attr(
            self._id_of(trial.number), f"{_PAUSED}{outcome['stop_at']}", loads(dumps(dict(outcome)))
        )

    def promote(self) -> bool:
        """Let the best paused trial continue that may, and return whether there was one.

        At each step, one of every `keep` trials that have paused there may continue, the best first.
        """
        halving = self.spec.halving
        if halving is None:
            return False
        [objective] = self.spec.objectives
        trials = self.trials()
        for index, step in reversed(list(enumerate(halving.steps))):
            reached = [trial for trial in trials if f"{_PAUSED}{step}" in trial.user_attrs]
            values = {trial.number: trial.user_attrs[f"{_PAUSED}{step}"]["values"][0] for trial in reached}
            order = sorted(reached, key=lambda one: (values[one.number] * (-1) ** objective.maximizes, one.number))
            for trial in order[: len(reached) // halving.keep]:
                if self.paused(trial) is not None and self.stop_of(trial) == step:
                    following = halving.steps[index + 1] if index + 1 < len(halving.steps) else -1
                    self.storage.set_trial_user_attr(self._id_of(trial.number), _STOP, following)
                    return True
        return False

    def end_paused(self) -> None:
        """Prune the trials that stay paused, as nothing will let them continue."""
        for trial in self.trials():
            outcome = self.paused(trial)
            if outcome is not None:
                self.finish(trial.number, {**outcome, "state": "pruned"})

    def evolve(self, prepare: Callable[[int], None], fork: Callable[[int, int], None]) -> bool:
        """Replace the worst members of a population by forks of the best, once all have paused; return whether it did.

        What is replaced is decided once, and stored before it is done; each part of it can be done again after a kill.

        Args:
            prepare: Called with the number of a trial before it is created.
            fork: Copies the newest checkpoint of a trial to a new one, unless that has it.
        """
        population = self.spec.population
        if population is None:
            return False
        rounds = self._attributes().get(_ROUNDS, 0)
        active = [trial for trial in self.trials() if not trial.state.is_finished()]
        plan = self._attributes().get(f"{_ROUND}{rounds}")
        if plan is None:
            begun = sum(parent_of(trial) is None for trial in self.trials())
            if rounds >= population.rounds or begun < population.members or not active:
                return False
            if any(self.paused(trial) is None for trial in active):
                return False
            plan = self._plan_round(active)
            self.storage.set_study_user_attr(self._id, f"{_ROUND}{rounds}", plan)
        stop = f"{_PAUSED}{population.every * (rounds + 1)}"
        for replaced, parent, values in plan:
            made = [one for one in self.trials() if one.user_attrs.get(_PARENT, {}).get("replaces") == replaced]
            if made:
                child = made[0].number
            else:
                prepare(len(self.trials()))
                step = self.trial(parent).user_attrs[stop]["steps"]
                origin = {"number": parent, "replaces": replaced, "step": step, "round": rounds}
                template = optuna.trial.create_trial(
                    state=TrialState.RUNNING,
                    params=dict(values),
                    distributions={one.key: one.distribution for one in self.spec.parameters},
                    user_attrs={_PARENT: origin},
                )
                child = self.storage.get_trial(self.storage.create_new_trial(self._id, template)).number
            fork(parent, child)
            self.finish(replaced, {**self.trial(replaced).user_attrs[stop], "state": "pruned"})
        self.storage.set_study_user_attr(self._id, _ROUNDS, rounds + 1)
        return True

    def _plan_round(self, active: Sequence[FrozenTrial]) -> list[tuple[int, int, dict[str, Any]]]:
        """Return, for each member to replace, its number, that of its new parent, and the values of the fork."""
        [objective], population = self.spec.objectives, self.spec.population
        values = {one.number: (self.paused(one) or {})["values"][0] for one in active}
        order = sorted(active, key=lambda one: (values[one.number] * (-1) ** objective.maximizes, one.number))
        count = min(population.num_replaced, len(order) // 2) if population is not None else 0
        plan = []
        for index, replaced in enumerate(order[len(order) - count :]):
            chooser = random.Random(derive_seed(self.spec.seed, "population", len(self.trials()), index))
            parent = order[chooser.randrange(count)]
            drawn = {one.key: perturb(one, parent.params[one.key], chooser) for one in self.spec.parameters}
            plan.append((replaced.number, parent.number, drawn))
        return plan

    def finish(self, number: int, outcome: Mapping[str, Any]) -> None:
        """Store how a trial ended: its outcome first, so that a finished trial has one."""
        trial = self.trial(number)
        if trial.state.is_finished():
            return
        stored = loads(dumps(dict(outcome)))
        if stored.get("error") is not None:
            stored["error"] = stored["error"][:_LONGEST]
        self.storage.set_trial_user_attr(self._id_of(trial.number), _OUTCOME, stored)
        state = STATES[outcome["state"]]
        values: Sequence[float] | None = outcome.get("values")
        is_given = state == TrialState.COMPLETE or (
            state == TrialState.PRUNED and values and outcome["state"] == "pruned"
        )
        self.storage.set_trial_state_values(self._id_of(trial.number), state, values if is_given else None)


def _draw(trial: optuna.Trial, one: Parameter) -> Any:
    drawn: Any = one.distribution
    if isinstance(drawn, CategoricalDistribution):
        return trial.suggest_categorical(one.key, drawn.choices)
    suggest = trial.suggest_int if isinstance(drawn, IntDistribution) else trial.suggest_float
    return suggest(one.key, drawn.low, drawn.high, step=drawn.step, log=drawn.log)


def fork_of(study: SweepStudy, trial: FrozenTrial) -> dict[str, Any] | None:
    """Return what a fork's run records of its parent: its number, the step of the fork, and the parent's values."""
    number = parent_of(trial)
    if number is None:
        return None
    values = study.values_of(study.trial(number))
    return {"number": number, "step": trial.user_attrs[_PARENT]["step"], "values": values}


def parent_of(trial: FrozenTrial) -> int | None:
    """Return the number of the trial that a trial was forked from; None for others."""
    parent = trial.user_attrs.get(_PARENT)
    return None if parent is None else int(parent["number"])


def outcome_of(trial: FrozenTrial) -> dict[str, Any]:
    """Return how a trial ended; empty while it has not."""
    outcome: dict[str, Any] = trial.user_attrs.get(_OUTCOME, {})
    return outcome


def _describe_change(old: Any, new: Any) -> str:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return f"{old!r} -> {new!r}"
    parts = [f"{key} is new" for key in new if key not in old] + [f"{key} is gone" for key in old if key not in new]
    parts += [f"{key} differs" for key in old if key in new and old[key] != new[key]]
    return ", ".join(parts) or "the order of keys differs"


def perturb(parameter: Parameter, value: Any, chooser: random.Random) -> Any:
    """Return a value of a parameter near another one, as Optuna stores it: 0.8 or 1.2 times it, within its range.

    A number with steps moves by one step at least. A choice moves to the one before or after it, or stays.
    """
    drawn: Any = parameter.distribution
    if isinstance(drawn, CategoricalDistribution):
        index = drawn.choices.index(value) + chooser.choice((-1, 0, 1))
        return drawn.choices[min(max(index, 0), len(drawn.choices) - 1)]
    factor = chooser.choice((0.8, 1.2))
    near = value * factor
    if drawn.step is not None:
        own, index = (round((one - drawn.low) / drawn.step) for one in (value, near))
        index += 0 if index != own else 1 if factor > 1 else -1  # else a small number would never change
        near = drawn.low + index * drawn.step
    near = min(max(near, drawn.low), drawn.high)  # last: 3 * 0.1 is above 0.3
    return round(near) if isinstance(drawn, IntDistribution) else near


# ---- The storage


def _open_storage(spec: SweepSpec) -> BaseStorage:
    if spec.storage is not None:
        return _open_database(spec.storage)
    path = spec.folder / JOURNAL_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        return JournalStorage(JournalFileBackend(str(path), _JournalLock(path)))
    except OSError as error:
        got, expected = error.strerror or str(error), "a file that can be written"
        raise fail(
            ArgumentError,
            f"the study {path}",
            got=got,
            expected=expected,
            do="make it writable, or set another `folder`",
        ) from None
    except (ValueError, KeyError, TypeError) as error:  # what Optuna raises for lines that it cannot read
        got, expected = f"a line that is no record of a study: {error}", "a journal of Optuna"
        do = "restore the file from a backup, or set another `folder`"
        raise fail(ArgumentError, f"the study {path}", got=got, expected=expected, do=do) from None


def _open_database(url: str) -> BaseStorage:
    from optuna.storages import RDBStorage
    from sqlalchemy import create_engine, text

    try:
        engine = create_engine(url_for_sqlalchemy(url), **engine_arguments(url))
        with engine.begin() as connection:  # two workers must not create Optuna's tables at once
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('accmt_sweep'))"))
            storage = RDBStorage(url_for_sqlalchemy(url), engine_kwargs=engine_arguments(url))
        engine.dispose()
        return storage
    except (*OUTAGES, RuntimeError, ImportError) as error:  # RuntimeError: another schema
        why = error.__cause__ or error
        expected = "a PostgreSQL server that can be reached, and a database of this Optuna"
        do = 'check the URL, and `pip install "accmt-trainer[sweep,postgresql]"`'
        raise fail(ArgumentError, "the storage of the sweep", got=str(why).strip(), expected=expected, do=do) from None


def url_for_sqlalchemy(url: str) -> str:
    """Return the URL of a database with the driver that is used."""
    return url.replace("postgresql://", "postgresql+psycopg://", 1)


def engine_arguments(url: str) -> dict[str, Any]:
    """Return the arguments with which connections notice that a server or the network is gone; the URL's own stay."""
    limits = {
        "connect_timeout": 10,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 25_000,
    }
    own = make_url(url).query
    return {"pool_pre_ping": True, "connect_args": {name: one for name, one in limits.items() if name not in own}}


class _JournalLock(JournalFileOpenLock):
    """A lock that the system releases when its process is killed; Optuna's own would block the others for 30 seconds.

    A last line that a full disk or a power failure has cut off is removed before the next one is written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        self._file: int | None = None

    def acquire(self) -> bool:
        self._file = file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(file, fcntl.LOCK_EX)
        size = end = os.fstat(file).st_size
        while end > 0 and os.pread(file, 1, end - 1) != b"\n":
            end -= 1
        if end != size:
            os.ftruncate(file, end)
        return True

    def release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
