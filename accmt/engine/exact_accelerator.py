"""The Accelerator of a run, whose `gather` and `reduce` count each sample once, also where batches are unequal.

Accelerate fills up the last batches with samples, which it drops again in `gather_for_metrics`. accmt repeats none:
processes have unequal batches, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor

from accmt.engine.borrowed import borrows_batch, uneven_step
from accmt.engine.reduction import gather_ragged
from accmt.processes import each_once, gather_from_data, num_data_processes


class ExactAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator that, within a step on unequal batches, accepts them and leaves borrowed ones out."""

    def gather(self, tensor: Any) -> Any:
        """Return the concatenated tensors of all processes.

        Processes: collective.
        """
        if uneven_step() is None:
            return super().gather(tensor)
        return _gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Return the concatenated tensors, or lists of objects, of all processes, with each sample once.

        Processes: collective.
        """
        if uneven_step() is None:
            return super().gather_for_metrics(input_data, use_gather_object)
        return _gather(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum, or the mean over the processes that have a batch.

        Processes: collective.
        """
        step = uneven_step()
        if step is None:
            return super().reduce(tensor, reduction, scale)
        if step.is_borrowed:
            tensor = recursively_apply(torch.zeros_like, tensor)
        reduced = super().reduce(tensor, reduction, scale)
        if reduction != "mean":
            return reduced
        # Accelerate divides by all processes, and those that borrowed a batch have added 0.
        return recursively_apply(lambda mean: mean * (num_data_processes() / step.num_lenders), reduced)


def _gather(data: Any) -> Any:
    match data:
        case Tensor():
            return _gather_rows(data)
        case Mapping():
            return type(data)({name: _gather(value) for name, value in data.items()})  # type: ignore[call-arg]
        case list() | tuple() if any(isinstance(part, Tensor | Mapping) for part in data):
            parts = list(map(_gather, data))
            if hasattr(data, "_fields"):  # a named tuple takes its parts one by one
                return type(data)(*parts)
            return type(data)(parts)
    items = [] if borrows_batch() else list(data)
    return list(chain.from_iterable(gather_from_data(items)))


def _gather_rows(rows: Tensor) -> Tensor:
    # Accelerate's `gather` makes a row of a number, too. Source: `_gpu_gather` in accelerate/utils/operations.py.
    if rows.ndim == 0:
        rows = rows.reshape(1)
    if borrows_batch():
        rows = rows[:0]
    joined, numbers = gather_ragged(rows)
    return torch.cat(each_once(list(torch.split(joined, numbers))))  # those that share a batch have the same rows
