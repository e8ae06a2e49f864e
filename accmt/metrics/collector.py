"""Collects the outputs of validation steps over batches and processes, and computes the metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from accmt import registry
from accmt.errors import MetricError, ModuleContractError, fail, nearest
from accmt.metrics.averages import LoggedValues, Weight, combine
from accmt.metrics.gathering import CHUNK_BYTES, Position
from accmt.metrics.metric import Accumulation, Metric, ReportedValue
from accmt.metrics.results import describe, find_scalar, is_pair, metric_error
from accmt.processes import gather_from_data


class ValidationCollector:
    """The results of one validation set.

    Args:
        metrics: The metrics to compute; each is reset.
        logged: Receives values logged during the evaluation; None if there are none.
        added: Metrics that are computed if the step returns their inputs, and replace averages of the same name.
        chunk_bytes: Bytes of each process's predictions to send at a time; None sends all at once.
    """

    def __init__(
        self,
        metrics: Sequence[Metric],
        logged: LoggedValues | None = None,
        *,
        added: Sequence[Metric] = (),
        chunk_bytes: int | None = CHUNK_BYTES,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._added = {metric.name for metric in added}
        self._metrics: dict[str, Metric] = {}
        self._accumulations: dict[str, Accumulation] = {}
        for metric in (*metrics, *added):
            # The step reports such a value itself: there is nothing to compute.
            if not isinstance(metric, ReportedValue):
                self._metrics[metric.name] = metric
                self._accumulations[metric.name] = metric.accumulate()
        self._scalars = LoggedValues() if logged is None else logged
        self._scalars.take()  # values of an evaluation that failed
        self._scalars.begin_batch()
        self._num_entries: Counter[str] = Counter()
        self._num_batches = 0
        self._gave_weights: set[bool] = set()

    def add(
        self,
        outputs: Mapping[str, Any],
        weight: Weight,
        position: Position | None = None,
        weights: Mapping[str, Weight | None] | None = None,
    ) -> None:
        """Add the output of `validation_step` for one batch.

        Args:
            outputs: Scalars by name, and the inputs of metrics by metric name: `(predictions, references)`.
            weight: The weight of scalars: samples in the batch, or the weight that the step returned.
            position: The index of the micro-batch, or the positions of its samples, to restore the order of the data;
                None means the next index.
            weights: Different weights of scalars, by name; None if the step returned none. All batches return one, or
                none does.
        """
        if position is None:
            position = self._num_batches
        self._num_batches += 1
        scalars: dict[str, torch.Tensor] = {}
        for name, value in outputs.items():
            self._num_entries[name] += 1
            if name in self._accumulations:
                self._accumulations[name].add(value, position)
            elif is_pair(value):  # the name of the metric is misspelt, or the Trainer has no metrics
                raise _unknown_metric(name, list(self._accumulations))
            else:
                scalar = find_scalar(value)
                if scalar is None:  # losses of each sample
                    expected, do = "a number or a tensor of one element", "return its mean()"
                    raise fail(
                        ModuleContractError, f"the value {name!r}", got=describe(value), expected=expected, do=do
                    )
                scalars[name] = scalar
        given = {name: value for name, value in (weights or {}).items() if value is not None}
        self._gave_weights.add(bool(given))
        self._scalars.end_batch(weight, scalars, given)
        self._scalars.begin_batch()

    def compute(self, on_error: Callable[[Metric, Exception], None] | None = None) -> dict[str, float]:
        """Return averages and metrics over all samples of all processes.

        Processes: collective; metrics are computed on the main process, and every process gets the values.

        Args:
            on_error: Called with a metric that cannot be computed and the error; unless it raises, the value is NaN.
        """
        self._scalars.close()
        gathered = gather_from_data((self._scalars.take(), set(self._num_entries), self._gave_weights))
        totals_of_processes, names_of_processes, gave_weights = zip(*gathered, strict=True)
        if len(set().union(*gave_weights)) > 1:
            got = '"weight" with the loss of some batches but not of others: tokens and samples cannot be added'
            expected = "weights for all batches or for none"
            do = 'return {"loss": loss, "weight": weight} for every batch or for none'
            raise fail(ModuleContractError, "validation_step", got=got, expected=expected, do=do)
        # Of all processes: one of them may have no batch of a small set.
        returned: set[str] = set().union(*names_of_processes)
        for name in list(self._accumulations):
            if name in returned:
                continue
            if name in self._added:
                del self._accumulations[name]
                continue
            got = f"no predictions; validation_step returned {sorted(returned)}"
            do = self._metrics[name].how_to_return()
            raise metric_error(name, got, f"validation_step to return an entry {name!r}", do)
        results = combine(totals_of_processes)
        for name, accumulation in self._accumulations.items():
            try:
                values = accumulation.compute(self._chunk_bytes)
            except Exception as error:
                if on_error is None:  # else only the metric fails, not the run
                    raise
                on_error(self._metrics[name], error)
                values = dict.fromkeys(self._metrics[name].directions, math.nan)
            duplicates = sorted(values.keys() & results.keys())
            if duplicates and name not in self._added:  # one of the two would silently be lost
                got = f"the result {duplicates[0]!r}, which already exists"
                do = "rename the entry of validation_step or the result of the metric"
                raise metric_error(name, got, "unique names", do)
            results |= values
        return results


def _unknown_metric(name: str, metrics: list[str]) -> MetricError:
    do = f"write Trainer(metrics=[a Metric named {name!r}])"
    if name in registry.names("accmt.metrics"):
        do = f"write Trainer(metrics=[{name!r}])"
    similar = nearest(name, metrics)
    if similar:
        do = f"rename it to {similar!r}"
    expected = f"the name of a metric: {metrics}" if metrics else "numbers: the Trainer has no metrics"
    got = f"predictions and references under {name!r}"
    return fail(MetricError, "validation_step", got=got, expected=expected, do=do)
