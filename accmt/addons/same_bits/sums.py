"""Sums of tensors in a fixed order: the same bits on any number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from accmt.processes import num_processes
from accmt.sharded_tensors import is_dtensor

Gradients = list[Tensor | None]
"""A gradient of each parameter, or None, which counts as zero."""


class UnitSum:
    """Adds up the gradients of units, which come in their order, in a binary tree over the units.

    It keeps the sums of at most `log2(units) + 1` subtrees: a binary counter.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, Gradients]] = []  # of subtrees, the largest first: their number of units, and sum

    def add(self, gradients: Gradients) -> None:
        """Add the gradients of the next unit, which are changed in place."""
        size = 1
        while self._sums and self._sums[-1][0] == size:
            gradients = add_up(self._sums.pop()[1], gradients)
            size *= 2
        self._sums.append((size, gradients))

    def take(self) -> Gradients | None:
        """Return the sum, as if the units that are missing were zeros, and start anew; None without units."""
        if not self._sums:
            return None
        _, total = self._sums.pop()
        while self._sums:
            total = add_up(self._sums.pop()[1], total)
        return total


def add_up(first: Gradients, second: Gradients) -> Gradients:
    """Return the sums of two gradients of each parameter; the first is changed in place."""
    sums: Gradients = []
    for gradient, other in zip(first, second, strict=True):
        if gradient is None or other is None:
            sums.append(other if gradient is None else gradient)
        else:
            sums.append(gradient.add_(other))
    return sums


def add_in_tree(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors, as many as a power of two, of which neighbors are added first."""
    while len(parts) > 1:
        parts = [parts[index] + parts[index + 1] for index in range(0, len(parts), 2)]
    return parts[0]


def all_reduce(flat: Tensor) -> Tensor:
    """Return the sum of a vector over all processes in a tree over their ranks.

    It sends as many bytes as a ring: each process gets its part of all vectors, adds them, and sends the sum to all.

    Processes: collective.
    """
    size = num_processes()
    padded = functional.pad(flat, (0, -len(flat) % size)) if len(flat) % size else flat
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded)
    own = add_in_tree(received.chunk(size)).contiguous()
    dist.all_gather(list(received.chunk(size)), own)
    return received[: len(flat)]


class TreeReduceScatter:
    """The reduce-scatter of FSDP2 with the sum in a tree over the ranks: for `FSDPModule.set_custom_reduce_scatter`."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is communicated."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> dist.Work | None:
        """Write the sum of this process's part into the output."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(add_in_tree(received.chunk(group.size())).view_as(output_tensor))
        return None


# ---- The norm of all gradients: rows are added up by their owners, elementwise, so that nothing depends on how many
# rows a process has, on threads or on vector instructions.


def total_norm(gradients: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """Return the norm of all gradients together, in double precision and in a fixed order.

    Processes: collective where they are sharded, by rows.
    """
    rows = [_sums_of_rows(gradient, order) for gradient in gradients]
    if any(map(is_dtensor, gradients)):
        rows = _gather_rows(gradients, rows)
    total = _fold(torch.cat(rows)[None])[0]
    if order == float("inf"):
        return torch.cat(rows).max().to(gradients[0].dtype)
    return total.pow(1.0 / order).to(gradients[0].dtype)


def _sums_of_rows(gradient: Tensor, order: float) -> Tensor:
    """Return the sum of |x|**order of each row of this process's part, or the largest |x|: `[rows]`."""
    local = gradient.to_local() if is_dtensor(gradient) else gradient
    values = local.detach().double().abs()
    values = values.reshape(len(values) if values.ndim else 1, -1) if values.numel() else values.new_zeros(0, 1)
    if order == float("inf"):
        return values.amax(1) if len(values) else values.flatten()
    return _fold(values * values if order == 2.0 else values.pow(order))


def _fold(values: Tensor) -> Tensor:
    """Return the sum of each row, of which halves are added until one number is left: `[rows]`."""
    while values.shape[1] > 1:
        half = (values.shape[1] + 1) // 2
        folded = values[:, :half].clone()
        folded[:, : values.shape[1] - half] += values[:, half:]
        values = folded
    return values[:, 0]


def _gather_rows(gradients: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
    """Return the numbers of all rows of each gradient: those of others are added as zeros, which rounds nothing."""
    sizes = [gradient.shape[0] if gradient.ndim else 1 for gradient in gradients]
    whole = torch.zeros(sum(sizes), dtype=torch.float64, device=rows[0].device)
    begin = 0
    for gradient, size, numbers in zip(gradients, sizes, rows, strict=True):
        first = begin
        if is_dtensor(gradient):  # in the order of ranks, like `torch.chunk`
            first += min(gradient.device_mesh.get_local_rank() * -(-size // gradient.device_mesh.size()), size)
        whole[first : first + len(numbers)] = numbers
        begin += size
    dist.all_reduce(whole)
    return list(torch.split(whole, sizes))
