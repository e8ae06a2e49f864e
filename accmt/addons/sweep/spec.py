"""What a sweep searches: its YAML, the search space, the objective and the budget, checked before the first trial."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from accmt.data.seeding import derive_seed
from accmt.errors import ArgumentError, HyperParameterError, MissingPackageError, combine, describe_value, fail, nearest
from accmt.options.changes import RULES
from accmt.options.checks import KeyFault, KeyPath, is_number, whole
from accmt.options.optimizer_and_scheduler_arguments import COMPUTED, GROUPING, parameters_of, unknown_argument
from accmt.options.optimizer_and_scheduler_names import (
    find_optimizer,
    find_scheduler,
    optimizer_names,
    scheduler_names,
)
from accmt.options.settings import Settings
from accmt.options.yaml_reader import KEYS, Document, read_document, suggest
from accmt.registry import find
from accmt.saving.selection import METRIC_NAMES

try:
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
except ImportError as missing:
    raise fail(
        MissingPackageError,
        "accmt sweep",
        got="optuna is not installed",
        expected="optuna 5",
        do='pip install "accmt-trainer[sweep]"',
    ) from missing

TRAINER = "trainer"
SCRIPT = "script"
"""The first part of a key that sets an argument of the Trainer, or a flag of the user's script."""

_OF_SWEEP = ("model_path", "checkpoint", "resume", "logging_dir", "run_name", "hps_config")
_KINDS = ("uniform", "log_uniform", "int", "log_int", "choice")
_OPTIONS = ("step", "when")
_SAMPLERS = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "grid": "GridSampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "qmc": "QMCSampler",
    "nsga2": "NSGAIISampler",
}
_PRUNERS = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "percentile": "PercentilePruner",
    "halving": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
    "threshold": "ThresholdPruner",
}
_DRAW_ONE_SEQUENCE = ("GridSampler", "QMCSampler")  # one seed orders all their trials
_MAX_SEED = 2**32


@dataclass(frozen=True)
class Parameter:
    """One key of the search space.

    Attributes:
        key: The dotted key: `optim.lr`, `trainer.clip_grad` or `script.hidden`.
        distribution: What Optuna draws from.
        choices: The values of a choice; Optuna stores a list or a mapping among them as text.
        when: The values of other keys with which this one is set; empty: always.
    """

    key: str
    distribution: BaseDistribution
    choices: tuple[Any, ...] = ()
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def value(self, drawn: Any) -> Any:
        """Return the value for what Optuna drew."""
        by_label = {_label(choice): choice for choice in self.choices}
        return by_label.get(drawn, drawn) if isinstance(drawn, str) else drawn

    def is_active(self, values: Mapping[str, Any]) -> bool:
        """Return whether the key is set, given the values of the keys before it."""
        return all(values.get(key) in wanted for key, wanted in self.when.items())

    def describe(self) -> dict[str, Any]:
        """Return it as JSON values, to see whether two search spaces are equal."""
        drawn = json.loads(optuna.distributions.distribution_to_json(self.distribution))
        return {**drawn, "when": {key: list(wanted) for key, wanted in self.when.items()}}


@dataclass(frozen=True)
class Objective:
    """A value that trials optimize: its name in log rows, and whether higher is better."""

    name: str
    maximizes: bool


@dataclass(frozen=True)
class Halving:
    """Successive halving: trials pause at some steps, and the best of them continue.

    Attributes:
        steps: The optimizer steps at which trials pause, ascending.
        keep: One of this many continues.
    """

    steps: tuple[int, ...]
    keep: int = 3


@dataclass(frozen=True)
class Population:
    """Population-based training: members pause together, and the worst are replaced by forks of the best.

    Attributes:
        members: How many train side by side.
        every: Optimizer steps between two pauses.
        rounds: How many pauses there are; after the last one, members train to their end.
        replace: The fraction of members that is replaced at each pause.
    """

    members: int
    every: int
    rounds: int
    replace: float = 0.25

    @property
    def num_replaced(self) -> int:
        """How many members are replaced at each pause."""
        return max(1, round(self.members * self.replace))


@dataclass(frozen=True)
class SweepSpec:
    """A sweep, as written; `docs/sweeps.md` explains each key.

    Attributes:
        source: The keys as written, without the storage, with name and folder.
        name: Its name, by which trackers group the runs.
        folder: The folder of its trials.
        parameters: The search space, in order.
        fixed: Keys with the same value in all trials.
        listed: The trials of a plain list, by key; empty if they are drawn.
        objectives: What is optimized.
        sampler: A class of `optuna.samplers`, and its arguments.
        pruner: A class of `optuna.pruners`, and its arguments.
        takes: Which evaluation of a trial counts: "best" or "last".
        trials: The number of trials; None: no limit.
        max_steps: Optimizer steps of all trials, after which no trial starts.
        max_hours: Hours of training of all trials together, likewise.
        seed: The seed of the suggestions, and of trials whose script sets none.
        halving: Successive halving, if it is used.
        population: Population-based training, if it is used.
        storage: The URL of a PostgreSQL database; None: a journal in the folder.
        parallel: How many trials run at a time.
        max_failures: Failed trials in a row, after which the sweep ends.
        lease_s: With a database, seconds after which the trial of a worker that has gone is taken over.
    """

    source: Mapping[str, Any]
    name: str
    folder: Path
    parameters: tuple[Parameter, ...]
    fixed: Mapping[str, Any]
    listed: tuple[Mapping[str, Any], ...]
    objectives: tuple[Objective, ...]
    sampler: tuple[str, Mapping[str, Any]]
    pruner: tuple[str, Mapping[str, Any]]
    takes: str
    trials: int | None = None
    max_steps: int | None = None
    max_hours: float | None = None
    seed: int = 0
    halving: Halving | None = None
    population: Population | None = None
    storage: str | None = None
    parallel: int = 1
    max_failures: int = 3
    lease_s: float = 120.0

    @property
    def prunes(self) -> bool:
        """Whether trials may be pruned."""
        return self.pruner[0] != "NopPruner"

    def identity(self) -> dict[str, Any]:
        """Return, as JSON values, what must not change during the sweep."""
        return {
            "space": {one.key: one.describe() for one in self.parameters},
            "fixed": dict(self.fixed),
            "listed": [dict(trial) for trial in self.listed],
            "objective": {one.name: "max" if one.maximizes else "min" for one in self.objectives},
            "take": self.takes,
            "seed": self.seed,
            "sampler": [self.sampler[0], dict(self.sampler[1])],
            "pruner": [self.pruner[0], dict(self.pruner[1])],
            "halving": None if self.halving is None else vars(self.halving),
            "population": None if self.population is None else vars(self.population),
        }

    def make_sampler(self, number: int) -> Any:
        """Return the sampler for one trial: what it draws depends on the seed, the number and the trials before it."""
        kind, arguments = self.sampler
        seed = self.seed % _MAX_SEED
        if kind not in _DRAW_ONE_SEQUENCE:
            seed = derive_seed(self.seed, "sweep", number) % _MAX_SEED
        if kind == "GridSampler":
            arguments = {"search_space": {one.key: list(grid_of(one) or ()) for one in self.parameters}}
        factory = getattr(optuna.samplers, kind)
        return _build(
            factory, {"seed": seed, **arguments} if "seed" in inspect.signature(factory).parameters else arguments
        )

    def make_pruner(self) -> Any:
        """Return the pruner."""
        return _build(getattr(optuna.pruners, self.pruner[0]), self.pruner[1])


