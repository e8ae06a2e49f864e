"""When training ends because it no longer helps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accmt.saving.rules import TRAIN_LOSS, Argument, IsBetter, Quantities, Rule
from accmt.state import Counters

_PATIENCE = Argument("patience")
_MODEL_SAVING = Argument("model_saving")


class Patience:
    """Counts evaluations in a row without a better value.

    What is better is the same as for saving: a value that is not finite never is, an equal one only where the metric
    compares with >= or <=. Thresholds of saving play no part.

    Args:
        patience: Evaluations in a row without a better value before training ends. A number counts those in which no
            rule of `rule` has a new best. A dict counts each value for itself, such as `{"accuracy": 3}`; the first
            that is exhausted ends the training.

    Attributes:
        best: The best values so far, as of `Selection`.
    """

    def __init__(
        self,
        patience: int | Mapping[str, int],
        rule: str | Sequence[str] | None,
        directions: Mapping[str, IsBetter],
        *,
        sets: Sequence[str] | None = None,
    ) -> None:
        quantities = Quantities(directions, sets)
        self._is_by_name = isinstance(patience, Mapping)
        if isinstance(patience, Mapping):
            allowed = list(patience.values())
            groups = [[quantities.read_rule(name, _PATIENCE)] for name in patience]
        else:
            allowed = [patience]
            groups = [[one for one in quantities.read_rules(rule, _MODEL_SAVING) if one.quantities]]
        _check(patience, allowed, groups)
        self._watched = {", ".join(rule.name for rule in rules): rules for rules in groups}
        self._allowed = dict(zip(self._watched, allowed, strict=True))
        self._without_better = dict.fromkeys(self._watched, 0)
        self.best: dict[str, float] = {}

    @property
    def is_exhausted(self) -> bool:
        return 0 in self._left.values()

    def describe_exhausted(self) -> str:
        spent = [name for name, left in self._left.items() if left == 0]
        return "; ".join(f"{name} has not improved for {self._allowed[name]} evaluation(s)" for name in spent)

    @property
    def left(self) -> int | dict[str, int]:
        """Evaluations without a better value that are still allowed; by the rule's name where a dict was given."""
        return self._left if self._is_by_name else next(iter(self._left.values()))

    @property
    def needs_validation(self) -> bool:
        return any(quantity.key != TRAIN_LOSS for rule in self._rules for quantity in rule.quantities)

    def consider(self, values: Mapping[str, float]) -> None:
        """Take note of an evaluation, unless a watched value is missing; not for the one before training."""
        self.require(values)
        for name, rules in self._watched.items():
            is_better = [rule.update(self.best, values) for rule in rules]
            self._without_better[name] = 0 if any(is_better) else self._without_better[name] + 1

    def require(self, values: Mapping[str, float]) -> None:
        """Check that all watched values are among the results of an evaluation."""
        for rule in self._rules:
            rule.require(values, _PATIENCE)

    def state_dict(self) -> dict[str, Any]:
        return {"without_better": dict(self._without_better), "best": dict(self.best)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned; what was not watched then starts over, the patience itself is ours."""
        for name in self._without_better:
            self._without_better[name] = state["without_better"].get(name, 0)
        keys = {key for rule in self._rules for key in rule.keys}
        self.best = {key: value for key, value in state["best"].items() if key in keys}

    @property
    def _rules(self) -> list[Rule]:
        return [rule for rules in self._watched.values() for rule in rules]

    @property
    def _left(self) -> dict[str, int]:
        return {name: max(0, allowed - self._without_better[name]) for name, allowed in self._allowed.items()}


def _check(patience: Any, allowed: list[int], groups: list[list[Rule]]) -> None:
    rules = [rule for group in groups for rule in group]
    for number in allowed:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            _PATIENCE.reject(repr(patience), "whole numbers from 1", "patience=3, for example")
    if not rules or not all(rule.quantities for rule in rules):
        do = 'patience={"valid_loss": 3}, for example'
        _PATIENCE.reject(repr(patience), "a value to watch; model_saving alone provides none", do)
    if len({rule.name for rule in rules}) != len(rules):
        _PATIENCE.reject(repr(patience), "each value once", "drop one of the two spellings")


def may_stop(state: Counters, *, min_epochs: int | None, min_steps: int | None) -> bool:
    """Return whether training has lasted as long as it must, before patience or a request to stop counts."""
    return state.epoch >= (min_epochs or 0) and state.global_step >= (min_steps or 0)
