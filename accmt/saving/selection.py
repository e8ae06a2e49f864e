"""Which evaluations' weights are kept, and in which folder."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from accmt.errors import ArgumentError, MetricError, ModuleContractError, fail, nearest
from accmt.options.saving import LAST

# ---- The rules for saving models and stopping runs: their names, and the values they compare.


IsBetter = Callable[[float, float], bool]

ALWAYS = "always"
VALID_LOSS = "best_valid_loss"
TRAIN_LOSS = "best_train_loss"
_PREFIX = "best_"
_AS_LOGGED = "val_loss"
"""The name of the validation loss in log rows, which rules accept, too."""
_OTHER_TRAINERS_PREFIX = re.compile(r"^(eval|val|valid|validation)_")
"""The prefixes that other trainers use for metric names."""
_STAGE_FOLDER = re.compile(r"^(best_)?(eval|val|valid|validation)/")
"""The same as a folder, as TensorBoard groups names: `best_val/loss` would be two metrics."""
METRIC_NAMES = (
    *("accuracy", "auroc", "cer", "chrf", "exact_match", "f1", "mae", "mse", "perplexity", "precision", "r2", "recall"),
    *("rmse", "rouge", "sacrebleu", "wer"),
)
"""Metrics that a Trainer creates from their names."""
_SIMILARITY = 0.52  # "acc" is like "accuracy", "iou" is not like "rouge"
_LOSSES: dict[str, IsBetter] = {name.removeprefix(_PREFIX): operator.lt for name in (VALID_LOSS, TRAIN_LOSS)}


@dataclass(frozen=True)
class Argument:
    """The argument that contained a value, for error messages."""

    name: str
    call: str = "Trainer"

    def reject(self, got: str, expected: str, do: str) -> NoReturn:
        """Raise an error about an invalid value."""
        raise fail(ArgumentError, f"{self.call}({self.name}=...)", got=got, expected=expected, do=do)


@dataclass(frozen=True)
class Quantity:
    """One value of an evaluation that a rule compares.

    Attributes:
        key: Its key among the values of an evaluation.
        keys_of_sets: The keys of the values to average if `key` is missing.
    """

    label: str
    is_better: IsBetter
    key: str
    keys_of_sets: tuple[str, ...] = ()

    @property
    def sign(self) -> int:
        """1 if higher is better, -1 if lower is better."""
        return 1 if self.is_better(1.0, 0.0) else -1

    def is_in(self, values: Mapping[str, float]) -> bool:
        return self.key in values or (bool(self.keys_of_sets) and values.keys() >= set(self.keys_of_sets))

    def read(self, values: Mapping[str, float]) -> float:
        if self.key in values:
            return values[self.key]
        return sum(values[key] for key in self.keys_of_sets) / len(self.keys_of_sets)


@dataclass(frozen=True)
class Rule:
    """Defines when an evaluation is better than all before: when all its quantities are.

    A non-finite value is never better. A rule without quantities accepts every evaluation.

    Attributes:
        name: Such as "best_valid_loss", "best_accuracy@en", "best_accuracy/f1" or "always".
    """

    name: str
    quantities: tuple[Quantity, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the best values: the rule's name, or `<rule>[<label>]` for several quantities."""
        if len(self.quantities) == 1:
            return (self.name,)
        return tuple(f"{self.name}[{quantity.label}]" for quantity in self.quantities)

    @property
    def needs_validation(self) -> bool:
        """Whether it compares validation results."""
        return any(quantity.key != TRAIN_LOSS for quantity in self.quantities)

    def update(self, best: dict[str, float], values: Mapping[str, float], *, min_delta: float = 0.0) -> bool:
        """Put the values of an evaluation into `best` if it is better.

        The best values of several quantities always come from one evaluation.

        Args:
            min_delta: The minimum improvement.
        """
        new: dict[str, float] = {}
        for key, quantity in zip(self.keys, self.quantities, strict=True):
            new[key] = value = quantity.read(values)
            # Nothing is better than an infinite loss that is the best, and every comparison with NaN is false.
            if not math.isfinite(value):
                return False
            if key in best and not quantity.is_better(value - quantity.sign * min_delta, best[key]):
                return False
        best.update(new)
        return True

    def require(self, values: Mapping[str, float], argument: Argument, quantities: Quantities) -> None:
        """Check that an evaluation has all values that the rule compares; `quantities` are those that rules can use."""
        for quantity in self.quantities:
            if quantity.is_in(values):
                continue
            # Without an error, the run would end without a saved model.
            # A step may also report values without a direction, which no rule accepts.
            choices = list(filter(quantities.find_quantity, sorted(values)))
            do = f"return it from validation_step, or choose one of {choices}"
            if quantity.key.startswith(VALID_LOSS):
                do = f'return {{"loss": loss}} from validation_step, or choose another {argument.name}'
                do += "; an evaluation whose weights are all 0 has no loss"
            expected = " and ".join(quantity.keys_of_sets) or quantity.key
            where = f"{argument.call}({argument.name}={self.name!r})"
            raise fail(ModuleContractError, where, got=f"an evaluation with {sorted(values)}", expected=expected, do=do)


