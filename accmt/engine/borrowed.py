"""What a step communicates in a micro-batch in which processes have unequal batches, or borrow another's.

Every process runs every step, so a step that communicates is always entered by all. A process with a borrowed batch
adds nothing: no rows where rows are gathered, and 0 where numbers are summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accmt.data import MicroBatch
from accmt.engine.reduction import gather_ragged
from accmt.errors import ArgumentError, fail
from accmt.processes import num_data_processes, num_processes


class UnevenStep(NamedTuple):
    """A step in which processes have unequal batches.

    Attributes:
        is_borrowed: Whether this process's batch is another process's.
        num_lenders: The processes whose batch counts.
    """

    is_borrowed: bool
    num_lenders: int


_step: UnevenStep | None = None
_why_apart = ""


def uneven_step() -> UnevenStep | None:
    """Return the step that is running, if processes have unequal batches in it."""
    return _step


def borrows_batch() -> bool:
    """Return whether the step that is running is on another process's batch, which this process must not count."""
    return _step is not None and _step.is_borrowed


def may_be_uneven(micro_batch: MicroBatch | None) -> bool:
    """Return whether processes may have unequal batches: in an epoch's last micro-batch, or where some have none."""
    return micro_batch is not None and (micro_batch.is_partial or bool(micro_batch.ending))


@contextmanager
def keeping_processes_apart(why: str) -> Iterator[None]:
    """Reject that steps gather rows of other processes, for a reason."""
    global _why_apart  # noqa: PLW0603 - what the user's step calls reads it
    _why_apart = why
    try:
        yield
    finally:
        _why_apart = ""


@contextmanager
def running_uneven_step(micro_batch: MicroBatch) -> Iterator[None]:
    """Mark that the step runs on such a micro-batch."""
    global _step  # noqa: PLW0603 - what the user's step calls reads it
    num_lenders = micro_batch.num_lenders
    if num_lenders is None:
        num_lenders = num_data_processes()
    _step = UnevenStep(micro_batch.batch is None, num_lenders)
    try:
        yield
    finally:
        _step = None


class _Gather(torch.autograd.Function):
    """Concatenates the rows of all processes; a row's gradient is the sum over the losses of all processes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, is_borrowed: bool) -> tuple[Tensor, int]:  # noqa: FBT001 - torch's signature
        counted = rows[:0] if is_borrowed else rows
        joined, numbers = gather_ragged(counted)
        first = sum(numbers[: dist.get_rank()])
        ctx.rows = slice(first, first + numbers[dist.get_rank()])
        ctx.shape = rows.shape
        return joined, first

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, None]:
        # A copy: autograd may pass the same tensor to other functions, and a reduction writes into it.
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        of_rows = gradient[ctx.rows]
        if of_rows.shape != ctx.shape:  # a borrowed batch has added no rows
            of_rows = gradient.new_zeros(ctx.shape)
        return of_rows, None


def gather_with_gradients(rows: Tensor) -> tuple[Tensor, int]:
    """Return the concatenated rows of all processes, with gradients, and the index of this process's first row.

    Processes may have different numbers of rows. In a step the gradient equals that of one big batch, without an extra
    factor: a loss of this process's rows against all rows is weighted by its samples, like any loss.

    Processes: collective, also in the backward.

    Args:
        rows: `[samples, ...]`; only the first dimension may differ between processes.

    Raises:
        ArgumentError: `rows` is a scalar; or processes share batches, as with tensor parallelism.

    Examples:
        >>> import torch
        >>> texts, first = gather_with_gradients(torch.eye(2))
        >>> (texts.shape, first + torch.arange(2))
        (torch.Size([2, 2]), tensor([0, 1]))
    """
    if rows.ndim == 0:
        got, expected = "a tensor of shape []", "rows: [samples, ...]"
        do = "pass the features of the batch"
        raise fail(ArgumentError, "gather_with_gradients", got=got, expected=expected, do=do)
    # A contrastive loss would be over as many rows as there are processes: other gradients, and no error.
    if _why_apart:
        expected, do = "processes with whole batches", "use the rows of each unit alone, or leave the argument out"
        raise fail(ArgumentError, "gather_with_gradients", got=_why_apart, expected=expected, do=do)
    if num_processes() == 1:
        return rows, 0
    # Without this, each row would be gathered once per process that shares its batch.
    if num_data_processes() != num_processes():
        got, expected = "processes that share batches (tensor parallelism)", "processes with separate batches"
        do = 'Trainer(parallelism={"fsdp": True})'
        raise fail(ArgumentError, "gather_with_gradients", got=got, expected=expected, do=do)
    joined, first = _Gather.apply(rows, borrows_batch())  # type: ignore[no-untyped-call]
    # A borrowed batch is that of the first process with one. Its rows may be more here, as a random choice of rows.
    if borrows_batch():
        return torch.cat([joined, rows[len(joined) :]]), 0
    return joined, first
