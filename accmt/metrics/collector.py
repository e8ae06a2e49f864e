"""Collects what validation steps return, over batches and processes, and computes the metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from accmt.errors import MetricError, ModuleContractError, explain, nearest
from accmt.metrics.gathering import CHUNK_BYTES, Position
from accmt.metrics.logged import LoggedValues, combine
from accmt.metrics.metric import Metric, ReportedValue
from accmt.metrics.results import describe, find_scalar, is_pair, metric_error
from accmt.metrics.weighted_sum import Weight
from accmt.processes import gather_from_data


class ValidationCollector:
    """The results of one validation set.

    Args:
        metrics: The metrics to compute; each starts from nothing.
        logged: Takes in what is logged while the set is evaluated; None where nothing is.
        chunk_bytes: How much of each process's predictions is sent at a time; None is all.
    """

    def __init__(
        self,
        metrics: Sequence[Metric],
        logged: LoggedValues | None = None,
        *,
        chunk_bytes: int | None = CHUNK_BYTES,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        computed = [metric for metric in metrics if not isinstance(metric, ReportedValue)]
        self._metrics = {metric.name: metric for metric in computed}
        self._accumulations = {metric.name: metric.accumulate() for metric in computed}
        self._scalars = LoggedValues() if logged is None else logged
        self._scalars.take()
        self._scalars.begin_batch()
        self._num_entries: Counter[str] = Counter()
        self._num_batches = 0

    def add(
        self,
        outputs: Mapping[str, Any],
        weight: Weight,
        position: Position | None = None,
        weights: Mapping[str, Weight] | None = None,
    ) -> None:
        """Add what `validation_step` returned for one batch.

        Args:
            outputs: Scalars by name, and under the names of metrics what these take: `(predictions, references)`.
            weight: What scalars weigh: samples in the batch, or the weight that the step returned.
            position: The index of the micro-batch, or places of its samples, by which the order of the data is
                restored; None is the next.
            weights: What scalars weigh otherwise, by name.
        """
        position = self._num_batches if position is None else position
        self._num_batches += 1
        scalars: dict[str, torch.Tensor] = {}
        for name, value in outputs.items():
            self._num_entries[name] += 1
            if name in self._accumulations:
                self._accumulations[name].add(value, position)
            elif is_pair(value):
                raise self._unknown_name(name)
            else:
                scalars[name] = _to_scalar(name, value)
        self._scalars.end_batch(weight, scalars, weights)
        self._scalars.begin_batch()

    def _unknown_name(self, name: str) -> MetricError:
        names = list(self._accumulations)
        meant = nearest(name, names)
        do = f"rename it to {meant!r}" if meant else f"metrics=[...] with a Metric named {name!r}"
        got = f"an entry {name!r} with predictions and references"
        return MetricError(explain("validation_step", got, f"a name of metrics=: {names}", do))

    def compute(self, on_error: Callable[[Metric, Exception], None] | None = None) -> dict[str, float]:
        """Return means and metrics over all samples of all processes.

        Processes: collective; metrics are computed on the main process, and every process gets the values.

        Args:
            on_error: Called with a metric that cannot be computed, and why; what it does not raise leaves NaN.
        """
        self._scalars.close()
        every = gather_from_data((self._scalars.take(), set(self._num_entries)))
        self._require_entries(set().union(*(names for _, names in every)))
        results = combine(totals for totals, _ in every)
        for name, accumulation in self._accumulations.items():
            try:
                values = accumulation.compute(self._chunk_bytes)
            except Exception as error:
                if on_error is None:
                    raise
                on_error(self._metrics[name], error)
                values = dict.fromkeys(self._metrics[name].directions, math.nan)
            twice = sorted(set(values) & set(results))
            if twice:
                got = f"the result {twice[0]!r}, which already exists"
                do = "rename the entry of validation_step, or what the metric returns"
                raise metric_error(name, got, "each name once", do)
            results |= values
        return results

    def _require_entries(self, returned: set[str]) -> None:
        for name in self._accumulations:
            if name not in returned:
                got = f"no predictions; validation_step returned {sorted(returned)}"
                do = f'return {{"loss": loss, "{name}": (predictions, references)}}'
                do += f'; metrics={{"{name}": "max"}}, or "min", where a step or a hook reports its value'
                do += "; where `fit` got a model by its path, labels of tokens need a module of your own"
                raise metric_error(name, got, f"validation_step to return an entry {name!r}", do)


def _to_scalar(name: str, value: Any) -> torch.Tensor:
    scalar = find_scalar(value)
    if scalar is None:
        expected, do = "a number or a tensor of one element", "return its mean()"
        raise ModuleContractError(explain(f"the value {name!r}", describe(value), expected, do))
    return scalar
