"""Clipping of the gradient of a whole optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from accmt.sharded_tensors import total_norm


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float | None, kind: str) -> torch.Tensor | None:
    """Clip gradients, which are reduced over processes and unscaled before, to a norm or a value.

    Returns:
        The norm before clipping; None where nothing was clipped by norm.
    """
    if limit is None:
        return None
    if kind == "value":
        nn.utils.clip_grad_value_(parameters, limit)
        return None
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = total_norm(gradients)
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm
