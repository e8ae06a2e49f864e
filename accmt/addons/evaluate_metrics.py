"""Metrics of the `evaluate` package, which most transformers examples use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accmt.metrics.metric import Metric
from accmt.metrics.results import find_scalar, metric_error
from accmt.options.checks import as_float

_LOWER_IS_BETTER = {"brier_score", "cer", "mae", "mape", "mase", "mse", "perplexity", "rmse", "smape", "ter", "wer"}


class EvaluationMetric(Metric):
    """A metric of `evaluate`, such as `evaluate.load("f1")`, computed over the whole set on the main process.

    Lists and dicts in its results, such as the scores of single classes, are left out.

    Args:
        module: The metric.
        name: The key under which `validation_step` returns predictions and references; None uses the metric's own name.
    """

    def __init__(self, module: Any, name: str | None = None) -> None:
        own = str(getattr(module, "name", None) or type(module).__name__.lower())
        super().__init__(name or own, greater_is_better=own not in _LOWER_IS_BETTER)
        self._module = module

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Return the numbers that the metric computes; a single number gets this metric's name."""
        result = self._module.compute(predictions=predictions, references=references)
        found = {name: find_scalar(value) for name, value in result.items()} if isinstance(result, Mapping) else {}
        numbers = {name: as_float(scalar) for name, scalar in found.items() if scalar is not None}
        if self.main_metric not in numbers and len(numbers) == 1:
            return {self.main_metric: next(iter(numbers.values()))}
        if self.main_metric not in numbers:
            expected = f"an entry {self.name!r} for model selection, or a single number"
            do = f"use the name of an entry: metrics={{{next(iter(numbers), 'accuracy')!r}: ...}}"
            raise metric_error(self.name, f"compute returned the entries {list(numbers)}", expected, do)
        return numbers
