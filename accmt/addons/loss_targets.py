"""What a transformers model's own loss is averaged over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accmt.huggingface.model_kinds import begins_with_prompt, predicts_next_token

_IGNORED = -100
SAY_WHAT_COUNTS = frozenset(
    {
        "input_ids",
        "attention_mask",
        "labels",
        "start_positions",
        "bool_masked_pos",
        "future_values",
        "future_observed_mask",
    }
)
"""The arguments of a call that determine the number of targets."""

_DETECT_REPLACED_TOKENS = frozenset({"ElectraForPreTraining", "FunnelForPreTraining"})


def count_targets(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the number of target tokens, pixels, frames or values of a batch, over which its mean loss is computed.

    Args:
        model: A transformers model.
        inputs: The arguments of its call, by name.

    Returns:
        None if the loss is a mean over samples.
    """
    labels: Any = inputs.get("labels")
    is_target: torch.Tensor
    match kind_of_targets(model, inputs):
        case "target pixels":
            is_target = labels != model.config.semantic_loss_ignore_index
        case "target frames":
            is_target = labels[..., 0] != _IGNORED
        case "observed values":
            # With several series the models count a point in time only if all of them were observed.
            mask = inputs["future_observed_mask"]
            is_target = mask if mask.ndim == 2 else mask.amin(-1)
        case "answers":
            is_target = inputs["start_positions"] < inputs["input_ids"].shape[-1]  # others were truncated
        case "masked patches":
            is_target = inputs["bool_masked_pos"]
        case "real tokens":
            is_target = inputs["attention_mask"] == 1
        case "target tokens":
            # Nothing predicts the first token of a text.
            if predicts_next_token(model) and not begins_with_prompt(model):
                labels = labels[:, 1:]
            is_target = labels != _IGNORED
        case _:
            return None
    count: torch.Tensor = is_target.sum()
    return count


def kind_of_targets(model: Any, inputs: Mapping[str, Any]) -> str | None:
    """Return what the loss of a model is averaged over, as text; None if samples, or unknown."""
    labels: Any = inputs.get("labels")
    name, num_dims = type(model).__name__, getattr(labels, "ndim", 0)
    # These models take a mean over all tokens that are not padding, whatever the labels are.
    if name in _DETECT_REPLACED_TOKENS and inputs.get("attention_mask") is not None:
        return "real tokens"
    if num_dims == 2 and not labels.is_floating_point() and not labels.is_complex():
        is_multi_label = getattr(model.config, "problem_type", None) == "multi_label_classification"
        # A multi-label loss and CTC's are no means over tokens.
        if not is_multi_label and not hasattr(model.config, "ctc_loss_reduction"):
            return "target tokens"
    if num_dims == 3 and not labels.is_floating_point():
        if hasattr(model.config, "semantic_loss_ignore_index") and model.config.num_labels > 1:
            return "target pixels"
    # Labels are spectrograms, padded to the longest; no other model has labels of this shape.
    elif num_dims == 3 and getattr(model.config, "num_mel_bins", None) == labels.shape[-1]:
        return "target frames"
    mask = inputs.get("future_observed_mask")
    if isinstance(mask, torch.Tensor) and inputs.get("future_values") is not None and hasattr(model, "config"):
        return "observed values"
    if getattr(inputs.get("start_positions"), "ndim", 0) == getattr(inputs.get("input_ids"), "ndim", 0) - 1 == 1:
        return "answers"
    if name.endswith("ForMaskedImageModeling") and inputs.get("bool_masked_pos") is not None:
        return "masked patches"
    return None