class Quantities:
    """All values that rules can refer to, used to parse rule names.

    `directions` maps each metric's main entry to a function that compares a new value with an old one. `sets` are the
    names of the validation sets, empty for a set without a name; None if unknown so far: then every name is accepted.
    """

    def __init__(self, directions: Mapping[str, IsBetter], sets: Sequence[str] | None = None) -> None:
        for name in _LOSSES.keys() & directions:  # "best_valid_loss" would mean two values
            got, expected = f"the main entry {name!r}", "a name not used by the losses"
            raise fail(MetricError, f"metric {name!r}", got=got, expected=expected, do="rename it")
        self.directions: dict[str, IsBetter] = {**_LOSSES, **directions}
        self._sets = None if sets is None else list(filter(None, sets))

    def read_rule(self, name: Any, argument: Argument) -> Rule:
        """Return the rule of a name; the prefix "best_" is optional.

        "best_accuracy" is the mean over the validation sets, "best_accuracy@en" or "best_accuracy__en" refers to one;
        "best_accuracy@en/f1@de" requires both to be better.
        """
        if name == ALWAYS:
            return Rule(ALWAYS)
        parts = self._split(name) if isinstance(name, str) else []
        quantities = tuple(filter(None, map(self._find, parts)))
        if not parts or len(quantities) != len(parts):
            self._reject_rule(name, argument)
        labels = [quantity.label for quantity in quantities]
        rule = Rule(_PREFIX + "/".join(labels), quantities)
        if len(set(labels)) != len(labels):  # "best_accuracy/accuracy"
            do = f"write {_PREFIX + '/'.join(dict.fromkeys(labels))!r}"
            argument.reject(repr(name), "each quantity of a rule once", do)
        return rule

    def find_quantity(self, name: str) -> Quantity | None:
        """Return the quantity of a name such as "accuracy", "accuracy@en" or "valid_loss"; None if unknown."""
        return self._find(name.removeprefix(_PREFIX))

    def read_rules(self, names: Any, argument: Argument) -> list[Rule]:
        """Return the rules of one name, of a list of names or of None; a name starts with "best_" or is "always"."""
        if names is None:
            return []
        listed = names if isinstance(names, list | tuple) else [names]
        for name in listed:
            # "accuracy" or True may be meant for another trainer's argument of this kind.
            if not isinstance(name, str) or not (name == ALWAYS or name.startswith(_PREFIX)):
                self._reject_rule(name, argument)
        rules = [self.read_rule(name, argument) for name in listed]
        unique_names = dict.fromkeys(rule.name for rule in rules)
        if len(unique_names) != len(rules) or not rules:  # two rules of one name would save into one folder
            argument.reject(repr(names), "each rule once, or None", f"{argument.name}={list(unique_names) or None}")
        return rules

    def _split(self, name: str) -> list[str]:
        """Return the parts of a rule; the name of a metric may contain slashes, by which TensorBoard groups charts."""
        words = name.removeprefix(_PREFIX).split("/")
        parts = []
        while words:
            # The longest name that is known; a word that begins none is a part, which `_find` does not find.
            length = len(words)
            while length > 1 and self._find("/".join(words[:length])) is None:
                length -= 1
            parts.append("/".join(words[:length]))
            words = words[length:]
        return parts

    def _find(self, part: str) -> Quantity | None:
        if _AS_LOGGED not in self.directions and re.match(rf"{_AS_LOGGED}(@|__|$)", part):
            part = VALID_LOSS.removeprefix(_PREFIX) + part.removeprefix(_AS_LOGGED)
        fitting = [name for name in self.directions if part == name or part.startswith((f"{name}@", f"{name}__"))]
        if not fitting:
            return None
        name = max(fitting, key=len)
        key, is_better = _PREFIX + name, self.directions[name]
        if part == name:
            keys_of_sets: list[str] = []
            if key != TRAIN_LOSS:  # no validation set has a training loss
                keys_of_sets = [f"{key}__{set_name}" for set_name in self._sets or ()]
            return Quantity(name, is_better, key, tuple(keys_of_sets))
        set_name = part.removeprefix(f"{name}@").removeprefix(f"{name}__")
        if key == TRAIN_LOSS or not set_name or "/" in set_name:  # "/" separates the parts of a rule
            return None
        if self._sets is not None and set_name not in self._sets:  # misspelt; the rule would never be read
            return None
        return Quantity(f"{name}@{set_name}", is_better, f"{key}__{set_name}")

    def _reject_rule(self, name: Any, argument: Argument) -> NoReturn:
        labels = list(self.directions)
        for metric in self.directions:
            for set_name in self._sets or ():
                if _PREFIX + metric != TRAIN_LOSS and "/" not in set_name:  # "/" separates the parts of a rule
                    labels.append(f"{metric}@{set_name}")
        prefix, special = _PREFIX, [ALWAYS]
        if argument == _MODEL_SAVING:
            special.append(LAST)
        if argument.name == "patience":  # which watches values, and has no rules such as "always"
            prefix, special = "", []
        names = {label: prefix + label for label in labels}
        for word in special:
            names[word] = word
        expected = f"one of {', '.join(map(repr, names.values()))}; a metric needs its Metric in metrics="
        argument.reject(repr(name), expected, self._advise(name, names, prefix))

    def _advise(self, name: Any, names: Mapping[str, str], prefix: str) -> str:
        """Return what to write in place of a name that is no rule: `names` are those that are, by label."""
        write_loss = f"write {prefix + VALID_LOSS.removeprefix(_PREFIX)!r}"
        if not isinstance(name, str):
            return write_loss
        grouped = [label for label in self.directions if "/" in label]
        meant = nearest(name.removeprefix(_PREFIX), grouped)
        if meant is not None:
            return f"did you mean {prefix + meant!r}?"
        if nearest(_STAGE_FOLDER.sub("", name), ["loss", *self.directions, *METRIC_NAMES], _SIMILARITY):
            name = _STAGE_FOLDER.sub(r"\1\2_", name)
        parts = [part.removeprefix(_PREFIX) for part in self._split(name)]
        if not all(parts):
            return write_loss
        unknown = next((part for part in parts if self._find(part) is None), None)
        if unknown is None:
            return f"did you mean {prefix + '/'.join(parts)!r}?"
        known = [*self.directions, *METRIC_NAMES]
        if len(parts) > 1 and not any(self._find(part) or nearest(part, known, _SIMILARITY) for part in parts):
            # One name with a slash, as in TensorBoard: a metric for a part of it would be refused again.
            unknown = "/".join(parts)
            parts = [unknown]
        metric = _OTHER_TRAINERS_PREFIX.sub("", unknown.partition("@")[0], count=1)
        rules: Iterable[str] = names
        if len(parts) > 1:  # "always" and "last" cannot be parts of a rule
            rules = names.keys() - {ALWAYS, LAST}
        meant = nearest(unknown, rules) or nearest(metric, self.directions, _SIMILARITY)
        if meant is not None:
            for index, part in enumerate(parts):
                if part == unknown:
                    parts[index] = meant
            rule = "/".join(parts)
            return f"did you mean {names.get(rule, prefix + rule)!r}?"
        where = "where a step, self.log or a hook reports it"
        reported = f'metrics={{"{metric}": "min"}}, or "max" if higher is better, {where}'
        builtin = nearest(metric, METRIC_NAMES, _SIMILARITY)
        if builtin is None or "/" in unknown:
            return f"{reported}; or metrics=[MyMetric({metric!r})], a Metric named {metric!r}"
        return f'write {prefix + builtin!r}, with "{builtin}" among metrics=[...]; {reported}'


