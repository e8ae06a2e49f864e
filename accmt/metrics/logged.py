"""Values that steps log beside the loss, until they are averaged over batches and processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch

from accmt.errors import ModuleContractError, explain
from accmt.metrics.results import describe, find_scalar
from accmt.metrics.weighted_sum import Weight, WeightedSum, exact_sum

Totals: TypeAlias = dict[str, tuple[float, float | None]]
"""By name: a sum and its weight; the weight is None where the sum itself is wanted."""


class LoggedValues:
    """The values of one phase, training or the evaluation of one set.

    A value has the weight of the batch during which it was logged. That is known when the batch is done, so values wait
    until `end_batch`; between batches they have the weight of the last one (1 before the first).

    Attributes:
        is_open: Whether values are accepted.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._sums: dict[str, WeightedSum] = {}
        self._totals: set[str] = set()
        self._waiting: list[tuple[str, torch.Tensor]] | None = None
        self._weight: Weight = 1.0

    def __len__(self) -> int:
        return len(self._sums)

    def begin_batch(self) -> None:
        """Let values wait for the weight of the batch that begins; what waited for a failed one is dropped."""
        self.is_open = True
        self._waiting = []

    def drop_batch(self) -> None:
        """Forget a batch that was begun, as if it had not been."""
        self._waiting = None

    def close(self) -> None:
        """Accept nothing more before a batch begins; what still waits gets the weight of the last batch."""
        self.end_batch(self._weight)
        self.is_open = False

    def add(self, name: str, value: Any, *, is_total: bool = False) -> None:
        """Add one value; nothing is waited for, and neither the value nor its graph is kept.

        Args:
            name: Its name.
            value: A number, or a tensor of one element.
            is_total: Whether values are added up, without weights, instead of averaged.
        """
        if not self.is_open:
            do = "log in training_step or validation_step"
            raise _wrong_value(name, "a call when nothing is averaged", "a call in a step", do)
        scalar = find_scalar(value)
        if scalar is None:
            do = f"log({name!r}, value.mean())"
            raise _wrong_value(name, describe(value), "a number, or a tensor of one element", do)
        if name in self._sums and (name in self._totals) != is_total:
            raise _wrong_value(name, "means and sums under one name", "one of them", "give one of them another name")
        if is_total:
            self._totals.add(name)
        scalar = scalar.clone() if isinstance(value, torch.Tensor) else scalar  # the step may still change it
        self._sums.setdefault(name, WeightedSum())
        if self._waiting is None:
            self._weigh(name, scalar)
        else:
            self._waiting.append((name, scalar))

    def end_batch(
        self,
        weight: Weight,
        returned: Mapping[str, torch.Tensor] | None = None,
        weights: Mapping[str, Weight] | None = None,
    ) -> None:
        """Give the values of a batch its weight, those in `weights` their own."""
        self._weight = weight
        waiting, self._waiting = self._waiting or (), None
        for name, value in waiting:
            if returned and name in returned:
                got, do = "the name of a value that the step returned too", "rename one of them"
                raise _wrong_value(name, got, "each name once", do)
            self._weigh(name, value)
        for name, value in (returned or {}).items():
            self._sums.setdefault(name, WeightedSum()).add(value, (weights or {}).get(name, weight))

    def take(self) -> Totals:
        """Return what this process logged, and start again from nothing. Waits for the device."""
        sums = {name: values.take() for name, values in self._sums.items()}
        totals = {name: (total, None if name in self._totals else weight) for name, (total, weight) in sums.items()}
        self._sums, self._totals = {}, set()
        return totals

    def copy(self) -> LoggedValues:
        """Return a copy that shares the values, which nobody changes."""
        copied = object.__new__(LoggedValues)
        copied.__dict__.update(self.__dict__)
        copied._sums = {name: values.copy() for name, values in self._sums.items()} if self._sums else {}
        copied._totals = self._totals.copy()
        copied._waiting = None if self._waiting is None else self._waiting.copy()
        return copied

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": {name: values.state_dict() for name, values in self._sums.items()},
            "totals": sorted(self._totals),
            "weight": float(self._weight),
        }

    def add_state(self, state: Mapping[str, Any]) -> None:
        """Add what `state_dict` returned, in this process or in another one."""
        for name, values in state["sums"].items():
            self._sums.setdefault(name, WeightedSum()).add_state(values)
        self._totals.update(state["totals"])
        self._weight = state["weight"]

    def _weigh(self, name: str, value: torch.Tensor) -> None:
        self._sums[name].add(value, 1.0 if name in self._totals else self._weight)


def combine(every: Iterable[Totals]) -> dict[str, float]:
    """Return the values by name from what `take` returned on each process; a name without any weight is left out."""
    pairs: dict[str, list[tuple[float, float | None]]] = {}
    for totals in every:
        for name, pair in totals.items():
            pairs.setdefault(name, []).append(pair)
    values = {name: _combine(of_one) for name, of_one in pairs.items()}
    return {name: value for name, value in values.items() if value is not None}


def _combine(pairs: list[tuple[float, float | None]]) -> float | None:
    total = exact_sum([total for total, _ in pairs])
    if any(weight is None for _, weight in pairs):
        return total
    weight = exact_sum([weight for _, weight in pairs if weight is not None])
    return total / weight if weight else None


def _wrong_value(name: str, got: str, expected: str, do: str) -> ModuleContractError:
    return ModuleContractError(explain(f"the logged value {name!r}", got, expected, do))
