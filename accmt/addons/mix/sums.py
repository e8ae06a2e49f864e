"""Sums of the losses of samples in groups, such as the sources of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from accmt.addons.mix.order import Array
from accmt.metrics.averages import Totals, Weight, exact_parts

_Sums: TypeAlias = tuple[list[float], list[float], float, float]


class GroupedSum:
    """Sums of the losses of samples in groups. Adding only keeps references; sums are computed when they are needed.

    The sums are exact: their bits depend neither on when samples are summed nor on the process that has them.

    Args:
        names: The names of the groups.
        find_groups: Returns the number of the group of each sample, by their positions in the data.
    """

    LOSS, WEIGHT, SAMPLES, UNKNOWN = "loss__", "weight__", "samples__", "samples_of_unknown_loss"
    MOST_WAITING = 1024
    """After this many batches without a row, their samples are summed, which waits for the device."""

    def __init__(self, names: Sequence[str], find_groups: Callable[[Array], Array]) -> None:
        self._names = list(names)
        self._find_groups = find_groups
        self._entries: list[tuple[Array, torch.Tensor, Weight]] = []
        # Of each group: the parts of the sums of loss x weight and of weights, samples, and samples without a loss.
        self._sums: list[_Sums] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added since the last `take`."""
        return not self._entries and self._sums is None

    def add(self, samples: Sequence[int] | Array, losses: torch.Tensor, weights: Weight) -> None:
        """Add the samples of one batch.

        Args:
            samples: Their positions in the data, at least one.
            losses: Their detached losses `[samples]`, or their mean, which is that of a group if all are of one.
            weights: Their weights `[samples]`, or the sum of equal ones.
        """
        self._entries.append((np.array(samples, np.int64), losses, weights))
        if len(self._entries) >= self.MOST_WAITING:
            self._add_waiting()

    def take(self) -> Totals:
        """Return the mean loss of each group with its weight, its total weight and its samples, and reset.

        Waits for the device.
        """
        self._add_waiting()
        if self._sums is None:
            return {}
        sums, self._sums = self._sums, None
        totals: Totals = {self.UNKNOWN: ([unknown for *_, unknown in sums], None)}
        for name, (loss, weight, number, _) in zip(self._names, sums, strict=True):
            totals[self.LOSS + name] = loss, weight
            totals[self.WEIGHT + name] = weight, None
            totals[self.SAMPLES + name] = [number], None
        return totals

    def copy(self) -> GroupedSum:
        """Return a copy that shares the values, which are never modified."""
        copied = GroupedSum(self._names, self._find_groups)
        copied._entries, copied._sums = self._entries.copy(), self._sums
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Return the sums. Waits for the device."""
        self._add_waiting()
        return {"names": self._names, "sums": self._sums}

    def add_state(self, state: Mapping[str, Any]) -> None:
        """Add a `state_dict` of this or another process."""
        if state["names"] != self._names or state["sums"] is None:
            return  # the groups of another run, or nothing
        self._sums = [_add(before, sums) for before, sums in zip(self._sums_so_far(), state["sums"], strict=True)]

    def _add_waiting(self) -> None:
        """Add the waiting batches to the sums."""
        if not self._entries:
            return
        (samples, losses, weights), self._entries = zip(*self._entries, strict=True), []
        sizes = np.array([len(positions) for positions in samples])
        groups = self._find_groups(np.concatenate(samples))
        weight = _weights_of_samples(weights, sizes)
        is_unknown = np.zeros(len(groups), bool)
        if not all(loss.ndim for loss in losses):
            begins = sizes.cumsum() - sizes
            is_of_one = np.minimum.reduceat(groups, begins) == np.maximum.reduceat(groups, begins)
            is_unknown = ~(is_of_one | [loss.ndim > 0 for loss in losses]).repeat(sizes)
            weight = np.where(is_unknown, 0.0, weight)
        loss = np.where(weight == 0, 0.0, _concatenate(losses, sizes))  # that of no target may be NaN
        sums = []
        for number, before in enumerate(self._sums_so_far()):
            is_in = groups == number
            parts = exact_parts((loss * weight)[is_in].tolist()), exact_parts(weight[is_in].tolist())
            sums.append(_add(before, (*parts, float(is_in.sum()), float((is_in & is_unknown).sum()))))
        self._sums = sums

    def _sums_so_far(self) -> list[_Sums]:
        return [([], [], 0.0, 0.0) for _ in self._names] if self._sums is None else self._sums


def _add(first: _Sums, second: _Sums) -> _Sums:
    losses, weights = exact_parts([*first[0], *second[0]]), exact_parts([*first[1], *second[1]])
    return losses, weights, first[2] + second[2], first[3] + second[3]


def _weights_of_samples(weights: Sequence[Weight], sizes: Array) -> Array:
    """Return the weight of each sample; where a batch has only the sum of them, they are equal."""
    tensors = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if not tensors:
        return (np.array(weights, np.float64) / sizes).repeat(sizes)
    if len(tensors) < len(weights):
        tensors = [torch.as_tensor(weight, dtype=torch.float64, device="cpu") for weight in weights]
    shared_by = np.where([tensor.ndim == 0 for tensor in tensors], sizes, 1)
    return _concatenate(tensors, sizes) / shared_by.repeat(sizes)


def _concatenate(values: Sequence[torch.Tensor], sizes: Array) -> Array:
    """Return a number for each sample of some batches; the scalars of batches are repeated. Waits for the device."""
    if len({value.device for value in values}) > 1:
        values = [value.cpu() for value in values]
    parts = [value if value.ndim else value.expand(size) for value, size in zip(values, sizes, strict=True)]
    concatenated: Array = torch.cat(parts).cpu().double().numpy()
    return concatenated
