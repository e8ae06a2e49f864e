"""Accuracy, and the formats of class predictions."""

from __future__ import annotations

from typing import Any

import torch

from accmt.metrics.metric import StreamingMetric
from accmt.metrics.results import describe, metric_error

IGNORED = -100
"""References with this value are ignored, as in torch's losses."""


def align_classes(name: str, predictions: Any, references: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return predicted and true classes of one shape on one device, including ignored ones.

    Args:
        name: The metric's name, for messages.
        predictions: Class indices `[...]`, or scores `[..., classes]`, of which the largest counts; tensors, arrays or
            lists.
        references: Class indices `[...]`.
    """
    predictions, references = to_tensor(name, predictions), to_tensor(name, references)
    if has_scores(predictions, references):
        predictions = predictions.argmax(-1)
    # Probabilities of one class would be compared as if they were classes, and `[8, 1]` with `[8]` as `[8, 8]`.
    if predictions.shape != references.shape or not _are_whole(predictions):
        got = describe_shapes(predictions, references)
        expected = "class indices of equal shape, or scores with an additional last dimension for classes"
        do = "return logits.argmax(-1) as predictions"
        if predictions.shape == references.shape or predictions.shape == (*references.shape, 1):
            got += ", one score for each reference"
            do = "return (logits > 0).long() or (probabilities > 0.5).long() in the shape of the references"
        raise metric_error(name, got, expected, do)
    return predictions.to(references.device), references


def has_scores(predictions: torch.Tensor, references: torch.Tensor) -> bool:
    """Return whether each reference has several scores."""
    # Token ids `[rows, tokens]` have one dimension less than logits, and are whole numbers.
    has_classes = predictions.is_floating_point() and predictions.ndim > 0 and predictions.shape[-1] > 1
    return has_classes and predictions.shape[:-1] == references.shape


def to_tensor(name: str, value: Any) -> torch.Tensor:
    """Return a tensor of numbers."""
    try:
        return torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        do = f"return tensors under {name!r}, or write a custom Metric"
        raise metric_error(name, describe(value), "a tensor, an array or a list of numbers", do) from error


def _are_whole(predictions: torch.Tensor) -> bool:
    return not predictions.is_floating_point() or bool((predictions == predictions.round()).all())


def describe_shapes(predictions: torch.Tensor, references: torch.Tensor) -> str:
    return f"predictions {tuple(predictions.shape)}, references {tuple(references.shape)}"


class Accuracy(StreamingMetric):
    """The fraction of predicted classes that equal their references; references of -100 are ignored.

    Shapes:
        predictions: Class indices `[samples, ...]`, or logits `[samples, ..., classes]`, of which the largest counts.
        references: Class indices `[samples, ...]`.

    Args:
        name: The key under which `validation_step` returns predictions and references.
    """

    def __init__(self, name: str = "accuracy") -> None:
        super().__init__(name, greater_is_better=True)

    def count(self, predictions: Any, references: Any) -> torch.Tensor:
        predicted, expected = align_classes(self.name, predictions, references)
        counts = expected != IGNORED
        return torch.stack([torch.count_nonzero(counts & (predicted == expected)), torch.count_nonzero(counts)])

    def finish(self, sums: list[float]) -> dict[str, float]:
        num_right, num_samples = sums
        if num_samples == 0:  # references in the wrong place, all padding
            do = "check what validation_step returns"
            raise metric_error(self.name, "only references of -100", "at least one class", do)
        return {self.name: num_right / num_samples}
