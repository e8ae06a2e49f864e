"""Collects what validation steps return, over batches and processes, and computes the metrics."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch

from accmt.errors import MetricError, ModuleContractError, explain
from accmt.metrics.metric import Metric
from accmt.metrics.windows import Weight, WeightedSum, exact_sum
from accmt.processes import gather_objects, run_on_main_process

Pair = tuple[Any, Any]


class ValidationCollector:
    """The results of one validation set.

    Args:
        metrics: The metrics to compute.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._sums: dict[str, WeightedSum] = {}
        self._pairs: dict[str, list[Pair]] = {name: [] for name in self._metrics}

    def add(self, outputs: Mapping[str, Any], weight: Weight) -> None:
        """Add what `validation_step` returned for one batch.

        Args:
            outputs: Scalars by name, and `(predictions, references)` under the names of metrics.
            weight: Samples in the batch, or the weight that the step returned.

        Raises:
            MetricError: A pair stands under a name that no metric has.
            ModuleContractError: An entry is neither a scalar nor a pair.
        """
        for name, value in outputs.items():
            if isinstance(value, tuple | list) and len(value) == 2:
                self._add_pair(name, value[0], value[1])
            elif name in self._metrics:
                self._refuse_entry(name, value)
            else:
                self._sums.setdefault(name, WeightedSum()).add(_to_scalar(name, value), weight)

    def _add_pair(self, name: str, predictions: Any, references: Any) -> None:
        if name not in self._metrics:
            names = list(self._metrics)
            nearest = get_close_matches(name, names, n=1)
            do = f"rename it to {nearest[0]!r}" if nearest else f"metrics=[...] with a Metric named {name!r}"
            got = f"an entry {name!r} with predictions and references"
            raise MetricError(explain("validation_step", got, f"a name of metrics=: {names}", do))
        self._pairs[name].append((_to_cpu(predictions), _to_cpu(references)))

    def _refuse_entry(self, name: str, value: Any) -> None:
        raise ModuleContractError(
            explain(
                "validation_step",
                f"{name!r}: {type(value).__name__}",
                "(predictions, references)",
                f'return {{"{name}": (predictions, references)}}',
            )
        )

    def compute(self) -> dict[str, float]:
        """Return means and metrics over all samples of all processes.

        Processes: collective; metrics are computed on the main process.

        Raises:
            MetricError: A metric got no predictions, or returned something else than numbers with its main entry.
        """
        return self._means() | self._metric_values()

    def _means(self) -> dict[str, float]:
        totals: dict[str, list[tuple[float, float]]] = {}
        for sums in gather_objects({name: total.take() for name, total in self._sums.items()}):
            for name, pair in sums.items():
                totals.setdefault(name, []).append(pair)
        weights = {name: exact_sum([weight for _, weight in pairs]) for name, pairs in totals.items()}
        return {name: exact_sum([t for t, _ in totals[name]]) / weight for name, weight in weights.items() if weight}

    def _metric_values(self) -> dict[str, float]:
        if not self._metrics:
            return {}
        every = gather_objects(self._pairs)

        def compute_all() -> dict[str, float]:
            values: dict[str, float] = {}
            for name, metric in self._metrics.items():
                values |= _compute(metric, [pair for pairs in every for pair in pairs[name]])
            return values

        return run_on_main_process(compute_all)


def _compute(metric: Metric, pairs: list[Pair]) -> dict[str, float]:
    if not pairs:
        raise MetricError(
            explain(
                f"metric {metric.name!r}",
                "no predictions",
                f"validation_step to return an entry {metric.name!r}",
                f'return {{"loss": loss, "{metric.name}": (predictions, references)}}',
            )
        )
    result = metric.compute(_join(metric.name, [p for p, _ in pairs]), _join(metric.name, [r for _, r in pairs]))
    if not isinstance(result, dict) or metric.main_metric not in result:
        raise MetricError(
            explain(
                f"metric {metric.name!r}",
                f"compute returned {result!r}",
                f"a dict with the entry {metric.main_metric!r}",
                f'return {{"{metric.main_metric}": value}}',
            )
        )
    return {name: float(_to_scalar(name, value)) for name, value in result.items()}


def _join(name: str, parts: list[Any]) -> Any:
    """Put the predictions (or references) of all batches together."""
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return [item for part in parts for item in (part if isinstance(part, list | tuple) else [part])]
    parts = [part.reshape(1) if part.ndim == 0 else part for part in parts]
    shapes = sorted({tuple(part.shape[1:]) for part in parts})
    if len(shapes) > 1:
        got = f"samples of the shapes {shapes[0]} and {shapes[-1]} in different batches"
        do = "pad them to one length, flatten them, or return lists"
        raise MetricError(explain(f"metric {name!r}", got, "samples of one shape", do))
    return torch.cat(parts)


def _to_cpu(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value)
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _to_scalar(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, numbers.Real):
        return torch.tensor(float(value), dtype=torch.float64)
    is_tensor = isinstance(value, torch.Tensor)
    got = f"a tensor of shape {tuple(value.shape)}" if is_tensor else f"{value!r:.80} ({type(value).__name__})"
    raise ModuleContractError(
        explain(f"the value {name!r}", got, "a number or a tensor of one element", "return its mean()")
    )
