"""Clipping of the gradient of a whole optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from accmt.sharded_tensors import by_mesh, total_norm


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float | None, kind: str) -> torch.Tensor | None:
    """Clip gradients, which are reduced over processes and unscaled before, to a norm or a value.

    Returns:
        The norm before clipping; None where nothing was clipped by norm.
    """
    if limit is None:
        return None
    parts = [of_one for (of_one,) in by_mesh(parameters)] if parameters else []
    if kind == "value":
        for of_one in parts:
            nn.utils.clip_grad_value_(of_one, limit)
        return None
    norm = total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    for of_one in parts:
        nn.utils.clip_grads_with_norm_(of_one, limit, norm)
    return norm