def _build(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Build a sampler or pruner, without Optuna's warning that it may change in a later release."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return factory(**arguments)


def grid_of(parameter: Parameter) -> Sequence[Any] | None:
    """Return the points of a parameter for a grid; None if it has infinitely many."""
    drawn: Any = parameter.distribution
    if isinstance(drawn, CategoricalDistribution):
        return drawn.choices
    if isinstance(drawn, IntDistribution) and not drawn.log:
        return range(drawn.low, drawn.high + 1, drawn.step)
    if isinstance(drawn, FloatDistribution) and drawn.step is not None:
        count = round((drawn.high - drawn.low) / drawn.step) + 1
        return [min(drawn.low + index * drawn.step, drawn.high) for index in range(count)]  # 3 * 0.1 is above 0.3
    return None


_FIELDS = {
    "name", "folder", "space", "trials", "objective", "take", "max_steps", "max_hours", "seed", "sampler", "pruner",
    "storage", "parallel", "max_failures", "lease_s", "halving", "population",
}  # fmt: skip


def read_spec(source: str | Path | Mapping[str, Any], *, checks_keys: bool = True) -> SweepSpec:
    """Read a sweep from a YAML or JSON file, or a dict.

    Args:
        source: The file or dict.
        checks_keys: Whether the keys of the search space are checked, which imports all optimizers.

    Raises:
        ArgumentError: Anything is invalid; the message lists every error, with its line.
    """
    if not isinstance(source, Mapping) and not Path(source).is_file():
        got, do = f"no such file; the working directory is {Path.cwd()}", "correct the path"
        raise fail(
            ArgumentError,
            f"sweep {source}",
            got=got,
            expected="a YAML file with `space`, `objective` and `trials`",
            do=do,
        )
    try:
        document = read_document(source)
        if isinstance(source, Mapping):
            document = replace(document, name="sweep")
    except HyperParameterError as error:
        raise combine(ArgumentError, [error]) from None
    reader = _Reader(document, "sweep" if isinstance(source, Mapping) else Path(source).stem, checks_keys=checks_keys)
    spec = reader.read()
    if reader.faults or spec is None:
        raise combine(ArgumentError, [document.reject(reader.faults)])
    return spec


class _Reader:
    def __init__(self, document: Document, name: str, *, checks_keys: bool) -> None:
        self._checks_keys = checks_keys
        self.faults = list(document.faults)
        self._values = dict(document.values)
        self._name = name

    def _fault(self, path: KeyPath, got: str, expected: str, do: str) -> None:
        self.faults.append(KeyFault(path, got, expected, do))

    def read(self) -> SweepSpec | None:
        values = self._values
        for key in values.keys() - _FIELDS:
            known = sorted(_FIELDS)
            expected = f"one of {', '.join(known)}"
            self._fault((key,), f"the key {key!r}", expected, suggest(key, known, f"remove `{key}`"))
        listed, trials = [], values.get("trials")
        if isinstance(trials, list):
            listed, trials = trials, len(trials)
        parameters, fixed = self._read_space(listed)
        objectives = self._read_objectives()
        takes = values.get("take", "best" if len(objectives) == 1 else "last")
        if takes not in ("best", "last") or (takes == "best" and len(objectives) > 1):
            expected = '"last" with several objectives' if len(objectives) > 1 else '"best" or "last"'
            self._fault(("take",), describe_value(takes), expected, "write `take: last`")
        sampler = self._read_class("sampler", optuna.samplers, _SAMPLERS, "tpe")
        pruner = self._read_class("pruner", optuna.pruners, _PRUNERS, "none")
        if pruner[0] != "NopPruner" and len(objectives) > 1:
            self._fault(("pruner",), pruner[0], "no pruner with several objectives", "remove `pruner`")
        halving, population = self._read_halving(), self._read_population(parameters)
        kinds = [key for key in ("halving", "population") if values.get(key)]
        kinds += ["pruner"] if pruner[0] != "NopPruner" else []
        if len(kinds) > 1:
            self._fault((kinds[0],), " and ".join(kinds), "one of them", f"remove `{kinds[-1]}`")
        if kinds and len(objectives) > 1 and kinds != ["pruner"]:
            self._fault((kinds[0],), f"{len(objectives)} objectives", "one objective", f"remove `{kinds[0]}`")
        if population is not None:
            for key in ("trials", "max_steps", "max_hours"):
                if values.get(key) not in (None, population.members if key == "trials" else None):
                    expected = "no other budget than the members, rounds and steps of a population"
                    self._fault((key,), describe_value(values[key]), expected, f"remove `{key}`")
            trials = population.members
        if sampler[0] == "GridSampler":
            trials = self._count_grid(parameters, trials)
        limits = {
            "trials": self._number(("trials",), trials, of=int),
            "max_steps": self._number(("max_steps",), values.get("max_steps"), of=int),
            "max_hours": self._number(("max_hours",), values.get("max_hours"), of=float),
        }
        if all(limit is None for limit in limits.values()):
            self._fault(("trials",), "nothing", "a limit: trials, max_steps or max_hours", "write `trials: 20`")
        seed = values.get("seed", 0)
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            self._fault(("seed",), describe_value(seed), "a whole number from 0", "write `seed: 0`")
        storage = values.get("storage")
        if storage is not None and not str(storage).startswith(("postgresql://", "postgresql+psycopg://")):
            expected = "the URL of a PostgreSQL database; without it, the study is a file in the sweep's folder"
            self._fault(
                ("storage",), describe_value(storage), expected, "write `storage: postgresql://user@host/database`"
            )
        name = str(values.get("name", self._name))
        if not re.fullmatch(r"[\w.-]+", name):
            self._fault(("name",), describe_value(name), "letters, digits, `.`, `_` and `-`", "write `name: my-sweep`")
        if self.faults:
            return None
        others = {
            "parallel": self._number(("parallel",), values.get("parallel", 1), of=int),
            "max_failures": self._number(("max_failures",), values.get("max_failures", 3), of=int),
            "lease_s": self._number(("lease_s",), values.get("lease_s", 120.0), of=float),
        }
        if self.faults:
            return None
        folder = Path(values.get("folder", Path("out", name))).absolute()
        source = {key: value for key, value in values.items() if key != "storage"}
        return SweepSpec(
            source={**source, "name": name, "folder": str(folder)},
            storage=storage,
            name=name,
            folder=folder,
            parameters=tuple(parameters),
            fixed=fixed,
            listed=tuple(listed),
            objectives=tuple(objectives),
            takes=takes,
            seed=seed,
            sampler=sampler,
            pruner=pruner,
            halving=halving,
            population=population,
            **limits,
            **{key: number for key, number in others.items() if number is not None},
        )

    def _number(self, path: KeyPath, value: Any, of: type) -> Any:
        value = whole(value) if of is int else value
        if value is None or (is_number(value) and value > 0 and (of is float or isinstance(value, int))):
            return value
        kind = "a whole number from 1" if of is int else "a number above 0"
        self._fault(path, describe_value(value), kind, f"write `{path[-1]}: {20 if of is int else 1.5}`")
        return None

    def _read_halving(self) -> Halving | None:
        written = self._values.get("halving")
        if written is None:
            return None
        example = "write `halving: {steps: [100, 300], keep: 3}`"
        steps = written.get("steps") if isinstance(written, dict) else None
        steps = [whole(step) for step in steps] if isinstance(steps, list) else []
        is_right = bool(steps) and all(isinstance(step, int) and step > 0 for step in steps)
        if not is_right or sorted(set(steps)) != steps or written.keys() - {"steps", "keep"}:
            self._fault(("halving",), describe_value(written), "ascending steps, and keep", example)
            return None
        keep = whole(written.get("keep", 3))
        if not isinstance(keep, int) or keep < 2:
            self._fault(("halving", "keep"), describe_value(keep), "a whole number from 2", example)
            return None
        return Halving(tuple(steps), keep)

    def _read_population(self, parameters: Sequence[Parameter]) -> Population | None:
        written = self._values.get("population")
        if written is None:
            return None
        example = "write `population: {members: 8, every: 100, rounds: 5}`"
        known = [each.name for each in fields(Population)]
        needed = ("members", "every", "rounds")
        if not isinstance(written, dict) or written.keys() - set(known) or set(needed) - written.keys():
            self._fault(("population",), describe_value(written), f"a mapping with {', '.join(known)}", example)
            return None
        numbers = {key: self._number(("population", key), written[key], of=int) for key in needed}
        replace = written.get("replace", 0.25)
        if not is_number(replace) or not 0 < replace <= 0.5:
            self._fault(
                ("population", "replace"), describe_value(replace), "a fraction up to 0.5", "write `replace: 0.25`"
            )
        elif numbers["members"] is not None and numbers["members"] < 2:
            self._fault(("population", "members"), "1", "at least 2 members", "write `members: 4`")
        for one in parameters:
            rules = (rule.rule for rule in RULES if fnmatchcase(one.key, rule.pattern))
            if one.key.startswith(f"{SCRIPT}.") or one.key == f"{TRAINER}.seed" or next(rules) == "reject":
                expected = "keys that may change during a run, such as optim.lr"
                self._fault(("space", one.key), one.key, expected, f"remove `{one.key}`")
            if one.when:
                self._fault(("space", one.key, "when"), "a condition", "no conditions in a population", "remove `when`")
        if self.faults:
            return None
        return Population(**numbers, replace=float(replace))

    # ---- The search space

    def _read_space(self, listed: list[Any]) -> tuple[list[Parameter], dict[str, Any]]:
        space = self._values.get("space", {} if listed else None)
        if not isinstance(space, dict) or (listed and space):
            got = "nothing" if space is None else "`space` and a list of trials" if listed else describe_value(space)
            do = "write `space: {optim.lr: {log_uniform: [1e-5, 1e-3]}}`"
            self._fault(("space",), got, "a mapping of dotted keys, or a list as `trials`", do)
            return [], {}
        if listed:
            return self._read_list(listed), {}
        parameters: list[Parameter] = []
        fixed: dict[str, Any] = {}
        for key, written in space.items():
            path = ("space", key)
            self._check_key(path, key, written)
            read = self._read_parameter(path, key, written)
            if read is None:
                fixed[key] = written
                continue
            for other in read.when:
                known = [one.key for one in parameters]
                if other not in known and other not in fixed:
                    expected = f"a key above this one: {', '.join([*known, *fixed]) or 'there is none'}"
                    self._fault((*path, "when"), other, expected, suggest(other, known, "move it above this one"))
                possible = next((one.choices for one in parameters if one.key == other and one.choices), None)
                possible = (fixed[other],) if other in fixed else possible
                for one in read.when[other]:
                    if possible is not None and one not in possible:
                        expected = f"a value of {other}: {', '.join(map(str, possible))}"
                        do = suggest(str(one), [str(each) for each in possible], f"write `{possible[0]}`")
                        self._fault((*path, "when", other), describe_value(one), expected, do)
            parameters.append(read)
        if not parameters and not self.faults:
            self._fault(("space",), "only fixed values", "a key with several values", "write `batch_size: [16, 32]`")
        return parameters, fixed

    def _read_list(self, listed: list[Any]) -> list[Parameter]:
        """Return a choice of each key's values in the list, in which its trials are stored."""
        values: dict[str, list[Any]] = {}
        for index, trial in enumerate(listed):
            if not isinstance(trial, dict) or not trial:
                self._fault(
                    ("trials", index), describe_value(trial), "a mapping of dotted keys", "write `- {optim.lr: 1e-3}`"
                )
                continue
            for key, value in trial.items():
                self._check_key(("trials", index, key), key, value)
                same = [one for one in values.setdefault(key, []) if one == value]
                if not same:
                    values[key].append(value)
                elif isinstance(same[0], bool) != isinstance(value, bool):  # which Optuna does not tell apart
                    got = f"{describe_value(value)}, and {describe_value(same[0])} in another trial"
                    self._fault(("trials", index, key), got, "values of one kind", f"write `{key}: {same[0]}`")
        return [
            Parameter(key, CategoricalDistribution([_label(one) for one in every]), tuple(every))
            for key, every in values.items()
        ]

    def _read_parameter(self, path: KeyPath, key: str, written: Any) -> Parameter | None:
        """Return a parameter; None for a fixed value."""
        if isinstance(written, list):
            written = {"choice": written}
        if not isinstance(written, dict):
            return None
        kinds = [kind for kind in written if kind in _KINDS]
        unknown = [name for name in written if name not in (*_KINDS, *_OPTIONS)]
        nothing = Parameter(key, CategoricalDistribution([None]))
        if len(kinds) != 1 or unknown:
            got = f"the keys {', '.join(map(str, written)) or 'nothing'}"
            do = "write `{log_uniform: [1e-5, 1e-3]}`, or a list of choices"
            if unknown and (near := nearest(unknown[0], (*_KINDS, *_OPTIONS), cutoff=0.7)):
                do = f"write `{near}`"
            self._fault(path, got, f"one of {', '.join(_KINDS)}, and step or when", do)
            return nothing
        [kind] = kinds
        when = {
            other: tuple(wanted) if isinstance(wanted, list) else (wanted,)
            for other, wanted in (written.get("when") or {}).items()
        }
        if kind == "choice":
            choices = written[kind]
            if not isinstance(choices, list) or not choices or len(set(map(_label, choices))) < len(choices):
                self._fault(path, describe_value(choices), "a list of different values", "write `[16, 32]`")
                return nothing
            return Parameter(key, CategoricalDistribution([_label(one) for one in choices]), tuple(choices), when)
        bounds, step = written[kind], written.get("step")
        is_log, is_int = kind.startswith("log"), kind.endswith("int")
        bounds = [whole(bound) for bound in bounds] if is_int and isinstance(bounds, list) else bounds
        is_right = isinstance(bounds, list) and len(bounds) == 2 and all(map(is_number, bounds))
        is_right = is_right and bounds[0] < bounds[1] and (not is_log or bounds[0] > 0)
        is_right = is_right and (not is_int or all(isinstance(bound, int) for bound in bounds))
        if not is_right:
            expected = f"two {'whole ' if is_int else ''}numbers, the lower one first" + (", above 0" if is_log else "")
            example = {"int": [1, 8], "log_int": [8, 512], "uniform": [0.0, 0.5], "log_uniform": [1e-05, 1e-03]}[kind]
            self._fault((*path, kind), describe_value(bounds), expected, f"write `{kind}: {example}`")
            return nothing
        if step is not None and (is_log or not is_number(step) or step <= 0 or (is_int and not isinstance(step, int))):
            expected = "no step with a logarithmic range" if is_log else "a number above 0"
            self._fault((*path, "step"), describe_value(step), expected, "remove `step`")
            return nothing
        low, high = bounds
        if is_int:
            return Parameter(key, IntDistribution(low, high, log=is_log, step=step or 1), when=when)
        return Parameter(key, FloatDistribution(float(low), float(high), log=is_log, step=step), when=when)

    def _check_key(self, path: KeyPath, key: str, value: Any) -> None:
        """Check that a key names something that a trial can set, as far as it is known before a trial runs."""
        first, _, rest = key.partition(".")
        if not self._checks_keys:
            return
        if first == SCRIPT:
            if not rest:
                self._fault(path, key, "the name of a flag of the script", "write `script.hidden` for `--hidden`")
            return
        if first == TRAINER:
            known = [each.name for group in Settings.GROUPS.values() for each in fields(group)]
            name = rest.partition(".")[0]
            if name in _OF_SWEEP:
                self._fault(path, key, "an argument that the sweep does not set itself", f"remove `{key}`")
            elif name not in known:
                near = nearest(name, known, cutoff=0)
                self._fault(path, key, "an argument of Trainer", f"write `{TRAINER}.{near}`")
            return
        names = sorted(KEYS)
        if first not in names:
            arguments = [each.name for group in Settings.GROUPS.values() for each in fields(group)]
            do = f"remove `{key}`"
            if first in arguments:
                do = f"write `{TRAINER}.{key}`"
            elif near := nearest(first, names):
                do = f"write `{'.'.join([near, rest] if rest else [near])}`"
            elif first in _list_arguments("optim"):
                do = f"write `optim.{first}`"
            expected = f"a hyper-parameter ({', '.join(names)}), trainer.<argument> or script.<flag>"
            self._fault(path, key, expected, do)
        elif first in ("optim", "optimizer", "scheduler") and rest and rest != "type" and "." not in rest:
            kind, what = ("scheduler", "a scheduler") if first == "scheduler" else ("optim", "an optimizer")
            known = _list_arguments(kind)
            if rest not in known:
                fault = unknown_argument((kind, rest), value, f"an argument of {what}", known)
                self._fault(path, key, fault.expected, fault.do.replace("`", f"`{first}.", 1))

    def _count_grid(self, parameters: Sequence[Parameter], trials: Any) -> Any:
        points = 1
        for one in parameters:
            grid = grid_of(one)
            if grid is None or one.when:
                expected = "a list, or `int` or `uniform` with a step, without `when`: a grid is finite"
                self._fault(("space", one.key), "a range with infinitely many values", expected, "write `[1e-4, 1e-3]`")
                return trials
            points *= len(grid)
        return points if trials is None else min(points, whole(trials)) if is_number(trials) else trials

    # ---- The objective, the sampler and the pruner

    def _read_objectives(self) -> list[Objective]:
        written = self._values.get("objective")
        if isinstance(written, str):
            written = {written: None}
        if isinstance(written, list):
            written = dict.fromkeys(map(str, written))
        if not isinstance(written, dict) or not written:
            got = "nothing" if written is None else describe_value(written)
            expected = "the name of a logged value, with its direction if it is not a metric of accmt"
            self._fault(("objective",), got, expected, "write `objective: accuracy`, or `objective: {reward: max}`")
            return []
        found = []
        for name, direction in written.items():
            direction = _DIRECTIONS.get(str(direction or direction_of(name)))
            if direction is None:
                # A direction is suggested only if it is meant: the wrong one would search for the worst trial.
                got = "no direction" if written[name] is None else describe_value(written[name])
                do = f"write `objective: {{{name}: min}}` if lower is better, `objective: {{{name}: max}}` if higher is"
                meant = nearest(written[name], _DIRECTIONS) or direction_of(name)
                if written[name] is None:
                    do = suggest(re.split(r"__|@", name)[0], ["val_loss", *METRIC_NAMES], do)
                elif meant is not None:
                    do = f"write `objective: {{{name}: {_DIRECTIONS[meant]}}}`"
                self._fault(("objective", name), got, "`min` or `max`", do)
                continue
            found.append(Objective(name, maximizes=direction == "max"))
        return found

    def _read_class(
        self, key: str, module: Any, short: Mapping[str, str], default: str
    ) -> tuple[str, Mapping[str, Any]]:
        written = self._values.get(key, default)
        arguments = dict(written) if isinstance(written, dict) else {"type": written}
        kind = arguments.pop("type", None)
        name = short.get(str(kind), str(kind))
        base = f"Base{key.capitalize()}"
        if not isinstance(getattr(module, name, None), type) or name == base:
            known = [*short, *(each for each in module.__all__ if each not in (base, *short.values()))]
            do = suggest(str(kind), known, f"write `{key}: {default}`")
            self._fault((key,), describe_value(kind), f"one of {', '.join(known)}", do)
            return short[default], {}
        factory: Callable[..., Any] = getattr(module, name)
        accepted = [each for each in inspect.signature(factory).parameters if each != "seed"]
        for argument in arguments:
            if argument not in accepted:
                expected = f"an argument of optuna's {name}: {', '.join(accepted)}"
                self._fault((key, argument), argument, expected, suggest(argument, accepted, f"remove `{argument}`"))
        if not self.faults and name != "GridSampler":
            try:
                _build(factory, arguments)
            except (TypeError, ValueError) as error:
                self._fault(
                    (key,), f"optuna's {name} rejects it: {error}", "arguments that it accepts", f"correct `{key}`"
                )
        return name, arguments


_DIRECTIONS = {"min": "min", "max": "max", "minimize": "min", "maximize": "max"}  # the latter are optuna's words


def direction_of(name: str) -> str | None:
    """Return "min" or "max" for a loss or a metric of accmt; None for any other name."""
    plain = re.split(r"__|@", name)[0]
    if plain == "loss" or plain.endswith("_loss"):
        return "min"
    if plain not in METRIC_NAMES:
        return None
    return "max" if find("accmt.metrics", plain)().greater_is_better else "min"


def _label(choice: Any) -> Any:
    """Return a choice as Optuna can store it."""
    return choice if choice is None or isinstance(choice, bool | int | float | str) else json.dumps(choice)


def _list_arguments(part: str) -> list[str]:
    """Return the arguments of all optimizers ("optim") or schedulers that have a name."""
    known: set[str] = {"warmup_ratio"} if part == "scheduler" else {*GROUPING}
    factories: list[Any] = [find_scheduler(name) for name in scheduler_names()]
    if part == "optim":
        factories = [find_optimizer(name) for name in optimizer_names()]
    for factory in factories:
        known.update(parameters_of(factory))
    return sorted(known - COMPUTED)
