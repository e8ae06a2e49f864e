"""Gathers predictions of all batches and processes, only where they are needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from accmt.messages import say_once
from accmt.metrics.results import metric_error, read_result, require_pair
from accmt.processes import (
    each_once,
    gather_objects,
    is_counted,
    is_main_process,
    num_processes,
    run_on_main_process,
)

T = TypeVar("T")

CHUNK_BYTES = 32_000_000
"""Bytes of each process that are sent at a time, by default."""


Position = int | list[tuple[int, int]]
"""The index of a batch; if samples were regrouped, for each sample the index of its batch and its position there."""
Pair = tuple[Position, Any, Any]
"""The position of a batch, its predictions and its references."""


class OfPairs(Protocol):
    """The part of `Metric` needed to compute it from predictions and references."""

    @property
    def name(self) -> str: ...
    @property
    def main_metric(self) -> str: ...
    @property
    def padding(self) -> float | None: ...

    def compute(self, predictions: Any, references: Any) -> Any:
        """Return the metric's values for them."""


class GatheredPairs:
    """Keeps predictions and references on the CPU until the metric is computed over all of them."""

    def __init__(self, metric: OfPairs) -> None:
        self._metric = metric
        self._pairs: list[Pair] = []

    def add(self, entry: Any, position: Position) -> None:
        predictions, references = require_pair(self._metric.name, entry)
        self._pairs.append((position, to_cpu(predictions), to_cpu(references)))

    def compute(self, chunk_bytes: int | None = CHUNK_BYTES) -> dict[str, float]:
        every = gather_on_main_process(self._pairs, chunk_bytes)
        self._pairs = []
        return run_on_main_process(lambda: self._compute(every))

    def _compute(self, every: list[list[Pair]]) -> dict[str, float]:
        predictions, references = join_pairs(self._metric, every)
        metric = self._metric
        return read_result(metric.name, metric.main_metric, metric.compute(predictions, references))


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
    chunks = list(_cut(items if is_counted() else [], math.inf if chunk_bytes is None else chunk_bytes))
    gathered: list[list[T]] = [[] for _ in range(num_processes())] if is_main_process() else []
    for index in range(max(gather_objects(len(chunks)))):
        received: list[Any] | None = [None] * num_processes() if is_main_process() else None
        dist.gather_object(chunks[index] if index < len(chunks) else [], received)
        for of_process, part in zip(gathered, received or [], strict=True):
            of_process += part
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
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_count_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_count_bytes, value))
    return len(value) if isinstance(value, str | bytes) else 8


def to_cpu(value: Any) -> Any:
    """Return the value with its tensors and arrays, at any depth, copied to detached CPU tensors.

    They are copies: a view would keep its base alive, and a step may reuse its output.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.tensor(value)
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [to_cpu(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value.tolist() if isinstance(value, np.ndarray) else value


def join_pairs(metric: OfPairs, every: list[list[Pair]]) -> tuple[Any, Any]:
    """Return the joined predictions and the joined references of all processes for a metric.

    They have the order of the data; if samples were regrouped and not all have one entry each, the order of batches.
    """
    pairs, order = order_parts(every)
    predictions = _join(metric, [predictions for _, predictions, _ in pairs])
    references = _join(metric, [references for _, _, references in pairs])
    if order is not None and not (_has_samples(predictions, len(order)) and _has_samples(references, len(order))):
        order = None  # both keep the order in which they match
    return put_in_order(predictions, order), put_in_order(references, order)


def order_parts(every: list[list[T]], *, are_shared: bool = True) -> tuple[list[T], list[int] | None]:
    """Put the parts of all processes into one list, in the order of the data.

    Args:
        every: The parts of each process; each is a tuple that begins with its position.
        are_shared: Whether processes share the data; otherwise, the parts of each stay together.

    Returns:
        The parts, and the order of the joined samples if samples were regrouped, else None.
    """
    parts: list[Any] = list(chain(*every))
    if not any(isinstance(part[0], list) for part in parts):
        if are_shared:
            # Processes share each micro-batch in rank order, and sorting is stable.
            parts.sort(key=lambda part: part[0])
        return parts, None
    keys: list[tuple[int, ...]] = []
    for process, of_process in enumerate(every):
        places: Iterator[tuple[int, int]] = chain(*(part[0] for part in of_process))  # type: ignore[index]
        keys += [(batch, process, place) if are_shared else (process, batch, place) for batch, place in places]
    return parts, sorted(range(len(keys)), key=keys.__getitem__)


def put_in_order(joined: Any, order: list[int] | None) -> Any:
    """Return joined samples in another order; None keeps their order."""
    if order is None:
        return joined
    if isinstance(joined, Mapping):
        return {name: put_in_order(value, order) for name, value in joined.items()}
    if isinstance(joined, tuple):
        return tuple(put_in_order(value, order) for value in joined)
    return joined[order] if isinstance(joined, torch.Tensor) else [joined[index] for index in order]


def _has_samples(joined: Any, number: int) -> bool:
    if isinstance(joined, Mapping):
        return all(_has_samples(value, number) for value in joined.values())
    return len(joined) == number


def _join(metric: OfPairs, parts: list[Any]) -> Any:
    if all(isinstance(part, Mapping) for part in parts):
        keys = sorted({tuple(part) for part in parts}, key=str)
        if len({frozenset(of_part) for of_part in keys}) > 1:
            got = f"dicts with the keys {keys[0]} and {keys[-1]} in different batches"
            do = "return the same keys for every batch"
            raise metric_error(metric.name, got, "the same keys in all batches", do)
        return {key: _join(metric, [part[key] for part in parts]) for key in keys[0]}
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return [item for part in parts for item in (part if isinstance(part, list | tuple) else [part])]
    parts = [part.reshape(1) if part.ndim == 0 else part for part in parts]
    shapes = sorted({tuple(part.shape[1:]) for part in parts})
    if len(shapes) == 1:
        return torch.cat(parts)
    if metric.padding is None:
        return [sample for part in parts for sample in part]
    is_signed = all(part.dtype.is_signed for part in parts)
    if len({len(shape) for shape in shapes}) > 1 or not is_signed:
        got = f"samples of shapes {shapes[0]} and {shapes[-1]} in different batches, of {parts[0].dtype}"
        expected = "samples of one shape, or of equally many dimensions and a dtype that can be padded with -100"
        do = "pad them to one length, flatten them, return lists, or set padding = None in the metric's class"
        raise metric_error(metric.name, got, expected, do)
    what = f"metric {metric.name!r} gets samples of different shapes, {shapes[0]} to {shapes[-1]}"
    say_once(f"{what}: they are padded with {metric.padding:g}; set padding = None in its class to get a list instead")
    widths = [max(sizes) for sizes in zip(*shapes, strict=True)]
    return torch.cat([_pad(part, widths, metric.padding) for part in parts])


def _pad(part: torch.Tensor, widths: list[int], value: float) -> torch.Tensor:
    """Pad every dimension except the first at its end."""
    missing = [width - size for width, size in zip(widths, part.shape[1:], strict=True)]
    return torch.nn.functional.pad(part, [number for one in reversed(missing) for number in (0, one)], value=value)
