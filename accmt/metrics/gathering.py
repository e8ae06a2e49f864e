"""Gathers predictions of all batches and processes, only where they are needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from accmt.processes import each_once, gather_numbers, is_counted, is_main_process, num_processes

T = TypeVar("T")

CHUNK_BYTES = 32_000_000
"""Bytes of each process that are sent at a time, by default."""


Position = int | list[tuple[int, int]]
"""The index of a batch; if samples were regrouped, for each sample the index of its batch and its position there."""


def gather_on_main_process(items: list[T], chunk_bytes: int | None = CHUNK_BYTES) -> list[list[T]]:
    """Gather the items of each process on the main process, a few megabytes at a time.

    Processes: collective.

    Args:
        items: Any number of picklable values; tensors on the CPU.
        chunk_bytes: Bytes of each process to send at a time: the fewest items that reach this size. None sends all at
            once.

    Returns:
        On the main process, the items of each process in rank order, once for processes that share batches; nothing on
        the others.
    """
    if num_processes() == 1:
        return [items]
    chunks: list[list[T]] = []
    if is_counted():  # the others have the same batches as a process that sends them
        chunks = list(_cut(items, math.inf if chunk_bytes is None else chunk_bytes))
    gathered: list[list[T]] = []
    received: list[list[T]] | None = None
    if is_main_process():
        gathered = [[] for _ in range(num_processes())]
        received = [[] for _ in range(num_processes())]
    [most_chunks] = max(gather_numbers((len(chunks),)))
    # A process that has sent all sends nothing, because the call is collective.
    chunks += [[]] * (int(most_chunks) - len(chunks))
    for sent in chunks:
        dist.gather_object(sent, received)
        for items_of_process, chunk in zip(gathered, received or [], strict=True):
            items_of_process += chunk
    return each_once(gathered)


def _cut(items: list[T], chunk_bytes: float) -> Iterator[list[T]]:
    chunk: list[T] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += _count_bytes(item)
        if size >= chunk_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _count_bytes(value: Any) -> int:
    match value:
        case torch.Tensor():
            return value.nbytes
        case Mapping():
            return sum(map(_count_bytes, value.values()))
        case list() | tuple():
            return sum(map(_count_bytes, value))
        case str() | bytes():
            return len(value)
        case _:  # a number
            return 8


def to_cpu(value: Any) -> Any:
    """Return the value with its tensors and arrays, at any depth, copied to detached CPU tensors.

    They are copies: a view would keep its base alive, and a step may reuse its output.
    """
    match value:
        case torch.Tensor():
            return value.detach().to("cpu", copy=True)
        case Mapping():
            return {key: to_cpu(item) for key, item in value.items()}
        case list():
            return list(map(to_cpu, value))
        case tuple():
            return tuple(map(to_cpu, value))
        case np.ndarray() if value.dtype.kind in "biufc":
            return torch.tensor(value)
        case np.ndarray():  # of strings or objects, which torch does not have
            return value.tolist()
        case _:
            return value


def order_parts(parts_of_processes: list[list[T]], *, are_shared: bool = True) -> tuple[list[T], list[int] | None]:
    """Put the parts of all processes into one list, in the order of the data.

    Args:
        parts_of_processes: The parts of each process; each is a tuple that begins with its position.
        are_shared: Whether processes share the data; otherwise, the parts of each stay together.

    Returns:
        The parts, and the order of the joined samples if samples were regrouped, else None.
    """
    parts: list[Any] = list(chain(*parts_of_processes))
    if not any(isinstance(part[0], list) for part in parts):
        if are_shared:
            # Processes share each micro-batch in rank order, and sorting is stable.
            parts.sort(key=lambda part: part[0])
        return parts, None
    # Regrouped samples cross batches, so samples are sorted, each by where it was read.
    keys: list[tuple[int, ...]] = []
    for process, parts_of_process in enumerate(parts_of_processes):
        for part in parts_of_process:
            positions: list[tuple[int, int]] = part[0]  # type: ignore[index]
            for batch, place in positions:
                keys.append((batch, process, place) if are_shared else (process, batch, place))
    return parts, sorted(range(len(keys)), key=keys.__getitem__)


def put_in_order(joined: Any, order: list[int] | None) -> Any:
    """Return joined samples in another order; None keeps their order."""
    if order is None:
        return joined
    match joined:
        case Mapping():
            return {name: put_in_order(value, order) for name, value in joined.items()}
        case tuple():
            return tuple(put_in_order(value, order) for value in joined)
        case torch.Tensor():
            return joined[order]
        case _:
            return [joined[index] for index in order]
