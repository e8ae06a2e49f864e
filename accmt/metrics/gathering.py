"""Predictions of all batches and processes, brought together where they are needed, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from accmt.metrics.results import metric_error, read_result, require_pair
from accmt.processes import gather_objects, is_main_process, num_processes, run_on_main_process

if TYPE_CHECKING:
    from accmt.metrics.metric import Metric

T = TypeVar("T")

CHUNK_BYTES = 32_000_000
"""How much of each process is sent at a time, by default."""


Pair = tuple[int, Any, Any]
"""The position of a batch, its predictions and its references."""


class GatheredPairs:
    """Keeps predictions and references on the CPU until the metric is computed, over all of them at once."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._pairs: list[Pair] = []

    def add(self, entry: Any, position: int) -> None:
        predictions, references = require_pair(self._metric.name, entry)
        self._pairs.append((position, to_cpu(predictions), to_cpu(references)))

    def compute(self, chunk_bytes: int | None = CHUNK_BYTES) -> dict[str, float]:
        every = gather_on_main_process(self._pairs, chunk_bytes)
        self._pairs = []
        return run_on_main_process(lambda: self._compute(every))

    def _compute(self, every: list[list[Pair]]) -> dict[str, float]:
        # Processes share each micro-batch in their order, and sorting keeps the order of equal positions.
        predictions, references = join_pairs(self._metric.name, sorted(chain(*every), key=lambda pair: pair[0]))
        metric = self._metric
        return read_result(metric.name, metric.main_metric, metric.compute(predictions, references))


def gather_on_main_process(items: list[T], chunk_bytes: int | None = CHUNK_BYTES) -> list[list[T]]:
    """Bring what each process holds to the main process, a few megabytes at a time.

    Processes: collective.

    Args:
        items: Any number of picklable values; tensors on the CPU.
        chunk_bytes: How much of each process is sent at a time: the least number of items that make so many bytes.
            None is all at once.

    Returns:
        On the main process the items of each process, in the order of ranks; nothing on the others.
    """
    if num_processes() == 1:
        return [items]
    chunks = list(_cut(items, math.inf if chunk_bytes is None else chunk_bytes))
    gathered: list[list[T]] = [[] for _ in range(num_processes())] if is_main_process() else []
    for index in range(max(gather_objects(len(chunks)))):
        received: list[Any] | None = [None] * num_processes() if is_main_process() else None
        dist.gather_object(chunks[index] if index < len(chunks) else [], received)
        for of_process, part in zip(gathered, received or [], strict=True):
            of_process += part
    return gathered


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
    """Return the value with its tensors and arrays, at any depth, as detached CPU tensors of their own.

    They are copies: a view would keep alive the memory of what it is a view of, and a step may reuse its output.
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


def join_pairs(name: str, pairs: Sequence[Pair]) -> tuple[Any, Any]:
    """Return the predictions and the references of all batches, each joined, for the metric `name`."""
    predictions = _join(name, [predictions for _, predictions, _ in pairs])
    return predictions, _join(name, [references for _, _, references in pairs])


def _join(name: str, parts: list[Any]) -> Any:
    if all(isinstance(part, Mapping) for part in parts):
        return _join_mappings(name, parts)
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return [item for part in parts for item in (part if isinstance(part, list | tuple) else [part])]
    parts = [part.reshape(1) if part.ndim == 0 else part for part in parts]
    shapes = sorted({tuple(part.shape[1:]) for part in parts})
    if len(shapes) > 1:
        got = f"samples of the shapes {shapes[0]} and {shapes[-1]} in different batches"
        do = "pad them to one length, flatten them, or return lists"
        raise metric_error(name, got, "samples of one shape", do)
    return torch.cat(parts)


def _join_mappings(name: str, parts: list[Mapping[Any, Any]]) -> dict[Any, Any]:
    keys = sorted({tuple(part) for part in parts}, key=str)
    if len({frozenset(of_part) for of_part in keys}) > 1:
        got = f"dicts with the keys {keys[0]} and {keys[-1]} in different batches"
        raise metric_error(name, got, "the same keys", "return the same keys for every batch")
    return {key: _join(name, [part[key] for part in parts]) for key in keys[0]}
