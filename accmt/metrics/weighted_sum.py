"""A weighted sum that is kept on the device until it is read, so that adding to it waits for nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch

COMPACT_AT = 256
"""After so many small values on a device, what keeps them makes one of them, so that memory stays bounded."""

Weight: TypeAlias = float | torch.Tensor


class WeightedSum:
    """A sum of weighted values. A value of weight 0 counts for nothing, even if it is not finite.

    Detached values are put in a list, which costs less than a sum on the device; every few hundred of them become one
    partial sum there.
    """

    def __init__(self) -> None:
        self._values: list[torch.Tensor] = []
        self._weights: list[Weight] = []
        self._partial: torch.Tensor | None = None

    def add(self, value: torch.Tensor, weight: Weight) -> None:
        """Add one value."""
        self._values.append(value)
        self._weights.append(weight)
        if len(self._values) >= COMPACT_AT:
            self._compact()

    def take(self) -> tuple[float, float]:
        """Return (sum of value x weight, sum of weights) in double precision, and start again from nothing.

        Waits for the device.
        """
        pairs = [(v * w, w) for v, w in zip(_read(self._values), _read(self._weights), strict=True) if w]
        if self._partial is not None:
            pairs.append(tuple(self._partial.tolist()))
        self._values, self._weights, self._partial = [], [], None
        return exact_sum([total for total, _ in pairs]), exact_sum([weight for _, weight in pairs])

    def copy(self) -> WeightedSum:
        """Return a copy that shares the values, which nobody changes."""
        copied = object.__new__(WeightedSum)
        copied._values, copied._weights, copied._partial = self._values.copy(), self._weights.copy(), self._partial
        return copied

    def state_dict(self) -> dict[str, Any]:
        # Each value as it is: adding them up now would round differently than adding them up later.
        values, weights = self._stack()
        return {
            "values": values.tolist(),
            "weights": weights.tolist(),
            "are_tensors": [isinstance(weight, torch.Tensor) for weight in self._weights],
            "partial": None if self._partial is None else self._partial.tolist(),
        }

    def add_state(self, state: Mapping[str, Any]) -> None:
        """Add what `state_dict` returned, in this process or in another one."""
        self._values += [torch.tensor(value, dtype=torch.float64) for value in state["values"]]
        for weight, is_tensor in zip(state["weights"], state["are_tensors"], strict=True):
            self._weights.append(torch.tensor(weight, dtype=torch.float64) if is_tensor else weight)
        if state["partial"] is not None:
            partial = torch.tensor(state["partial"], dtype=torch.float64)
            self._partial = partial if self._partial is None else self._partial + partial

    def _compact(self) -> None:
        values, weights = self._stack()
        dtype = torch.float32 if values.device.type == "mps" else torch.float64
        values, weights = values.to(dtype), weights.to(values.device, dtype, non_blocking=True)
        sums = torch.stack([torch.where(weights == 0, 0.0, values * weights).sum(), weights.sum()])
        self._partial = sums if self._partial is None else stack([self._partial, sums]).sum(0)
        self._values, self._weights = [], []

    def _stack(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._values:
            return torch.empty(0), torch.empty(0)
        values = stack(self._values)
        if not any(isinstance(weight, torch.Tensor) for weight in self._weights):
            return values, torch.tensor(self._weights, dtype=torch.float64)
        weights = stack([torch.as_tensor(weight).detach() for weight in self._weights])
        return values.to(weights.device, non_blocking=True) if values.device.type == "cpu" else values, weights


def _read(values: Sequence[Weight]) -> list[float]:
    """Return the numbers, of those on a device all at once: it is waited for."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [value.item() if isinstance(value, torch.Tensor) else value for value in values]
    return cast("list[float]", stack([torch.as_tensor(value) for value in values]).tolist())


def stack(values: list[torch.Tensor]) -> torch.Tensor:
    """Stack scalars on their device: a step may return a number now and a tensor of the device later.

    A number moves to the device, not the other way round, for which the device would have to be waited for.
    """
    devices = {value.device for value in values}
    if len(devices) > 1:
        device = next(device for device in devices if device.type != "cpu")
        values = [value.to(device, non_blocking=True) for value in values]
    return torch.stack(values)


def exact_sum(values: Sequence[float]) -> float:
    """Add up without rounding in between, or plainly where that overflows or meets both infinities."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)
