"""Accuracy, the metric of classification."""

from __future__ import annotations

from typing import Any

import torch

from accmt.errors import MetricError, explain
from accmt.metrics.metric import Metric


class Accuracy(Metric):
    """Share of predictions that equal their references.

    Args:
        name: The key under which `validation_step` returns predictions and references.
    """

    def __init__(self, name: str = "accuracy") -> None:
        super().__init__(name, greater_is_better=True)

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Compare class indices.

        Shapes:
            predictions, references: `[samples, ...]`, equal; tensors, or lists of numbers.

        Raises:
            MetricError: The shapes differ, as they do when logits are given instead of class indices.
        """
        predictions, references = torch.as_tensor(predictions), torch.as_tensor(references)
        if predictions.shape != references.shape:
            got = f"predictions {tuple(predictions.shape)}, references {tuple(references.shape)}"
            raise MetricError(
                explain(
                    f"metric {self.name!r}",
                    got,
                    "equal shapes: class indices",
                    "return logits.argmax(-1) as predictions",
                )
            )
        return {self.name: (predictions == references).double().mean().item()}
