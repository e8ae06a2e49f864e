"""What predictions of classes may look like."""

from __future__ import annotations

from typing import Any

import torch

from accmt.metrics.results import describe, metric_error

IGNORED = -100
"""References of this value are ignored, as torch's losses ignore them."""


def read_classes(name: str, predictions: Any, references: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return predicted and true classes, flat, one for each reference that is not `IGNORED`; as `align_classes`."""
    predicted, expected = align_classes(name, predictions, references)
    is_kept = expected != IGNORED
    return predicted[is_kept], expected[is_kept]


def align_classes(name: str, predictions: Any, references: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return predicted and true classes, of one shape and on one device, ignored ones included.

    Args:
        name: The metric, for messages.
        predictions: Class indices `[...]`, or scores `[..., classes]` of which the largest counts; tensors, arrays or
            lists.
        references: Class indices `[...]`.
    """
    predictions, references = to_tensor(name, predictions), to_tensor(name, references)
    if has_scores(predictions, references):
        predictions = predictions.argmax(-1)
    if predictions.shape != references.shape or not _are_whole(predictions):
        got = describe_shapes(predictions, references)
        expected = "class indices of equal shapes, or scores with one dimension more, the classes"
        do = "return logits.argmax(-1) as predictions"
        if predictions.shape == references.shape or predictions.shape == (*references.shape, 1):
            got += ", one score for each reference"
            do = "return (logits > 0).long(), or (probabilities > 0.5).long(), in the shape of the references"
        raise metric_error(name, got, expected, do)
    return predictions.to(references.device), references


def read_scores(name: str, predictions: Any, references: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores `[samples, classes]` with the classes `[samples]` that are not `IGNORED`."""
    predictions, references = to_tensor(name, predictions), to_tensor(name, references)
    if not has_scores(predictions, references):
        expected, do = "logits [..., classes] and class indices [...]", "return the logits as predictions"
        raise metric_error(name, describe_shapes(predictions, references), expected, do)
    is_kept = references != IGNORED
    return predictions[is_kept.to(predictions.device)], references[is_kept]


def has_scores(predictions: torch.Tensor, references: torch.Tensor) -> bool:
    """Return whether there are several scores for each reference."""
    has_classes = predictions.is_floating_point() and predictions.ndim > 0 and predictions.shape[-1] > 1
    return has_classes and predictions.shape[:-1] == references.shape


def to_tensor(name: str, value: Any) -> torch.Tensor:
    """Return a tensor of numbers."""
    try:
        tensor = torch.as_tensor(value)
        return tensor.detach() if tensor.requires_grad else tensor
    except (TypeError, ValueError, RuntimeError) as error:
        do = f"return tensors under {name!r}, or write a Metric of your own"
        raise metric_error(name, describe(value), "a tensor, an array or a list of numbers", do) from error


def _are_whole(predictions: torch.Tensor) -> bool:
    return not predictions.is_floating_point() or bool((predictions == predictions.round()).all())


def describe_shapes(predictions: torch.Tensor, references: torch.Tensor) -> str:
    return f"predictions {tuple(predictions.shape)}, references {tuple(references.shape)}"
