"""Metrics that are computed of parts of a validation set, those of processes or batches, and reduced to one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from accmt.errors import MetricError, explain, nearest
from accmt.messages import say_once
from accmt.metrics.gathering import GatheredPairs, Position, join_pairs
from accmt.metrics.metric import Accumulation, Metric
from accmt.metrics.results import read_result, read_scalars, require_pair
from accmt.metrics.weighted_sum import COMPACT_AT, exact_sum
from accmt.processes import each_once, gather_from_data, num_data_processes, run_on_every_process

Part = tuple[float, int]
"""A value of a part, and how many samples that has."""


def _mean(parts: Sequence[Part]) -> float:
    num_samples = sum(samples for _, samples in parts)
    return exact_sum([value * samples for value, samples in parts if samples]) / num_samples if num_samples else np.nan


_REDUCTIONS: dict[str, Callable[[Sequence[Part]], float]] = {
    "mean": _mean,
    "sum": lambda parts: exact_sum([value for value, _ in parts]),
    "max": lambda parts: float(np.max([value for value, _ in parts])),
    "min": lambda parts: float(np.min([value for value, _ in parts])),
}


class MetricParallel(Metric):
    """A metric that each process computes over its own samples, and whose values are then reduced to one.

    No predictions are sent, and the work is shared. The result is that of the whole set only if the metric is a mean (a
    sum, a maximum, a minimum) over samples. F1, precision, AUROC, correlations and perplexity are not: the mean of
    their values over parts is another number, which changes with the number of processes. Use `Metric` for them.

    `compute` gets the samples of one process, on the CPU and in the order of the data; a process without samples does
    not call it.

    Args:
        name: As in `Metric`.
        greater_is_better: As in `Metric`.
        comparator: As in `Metric`.
        main_metric: As in `Metric`.
        reduction: How the values are reduced: "mean", in which each is weighted by its number of samples, the length of
            the predictions; "sum", "max" or "min".

    Raises:
        MetricError: The reduction is unknown; or as for `Metric`.
    """

    def __init__(
        self,
        name: str,
        greater_is_better: bool | None = None,  # noqa: FBT001 - the documented signature is positional
        comparator: str | None = None,
        main_metric: str | None = None,
        *,
        reduction: str = "mean",
    ) -> None:
        super().__init__(name, greater_is_better, comparator, main_metric)
        if reduction not in _REDUCTIONS:
            found = nearest(reduction, _REDUCTIONS, cutoff=0)
            where = f"{type(self).__name__}({name!r}, reduction=...)"
            raise MetricError(
                explain(where, repr(reduction), f"one of {', '.join(_REDUCTIONS)}", f"reduction={found!r}")
            )
        self.reduction = reduction

    def accumulate(self) -> Accumulation:
        self._warn("processes", has_parts=num_data_processes() > 1)
        return _OfProcess(self)

    def _warn(self, parts: str, *, has_parts: bool) -> None:
        if has_parts and self.reduction == "mean":
            say_once(
                f"the metric {self.name!r} is the mean of its values of {parts}: this is right for means over samples, "
                "but not for metrics such as F1; Metric computes those over all samples at once"
            )


class MetricBatch(MetricParallel):
    """A metric that is computed for each batch, and whose values are then reduced to one.

    Only the values are kept. The result is that of the whole set only if the metric is a mean (a sum, a maximum, a
    minimum) over samples; see `MetricParallel`, which also documents the arguments.

    `compute` gets what `validation_step` returned, as it is and on its device.
    """

    def accumulate(self) -> Accumulation:
        self._warn("batches", has_parts=True)
        return _OfBatches(self)


class _OfProcess(GatheredPairs):
    """Keeps the samples of this process on the CPU until its value is computed."""

    _metric: MetricParallel

    def compute(self, chunk_bytes: int | None = None) -> dict[str, float]:
        every = each_once(run_on_every_process(self._compute_own))
        return {name: value for name, (value, _) in _reduce(self._metric, every).items()}

    def _compute_own(self) -> dict[str, Part]:
        pairs, self._pairs = self._pairs, []
        if not pairs:
            return {}
        metric = self._metric
        predictions, references = join_pairs(metric, [pairs])
        values = read_result(metric.name, metric.main_metric, metric.compute(predictions, references))
        return {name: (value, _count_samples(predictions)) for name, value in values.items()}


class _OfBatches:
    """Keeps the values of the last few batches as they are, and reduces them from time to time."""

    def __init__(self, metric: MetricBatch) -> None:
        self._metric = metric
        self._values: list[tuple[dict[str, torch.Tensor], int]] = []
        self._reduced: dict[str, Part] = {}

    def add(self, entry: Any, position: Position) -> None:
        metric = self._metric
        predictions, references = require_pair(metric.name, entry)
        values = read_scalars(metric.name, metric.main_metric, metric.compute(predictions, references))
        kept = {name: value.clone() for name, value in values.items()}  # of their own: some are views of all scores
        self._values.append((kept, _count_samples(predictions)))
        if len(self._values) >= COMPACT_AT:
            self._compact()

    def compute(self, chunk_bytes: int | None = None) -> dict[str, float]:
        self._compact()
        own, self._reduced = self._reduced, {}
        every = gather_from_data(own)
        return {name: value for name, (value, _) in _reduce(self._metric, every).items()}

    def _compact(self) -> None:
        parts = [{name: (float(value), samples) for name, value in batch.items()} for batch, samples in self._values]
        self._reduced = _reduce(self._metric, [self._reduced, *parts])
        self._values = []


def _reduce(metric: MetricParallel, every: Sequence[Mapping[str, Part]]) -> dict[str, Part]:
    """Reduce the values of parts, each entry over the parts that have it."""
    parts: dict[str, list[Part]] = {}
    for values in every:
        for name, part in values.items():
            parts.setdefault(name, []).append(part)
    reduce = _REDUCTIONS[metric.reduction]
    return {name: (reduce(of_one), sum(samples for _, samples in of_one)) for name, of_one in parts.items()}


def _count_samples(predictions: Any) -> int:
    if isinstance(predictions, Mapping):
        return _count_samples(next(iter(predictions.values()), ()))
    if isinstance(predictions, torch.Tensor | np.ndarray):
        return len(predictions) if predictions.ndim else 1
    return len(predictions) if isinstance(predictions, list | tuple) else 1
