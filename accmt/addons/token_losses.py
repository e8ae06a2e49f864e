"""Losses of the tokens and samples of a batch, in addition to the mean that a transformers model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from accmt.errors import ModuleContractError, fail
from accmt.huggingface.model_kinds import predicts_next_token, without_adapter

_IGNORED = -100


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
        raise fail(ModuleContractError, "training_step", got=got, expected=expected, do=do)
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