def without_validation(model_saving: Any) -> Any:
    """Return the rules of a run without validation data, where "best_valid_loss" means "best_train_loss"."""
    if isinstance(model_saving, list | tuple):
        return list(dict.fromkeys(map(without_validation, model_saving)))
    if model_saving in (VALID_LOSS, _PREFIX + _AS_LOGGED):
        return TRAIN_LOSS
    return model_saving


def name_by_rules(results: Mapping[str, float], *, loss_name: str, train_loss: float | None) -> dict[str, float]:
    """Return the results of an evaluation by the names that rules use.

    Args:
        results: Losses and metrics by name; with several validation sets `<name>__<set>`.
        train_loss: Mean training loss since the last evaluation; None, if there was no step since, counts as NaN.
    """
    values = {TRAIN_LOSS: math.nan}
    if train_loss is not None:
        values[TRAIN_LOSS] = train_loss
    for name, value in results.items():
        is_loss = name == loss_name or name.startswith(f"{loss_name}__")
        key = _PREFIX + name
        if is_loss:
            key = VALID_LOSS + name.removeprefix(loss_name)
        values[key] = value
    return values


_MODEL_SAVING = Argument("model_saving")
Limit = float | Mapping[str, float] | None
"""A limit for every value, one per value by name, or None."""


