"""The loss of each sample of a batch, beside the mean that a transformers model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from accmt.huggingface.model_kinds import is_peft_model, predicts_next_token

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
    base = model.get_base_model() if is_peft_model(model) else model
    if logits.ndim != 3 or labels.ndim != 2 or not predicts_next_token(base):
        return {}
    prompt = logits.shape[1] - labels.shape[1]  # PEFT may put trained tokens before those of the batch
    targets = functional.pad(labels, (prompt, 0), value=_IGNORED)[:, 1:]
    positions = batch.get("position_ids")
    with torch.no_grad():
        losses = torch.stack(
            [
                functional.cross_entropy(row[:-1].float(), of_row, ignore_index=_IGNORED, reduction="none")
                for row, of_row in zip(logits, targets, strict=True)
            ]
        )
        are_targets = (targets != _IGNORED).float()
        if (
            isinstance(positions, torch.Tensor) and labels.shape[0] == 1 and not prompt
        ):  # the first token of a document is not a target, so no loss crosses from one to the next
            documents = (positions[0] == 0).cumsum(0)[1:] - 1
            sums = torch.zeros(2, int(documents[-1]) + 1, device=losses.device)
            sums.index_add_(1, documents, torch.stack([losses[0], are_targets[0]]))
        else:
            sums = torch.stack([losses.sum(1), are_targets.sum(1)])
        return {"losses": sums[0] / sums[1].clamp(min=1), "weights": sums[1]}
