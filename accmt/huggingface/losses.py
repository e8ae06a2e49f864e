"""What a transformers model's own loss is averaged over, and the losses of the tokens and samples of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from accmt.errors import ModuleContractError, explain
from accmt.huggingface.model_kinds import begins_with_prompt, predicts_next_token, without_adapter
from accmt.messages import say_once

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
            is_first_none = predicts_next_token(model) and not begins_with_prompt(model)
            is_target = (labels[:, 1:] if is_first_none else labels) != _IGNORED
        case _:
            return None
    count: torch.Tensor = is_target.sum()
    return count


def kind_of_targets(model: Any, inputs: Mapping[str, Any]) -> str | None:
    """Return what the loss of a model is averaged over, as text; None if samples, or unknown."""
    labels: Any = inputs.get("labels")
    name, num_dims = type(model).__name__, getattr(labels, "ndim", 0)
    if name in _DETECT_REPLACED_TOKENS and inputs.get("attention_mask") is not None:
        return "real tokens"
    if num_dims == 2 and not labels.is_floating_point() and not labels.is_complex():
        is_multi_label = getattr(model.config, "problem_type", None) == "multi_label_classification"
        if not is_multi_label and not hasattr(model.config, "ctc_loss_reduction"):  # CTC's loss is no mean over tokens
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


def hint_at_weights(batch: Any) -> None:
    """Explain how a step returns a weight, if a batch has tokens without targets and its step returned none."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.ndim != 2 or labels.is_floating_point():
        return
    if (labels == _IGNORED).any():
        say_once(
            "labels are -100 at some tokens, and batches are weighted by samples: if the loss is a mean over tokens, "
            'return {"loss": loss, "weight": (labels != -100).sum()}'
        )


# ---- Losses of tokens and samples, in addition to the mean that the model returns


def find_sample_losses(model: Any, outputs: Any, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the mean loss of each sample over its target tokens as "losses", and their number as "weights".

    Logits are read again, row by row, without gradients. In a row of packed documents, each document is a sample.

    Args:
        model: A causal transformers model, without wrappers.
        outputs: What it returned.
        batch: The arguments of its call, by name.

    Returns:
        The two tensors `[samples]` by name; nothing for other models, and where the model returns no logits.
    """
    logits, labels = getattr(outputs, "logits", None), batch.get("labels")
    if not isinstance(logits, torch.Tensor) or not isinstance(labels, torch.Tensor):
        return {}
    if logits.ndim != 3 or labels.ndim != 2 or not predicts_next_token(without_adapter(model)):
        return {}
    targets = _targets_of(logits, labels)
    with torch.no_grad():
        losses = torch.stack(
            [
                functional.cross_entropy(row[:-1].float(), of_row, ignore_index=_IGNORED, reduction="none")
                for row, of_row in zip(logits, targets, strict=True)
            ]
        )
        return _sum_by_sample(losses, (targets != _IGNORED).float(), batch)


def weigh_tokens(
    model: Any, outputs: Any, batch: Mapping[str, Any], weights: torch.Tensor, *, per_sample: bool = False
) -> dict[str, torch.Tensor]:
    """Return the weighted mean of the losses of target tokens as "loss", and the sum of their weights as "weight".

    Args:
        model: A causal transformers model, without wrappers.
        outputs: What it returned without labels.
        batch: The arguments of its call, with labels.
        weights: The weight of each token `[samples, tokens]`; those of tokens without a label do not count.
        per_sample: Whether to add "losses" and "weights" of samples, as in `find_sample_losses`.

    Raises:
        ModuleContractError: The model predicts something else than the next token.
    """
    base = without_adapter(model)
    if not predicts_next_token(base):
        got, expected = f"weights of tokens for {type(base).__name__}", "a causal language model"
        do = "remove the weights, or write only 0 and 1 as weights of messages"
        raise ModuleContractError(explain("training_step", got, expected, do))
    logits, targets = outputs.logits, _targets_of(outputs.logits, batch["labels"])
    logits = logits[:, :-1] if logits.dtype == torch.float64 else logits[:, :-1].float()
    flat = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="none")
    losses = flat.view(targets.shape)
    each = functional.pad(weights, (outputs.logits.shape[1] - weights.shape[1], 0))[:, 1:] * (targets != _IGNORED)
    total = each.sum()
    # Without targets, the loss is 0 and has a gradient of 0, which the other processes need.
    loss = (losses * each).sum() / torch.where(total > 0, total, 1)
    if (router := getattr(outputs, "aux_loss", None)) is not None:  # of a mixture of experts, added if there are labels
        loss = loss + base.router_aux_loss_coef * router
    result = {"loss": loss, "weight": total}
    return result | _sum_by_sample(losses.detach(), each, batch) if per_sample else result


def _targets_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the target of each logit but the last: PEFT may put trained tokens before those of the batch."""
    return functional.pad(labels, (logits.shape[1] - labels.shape[1], 0), value=_IGNORED)[:, 1:]


def _sum_by_sample(losses: torch.Tensor, weights: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the mean loss and the weight of each sample, or of each document of a packed row."""
    positions, labels = batch.get("position_ids"), batch["labels"]
    has_prompt = losses.shape[1] + 1 > labels.shape[1]
    if isinstance(positions, torch.Tensor) and labels.shape[0] == 1 and not has_prompt:
        # The first token of a document is not a target, so no loss crosses from one to the next.
        documents = (positions[0] == 0).cumsum(0)[1:] - 1
        sums = torch.zeros(2, int(documents[-1]) + 1, device=losses.device, dtype=losses.dtype)
        sums.index_add_(1, documents, torch.stack([losses[0] * weights[0], weights[0]]).to(sums.dtype))
    else:
        sums = torch.stack([(losses * weights).sum(1), weights.sum(1)])
    return {"losses": sums[0] / torch.where(sums[1] > 0, sums[1], 1), "weights": sums[1]}
