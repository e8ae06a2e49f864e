"""Metrics that are computed from sums, and so need the memory of one batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from accmt.errors import MetricError, explain
from accmt.metrics.metric import Accumulation, Metric
from accmt.metrics.results import read_result, require_pair
from accmt.metrics.windows import exact_sum
from accmt.processes import gather_objects, run_on_main_process


class StreamingMetric(Metric):
    """A metric that follows from sums over samples, so that nothing has to be kept or gathered.

    Example:
        A mean absolute error, of sums over the batches::

            class Distance(StreamingMetric):
                def count(self, predictions, references):
                    return torch.stack([(predictions - references).abs().sum(), torch.tensor(len(references))])

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
        return self.finish(_to_double(self.count(predictions, references)).tolist())

    def accumulate(self) -> Accumulation:
        """Return sums that take in a validation set batch by batch."""
        return _Sums(self)


class _Sums:
    def __init__(self, metric: StreamingMetric) -> None:
        self._metric = metric
        self._sums: torch.Tensor | None = None

    def add(self, entry: Any, position: int) -> None:
        predictions, references = require_pair(self._metric.name, entry)
        counted = _to_double(self._metric.count(predictions, references))
        self._sums = counted if self._sums is None else self._add(self._sums, counted)

    def _add(self, sums: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        if sums.shape != counted.shape:
            got = f"count returned {counted.numel()} numbers, and {sums.numel()} for an earlier batch"
            expected, do = "as many for every batch", "return a tensor of one shape"
            raise MetricError(explain(f"metric {self._metric.name!r}", got, expected, do))
        return sums + counted.to(sums.device)

    def compute(self) -> dict[str, float]:
        own = [] if self._sums is None else self._sums.tolist()
        self._sums = None
        every = [sums for sums in gather_objects(own) if sums]
        return run_on_main_process(lambda: self._compute([exact_sum(of_one) for of_one in zip(*every, strict=True)]))

    def _compute(self, sums: list[float]) -> dict[str, float]:
        return read_result(self._metric.name, self._metric.main_metric, self._metric.finish(sums))


def _to_double(counted: torch.Tensor | Sequence[float]) -> torch.Tensor:
    values = torch.as_tensor(counted).detach().reshape(-1)
    if values.device.type == "mps":  # which has no double precision
        values = values.cpu()
    return values.double()