@dataclass(frozen=True)
class _Saving:
    """One rule, with the bounds between which it saves.

    Attributes:
        lower: Exclusive lower bounds by quantity label.
        upper: Exclusive upper bounds by quantity label.
    """

    rule: Rule
    lower: Mapping[str, float]
    upper: Mapping[str, float]

    def allows(self, values: Mapping[str, float]) -> bool:
        for quantity in self.rule.quantities:
            upper = self.upper.get(quantity.label, math.inf)
            if not self.lower.get(quantity.label, -math.inf) < quantity.read(values) < upper:
                return False
        return True


class Selection:
    """Tracks the best values and decides when a model is saved.

    A non-finite value is never best; of equal values the first is kept, unless the metric compares with >= or <=.
    Thresholds only prevent saving: a best value outside of them is still recorded.

    Args:
        rule: "best_valid_loss", "best_train_loss", "best_<metric>", "always", None for never, or a list of them.
            With several validation sets "best_<metric>" is the mean, "best_<metric>@<set>" (or "__<set>") one of them;
            "best_<metric>/<metric>" saves if both are better than at its last best.
        below: Saves only while the value is below this; a dict sets limits by name.
        above: Saves only while the value is above this; a dict sets limits by name.

    Attributes:
        best: The best values so far: by rule name, or `<rule>[<metric>]` for a rule with several.
        unsaved: By rule name, or `LAST`: each step whose model could not be written, and why.
    """

    def __init__(
        self,
        rule: str | Sequence[str] | None,
        directions: Mapping[str, IsBetter],
        *,
        sets: Sequence[str] | None = None,
        below: Limit = None,
        above: Limit = None,
    ) -> None:
        self._quantities = Quantities(directions, sets)
        self._savings: list[_Saving] = []
        self._chosen: set[str] = set()
        self._saved_at: dict[str, int] = {}
        self.unsaved: dict[str, dict[int, str]] = {}
        self.best: dict[str, float] = {}
        self._add(self._quantities.read_rules(rule, _MODEL_SAVING), below, above, _MODEL_SAVING)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the rules in canonical spelling: "best_accuracy@en" for "best_accuracy__en"."""
        return tuple(saving.rule.name for saving in self._savings)

    @property
    def rule(self) -> str | None:
        """The rules, joined by commas; None if nothing is ever saved."""
        return ", ".join(self.names) or None

    @property
    def directions(self) -> Mapping[str, IsBetter]:
        """Whether a new value is better than an old one, by the label of each known quantity."""
        return self._quantities.directions

    def find_quantity(self, name: str) -> Quantity | None:
        """Return a quantity by its name, such as "accuracy" or "valid_loss"; None if unknown."""
        return self._quantities.find_quantity(name)

    @property
    def has_saved(self) -> bool:
        """Whether a rule has saved the model since the start of the run."""
        return bool(self._chosen)

    @property
    def needs_validation(self) -> bool:
        """Whether a rule uses validation results."""
        return any(saving.rule.needs_validation for saving in self._savings)

    def register(self, name: str, *, below: Limit = None, above: Limit = None) -> None:
        """Add a rule with its own thresholds."""
        argument = Argument("name", call="register_model_saving")
        rules = self._quantities.read_rules([name], argument)
        if rules[0].name in self.names:  # both would save into one folder
            argument.reject(repr(name), f"a rule other than {self.rule}, which already exist", "leave it out")
        self._add(rules, below, above, Argument("saving", call="register_model_saving"))

    def folder(self, model_path: Path, name: str) -> Path:
        """Return where a rule's model is saved: `model_path` itself for a single rule, otherwise a subfolder.

        The subfolder has the name of the rule, with "+" instead of "/".
        """
        if len(self._savings) == 1:
            return model_path
        return model_path / name.replace("/", "+")

    def consider(self, values: Mapping[str, float], *, step: int = 0) -> list[str]:
        """Record an evaluation and return the names of the rules that save the weights.

        Args:
            values: Its results from `name_by_rules`. If a required value is missing, nothing is recorded.
            step: The optimizer step before the evaluation.
        """
        self.require(values)  # before any rule records a value
        chosen: list[str] = []
        for saving in self._savings:
            if not saving.rule.update(self.best, values):
                continue
            # A best value outside the thresholds has no model, even if an earlier one has.
            self._saved_at.pop(saving.rule.name, None)
            if saving.allows(values):
                chosen.append(saving.rule.name)
        self._chosen.update(chosen)
        self._saved_at |= dict.fromkeys(chosen, step)
        return chosen

    def saved_at(self, key: str) -> int | None:
        """Return the optimizer step of the saved model that has a best value, by its key in `best`, or None."""
        return self._saved_at.get(key.partition("[")[0])

    def require(self, values: Mapping[str, float]) -> None:
        """Check that an evaluation has all required values."""
        for saving in self._savings:
            saving.rule.require(values, _MODEL_SAVING, self._quantities)

    def explain_unsaved(self) -> list[str]:
        """Return, for each rule that has saved nothing since the start of the run, the reason."""
        reasons = []
        for saving in self._savings:
            rule = saving.rule
            if not rule.quantities or rule.name in self._chosen:
                continue
            reason = "was never finite"
            if rule.keys[0] in self.best:
                reason = f"was never within its thresholds when it was best (its best: {self._describe_best(rule)})"
            reasons.append(f"{rule.name} {reason}")
        return reasons

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "best": dict(self.best),
            "chosen": sorted(self._chosen),
            "saved_at": dict(self._saved_at),
        }
        if self.unsaved:
            state["unsaved"] = {name: dict(steps) for name, steps in self.unsaved.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; a new rule starts over, a removed one is dropped."""
        keys = set(chain.from_iterable(saving.rule.keys for saving in self._savings))
        self.best.clear()  # in place: `trainer.state.best` is this dict
        for key, value in state["best"].items():
            if key in keys:
                self.best[key] = value
        self._chosen = set(state["chosen"]) & set(self.names)
        self._saved_at = {name: step for name, step in state["saved_at"].items() if name in self.names}
        unsaved = state.get("unsaved", {})
        self.unsaved = {name: dict(unsaved[name]) for name in unsaved if name in (*self.names, LAST)}

    def forget(self, holds_its_model: Callable[[str], bool]) -> list[str]:
        """Forget the best values whose models are no longer in their folders, so that the next one is the best.

        Returns descriptions of these rules and their best values.
        """
        forgotten = []
        for saving in self._savings:
            rule = saving.rule
            if not rule.quantities or rule.name not in self._chosen or holds_its_model(rule.name):
                continue
            forgotten.append(f"{rule.name} ({self._describe_best(rule)})")
            self._chosen.discard(rule.name)
            self._saved_at.pop(rule.name, None)
            for key in rule.keys:
                self.best.pop(key, None)
        return forgotten

    def _describe_best(self, rule: Rule) -> str:
        return ", ".join(f"{self.best[key]:.6g}" for key in rule.keys)

    def _add(self, rules: list[Rule], below: Limit, above: Limit, argument: Argument) -> None:
        lower = self._read_limit(above, rules, replace(argument, name=f"{argument.name}_above"))
        upper = self._read_limit(below, rules, replace(argument, name=f"{argument.name}_below"))
        for label in lower.keys() & upper.keys():
            if lower[label] >= upper[label]:  # swapped; nothing would ever be saved
                got = f"{label} above {lower[label]} and below {upper[label]}"
                wrong = replace(argument, name=f"{argument.name}_above")
                wrong.reject(got, "a lower bound below the upper one", f"leave `{wrong.name}` out, or swap the two")
        self._savings += [_Saving(rule, lower, upper) for rule in rules]

    def _read_limit(self, limit: Limit, rules: list[Rule], argument: Argument) -> dict[str, float]:
        if limit is None or not rules:  # without rules there is nothing to limit
            return {}
        labels = []
        for rule in rules:
            labels += [quantity.label for quantity in rule.quantities]
        bounds = {}
        if not isinstance(limit, Mapping):
            bounds = dict.fromkeys(labels, limit)
        else:
            for name, bound in limit.items():
                label = self._quantities.read_rule(name, argument).name.removeprefix("best_")
                if label not in labels:  # it would limit nothing
                    expected = f"a value used by a rule: {', '.join(labels) or 'none'}"
                    argument.reject(repr(name), expected, "name one of these, or leave it out")
                bounds[label] = bound
        if not bounds:  # an empty dict, or a limit for "always"
            rule_names = ", ".join(rule.name for rule in rules)
            got = f"{limit!r}, and {rule_names}, which uses no value"
            argument.reject(got, "a value for each name, and a rule that uses one", "leave it out")
        for bound in bounds.values():
            # Every comparison with NaN is false: nothing would be saved.
            if isinstance(bound, bool) or not isinstance(bound, int | float) or math.isnan(bound):
                argument.reject(f"{bound!r} ({type(bound).__name__})", "a number", f"{argument.name}=0.5, for example")
        return bounds
