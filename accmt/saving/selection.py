"""Which evaluation's weights are kept."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn

from accmt.errors import ArgumentError, ModuleContractError, explain

IsBetter = Callable[[float, float], bool]

VALID_LOSS = "best_valid_loss"
TRAIN_LOSS = "best_train_loss"
ALWAYS = "always"


class Selection:
    """Remembers the best value of what models are saved by, and says when a new one is better.

    A value that is not finite is never best; of equal ones the first stays, unless the metric compares with >= or <=.

    Args:
        rule: "best_valid_loss", "best_train_loss", "best_<metric>", "always", or None for never.
        directions: For each metric's main entry, whether a new value is better than an old one.

    Attributes:
        rule: The rule.
        best: The best value so far under the rule's name; empty before the first.

    Raises:
        ArgumentError: No such rule; the message names the nearest.
    """

    def __init__(self, rule: str | None, directions: Mapping[str, IsBetter]) -> None:
        self._directions = {VALID_LOSS: operator.lt, TRAIN_LOSS: operator.lt} | {
            f"best_{name}": is_better for name, is_better in directions.items()
        }
        if rule is not None and rule not in (*self._directions, ALWAYS):
            _refuse_rule(str(rule), [*self._directions, ALWAYS])
        self.rule = rule
        self.best: dict[str, float] = {}

    @property
    def needs(self) -> str | None:
        """The quantity that decides, such as "best_accuracy"; None where none does."""
        return self.rule if self.rule in self._directions else None

    def consider(self, values: Mapping[str, float]) -> bool:
        """Take note of an evaluation.

        Args:
            values: Its results under names of rules: "best_valid_loss", "best_train_loss", "best_<metric>".

        Returns:
            Whether the weights should be saved.

        Raises:
            ModuleContractError: The quantity that decides is not among the results.
        """
        if self.needs is None:
            return self.rule == ALWAYS
        self.require(values)
        value = values[self.needs]
        best = self.best.get(self.needs)
        is_new_best = math.isfinite(value) and (best is None or self._directions[self.needs](value, best))
        if is_new_best:
            self.best[self.needs] = value
        return is_new_best

    def require(self, values: Mapping[str, float]) -> None:
        """Check that the quantity that decides is among the results of an evaluation.

        Raises:
            ModuleContractError: It is not.
        """
        if self.needs is None or self.needs in values:
            return
        if self.needs == VALID_LOSS:
            do = 'return {"loss": loss} from validation_step, or choose another model_saving'
        else:
            do = f"return it from validation_step, or choose one of {sorted(values)}"
        raise ModuleContractError(
            explain(f"Trainer(model_saving={self.rule!r})", f"an evaluation with {sorted(values)}", str(self.needs), do)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the best value."""
        return {"best": dict(self.best)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.best.clear()
        self.best.update(state["best"])


def _refuse_rule(rule: str, choices: list[str]) -> NoReturn:
    expected = "one of " + ", ".join(map(repr, choices)) + ", or None; best_<metric> needs that Metric in metrics="
    nearest = get_close_matches(rule, choices, n=1, cutoff=0.75)
    metric = rule.removeprefix("best_")
    do = (
        f"model_saving={nearest[0]!r}?"
        if nearest
        else f"metrics=[...] with a Metric named {metric!r}, such as Accuracy()"
    )
    raise ArgumentError(explain("Trainer(model_saving=...)", repr(rule), expected, do))
