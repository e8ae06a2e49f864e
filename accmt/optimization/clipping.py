"""Clipping of the gradient of a whole optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from accmt.sharded_tensors import by_mesh, dense_values, total_norm


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float | None, kind: str) -> torch.Tensor | None:
    """Clip gradients, which are reduced over processes and unscaled before, to a norm or a value.

    Returns:
        The norm before clipping; None where nothing was clipped by norm.
    """
    if limit is None:
        return None
    sparse = [parameter for parameter in parameters if parameter.grad is not None and parameter.grad.is_sparse]
    for parameter in sparse:
        parameter.grad = cast(torch.Tensor, parameter.grad).coalesce()  # whose values can be changed in place
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = None if kind == "value" else total_norm(gradients)
    if sparse:
        parameters = [_holding(gradient) for gradient in gradients]
    for (of_one,) in by_mesh(parameters) if parameters else []:
        if norm is None:
            nn.utils.clip_grad_value_(of_one, limit)
        else:
            nn.utils.clip_grads_with_norm_(of_one, limit, norm)
    return norm


def _holding(gradient: torch.Tensor) -> nn.Parameter:
    """Return a parameter that has a gradient, of a sparse one its values: torch clips gradients of parameters."""
    own = dense_values(gradient) if gradient.is_sparse else gradient
    holder = nn.Parameter(own, requires_grad=own.is_floating_point())
    holder.grad = own
    return holder
