"""Metrics that are computed from sums, and so need the memory of one batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from accmt.metrics.gathering import Position
from accmt.metrics.metric import Accumulation, Metric
from accmt.metrics.results import metric_error, read_result, require_pair
from accmt.metrics.weighted_sum import COMPACT_AT, exact_sum
from accmt.processes import gather_from_data, run_on_main_process


class StreamingMetric(Metric):
    """A metric that follows from sums over samples, so that nothing has to be kept or gathered.

    Examples:
        A mean absolute error, from sums over the batches:

            class Distance(StreamingMetric):
                def count(self, predictions, references):
                    distances = (predictions - references).abs()
                    return torch.stack([distances.sum(), torch.ones_like(distances).sum()])

                def finish(self, sums):
                    return {self.name: sums[0] / sums[1]}
    """

    @abstractmethod
    def count(self, predictions: Any, references: Any) -> torch.Tensor | Sequence[float]:
        """Return what one batch adds.

        Args:
            predictions: What `validation_step` returned first, as it is, on its device.
            references: What it returned second, likewise.

        Returns:
            Numbers to be added up, the same number of them for every batch.
        """

    @abstractmethod
    def finish(self, sums: list[float]) -> dict[str, float]:
        """Return the values that follow from the sums over all batches of all processes.

        Processes: called on the main process only.

        Args:
            sums: The sums of what `count` returned, in its order.
        """

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Compute the metric over everything at once."""
        return self.finish(torch.as_tensor(self.count(predictions, references)).reshape(-1).tolist())

    def accumulate(self) -> Accumulation:
        return _Sums(self)


class _Sums:
    """Keeps the counts of the last few batches as they are, and adds them up from time to time, which costs more."""

    def __init__(self, metric: StreamingMetric) -> None:
        self._metric = metric
        self._counted: list[torch.Tensor] = []

    def add(self, entry: Any, position: Position) -> None:
        predictions, references = require_pair(self._metric.name, entry)
        counted = torch.as_tensor(self._metric.count(predictions, references))
        if self._counted and counted.shape != self._counted[0].shape:
            got = f"count returned {counted.numel()} numbers, and {self._counted[0].numel()} for an earlier batch"
            raise metric_error(self._metric.name, got, "as many for every batch", "return a tensor of one shape")
        self._counted.append(counted.detach() if counted.requires_grad else counted)
        if len(self._counted) >= COMPACT_AT:
            self._counted = [self._add_up()]

    def _add_up(self) -> torch.Tensor:
        device = self._counted[0].device
        if device.type == "mps":  # which has no double precision
            device = torch.device("cpu")
        return torch.stack([counted.to(device, torch.float64) for counted in self._counted]).sum(0)

    def compute(self, chunk_bytes: int | None = None) -> dict[str, float]:
        own = self._add_up().flatten().tolist() if self._counted else []
        self._counted = []
        every = [sums for sums in gather_from_data(own) if sums]
        return run_on_main_process(lambda: self._compute([exact_sum(of_one) for of_one in zip(*every, strict=True)]))

    def _compute(self, sums: list[float]) -> dict[str, float]:
        return read_result(self._metric.name, self._metric.main_metric, self._metric.finish(sums))
