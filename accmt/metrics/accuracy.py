"""Accuracy, the metric of classification."""

from __future__ import annotations

from typing import Any

import torch

from accmt.errors import MetricError, explain
from accmt.metrics.classes import IGNORED, align_classes
from accmt.metrics.streaming import StreamingMetric


class Accuracy(StreamingMetric):
    """Share of predicted classes that equal their references; a reference of -100 is left out.

    Shapes:
        predictions: Class indices `[samples, ...]`, or logits `[samples, ..., classes]`, of which the largest counts.
        references: Class indices `[samples, ...]`.

    Args:
        name: The key under which `validation_step` returns predictions and references.
    """

    def __init__(self, name: str = "accuracy") -> None:
        super().__init__(name, greater_is_better=True)

    def count(self, predictions: Any, references: Any) -> torch.Tensor:
        """Count the right predictions, and all.

        Raises:
            MetricError: The shapes do not fit, or there is one score for each reference.
        """
        predicted, expected = align_classes(self.name, predictions, references)
        is_kept = expected != IGNORED
        return torch.stack([torch.count_nonzero(is_kept & (predicted == expected)), torch.count_nonzero(is_kept)])

    def finish(self, sums: list[float]) -> dict[str, float]:
        """Return the share.

        Raises:
            MetricError: There is no reference but -100.
        """
        num_right, num_samples = sums
        if not num_samples:
            do = "look into what validation_step returns"
            raise MetricError(explain(f"metric {self.name!r}", "no reference but -100", "at least one class", do))
        return {self.name: num_right / num_samples}
