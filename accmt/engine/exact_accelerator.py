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
        return super().gather(tensor) if uneven_step() is None else _gather(tensor)

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
        counted = recursively_apply(torch.zeros_like, tensor) if step.is_borrowed else tensor
        reduced = super().reduce(counted, reduction, scale)
        if reduction != "mean":
            return reduced
        # Accelerate divides by all processes, and those that borrowed a batch have added 0.
        return recursively_apply(lambda mean: mean * (num_data_processes() / step.num_lenders), reduced)


def _gather(data: Any) -> Any:
    if isinstance(data, Tensor):
        rows = data.reshape(1) if data.ndim == 0 else data
        counted = rows[:0] if borrows_batch() else rows
        joined, numbers = gather_ragged(counted)
        return torch.cat(each_once(list(torch.split(joined, numbers))))  # those that share a batch have the same rows
    if isinstance(data, Mapping):
        return type(data)({name: _gather(value) for name, value in data.items()})  # type: ignore[call-arg]
    if isinstance(data, list | tuple) and any(isinstance(part, Tensor | Mapping) for part in data):
        parts = [_gather(part) for part in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    items = [] if borrows_batch() else list(data)
    return list(chain.from_iterable(gather_from_data(items)))
