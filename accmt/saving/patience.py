"""Early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from accmt.options.saving import PatienceOptions
from accmt.saving.selection import Argument, IsBetter, Quantities, Rule
from accmt.state import Counters

_PATIENCE = Argument("patience")
_MODEL_SAVING = Argument("model_saving")
_NAME, _HAS_QUANTITIES = attrgetter("name"), attrgetter("quantities")  # of a rule


class Patience:
    """Counts consecutive evaluations without a better value.

    "Better" means the same as for saving: a non-finite value never is, and an equal value only where the metric
    compares with >= or <=. Thresholds for saving are ignored.

    Args:
        patience: Consecutive evaluations without a better value before training ends. A number counts evaluations in
            which no rule of `rule` has a new best. A dict counts each value separately, such as `{"accuracy": 3}`; the
            first that is exhausted ends training. Use `PatienceOptions` instead of a number for more options.

    Attributes:
        best: The best values so far, as in `Selection`.
    """

    def __init__(
        self,
        patience: int | Mapping[str, int | PatienceOptions | Mapping[str, Any]],
        rule: str | Sequence[str] | None,
        directions: Mapping[str, IsBetter],
        *,
        sets: Sequence[str] | None = None,
    ) -> None:
        quantities = self._quantities = Quantities(directions, sets)
        self._is_by_name = False
        if isinstance(patience, Mapping):
            self._is_by_name = True
            options = [_read_options(patience, value) for value in patience.values()]
            groups = [[quantities.read_rule(name, _PATIENCE)] for name in patience]
        else:
            options = [_read_options(patience, patience)]
            # "always" has no value to watch.
            groups = [list(filter(_HAS_QUANTITIES, quantities.read_rules(rule, _MODEL_SAVING)))]
        _check(patience, groups)
        self._watched: dict[str, list[Rule]] = {}
        for rules in groups:
            self._watched[", ".join(map(_NAME, rules))] = rules
        self._options = dict(zip(self._watched, options, strict=True))
        self._without_better = dict.fromkeys(self._watched, 0)
        self._ended_by: dict[str, str] = {}
        self.best: dict[str, float] = {}

    @property
    def is_exhausted(self) -> bool:
        return 0 in self._remaining.values() or bool(self._ended_by)

    def describe_exhausted(self) -> str:
        lines = [f"{name} {reason}" for name, reason in self._ended_by.items()]
        for name, remaining in self._remaining.items():
            if remaining == 0:
                lines.append(f"{name} has not improved for {self._options[name].evaluations} evaluation(s)")
        return "; ".join(lines)

    @property
    def remaining(self) -> int | dict[str, int]:
        """Evaluations without a better value that are still allowed; by rule name if a dict was passed."""
        if self._is_by_name:
            return self._remaining
        return next(iter(self._remaining.values()))

    @property
    def needs_validation(self) -> bool:
        return any(rule.needs_validation for rule in self._rules)

    def consider(self, values: Mapping[str, float]) -> None:
        """Record an evaluation, unless a watched value is missing; not for the one before training."""
        self.require(values)
        for name, rules in self._watched.items():
            options = self._options[name]
            self._without_better[name] += 1
            # All of them: each rule records its best value, even after one that is better.
            for rule in rules:
                if rule.update(self.best, values, min_delta=options.min_delta):
                    self._without_better[name] = 0
                for quantity in rule.quantities:
                    value, threshold = quantity.read(values), options.stopping_threshold
                    if options.check_finite and not math.isfinite(value):  # a diverged run does not recover
                        self._ended_by[name] = f"is {value}"
                    elif threshold is not None and quantity.sign * value >= quantity.sign * threshold:
                        self._ended_by[name] = f"has reached {threshold:g}: {value:.6g}"

    def require(self, values: Mapping[str, float]) -> None:
        """Check that all watched values are among the results of an evaluation."""
        for rule in self._rules:
            rule.require(values, _PATIENCE, self._quantities)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"without_better": dict(self._without_better), "best": dict(self.best)}
        if self._ended_by:
            state["ended_by"] = dict(self._ended_by)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; values that were not watched start over, and the patience is that of this run."""
        for name in self._without_better:
            self._without_better[name] = state["without_better"].get(name, 0)
        keys = set(chain.from_iterable(rule.keys for rule in self._rules))
        self.best = {}
        for key, value in state["best"].items():
            if key in keys:
                self.best[key] = value
        self._ended_by = {}
        for name, reason in state.get("ended_by", {}).items():
            if name in self._options and self._options[name].may_end:  # else the new settings would end the run at once
                self._ended_by[name] = reason

    @property
    def _rules(self) -> list[Rule]:
        return list(chain.from_iterable(self._watched.values()))

    @property
    def _remaining(self) -> dict[str, int]:
        remaining = {}
        for name, options in self._options.items():
            if options.evaluations is not None:  # else only a threshold ends the run
                remaining[name] = max(0, options.evaluations - self._without_better[name])
        return remaining


def _read_options(patience: Any, value: Any) -> PatienceOptions:
    """Return the early-stopping options for one value: a number of evaluations, or options."""
    match value:
        case PatienceOptions():
            return value
        case Mapping():
            return PatienceOptions.read("PatienceOptions", value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:  # True is an int
        _PATIENCE.reject(repr(patience), "whole numbers from 1", "patience=3, for example")
    return PatienceOptions(patience=value)


def _check(patience: Any, groups: list[list[Rule]]) -> None:
    rules = list(chain.from_iterable(groups))
    if not rules or not all(rule.quantities for rule in rules):  # it would never end the run
        do = 'patience={"valid_loss": 3}, for example'
        _PATIENCE.reject(repr(patience), "a value to watch; model_saving alone provides none", do)
    if len({rule.name for rule in rules}) != len(rules):  # "val_loss" and "valid_loss"
        _PATIENCE.reject(repr(patience), "each value once", "remove one of the two spellings")


def may_stop(state: Counters, *, min_epochs: int | None, min_steps: int | None) -> bool:
    """Return whether training has reached its minimum length, before which early stopping and stop requests wait."""
    return state.epoch >= (min_epochs or 0) and state.global_step >= (min_steps or 0)
