"""Methods of the original accmt's modules that need no module: `self.pad` and `self.free_memory`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from accmt.errors import ArgumentError, fail

NAMES = ("free_memory", "pad")


def pad(
    tensor: Tensor | list[Tensor] | tuple[Tensor, ...],
    value: float,
    padding: Literal["longest", "max_length"] | None = None,
    max_length: int | None = None,
    side: Literal["right", "left"] = "right",
    op: str | Callable[[Any], Any] | None = None,
) -> Any:
    """Pad the last dimension of tensors; the tensors themselves do not change.

    Args:
        tensor: A tensor, or several.
        value: What is added.
        padding: "longest" of several tensors, which is the default without `max_length`; or "max_length".
        max_length: The length; a single tensor needs it.
        side: Where values are added.
        op: What combines several tensors: a function, or the name of torch's, such as "stack".

    Raises:
        ArgumentError: There is no length, a tensor is longer, or `side` is unknown.
    """
    tensors = [tensor] if isinstance(tensor, Tensor) else list(tensor)
    longest = max(part.shape[-1] if part.ndim else 1 for part in tensors)
    takes_longest = padding == "longest" or (padding is None and not isinstance(tensor, Tensor))
    length = longest if max_length is None and takes_longest else max_length
    if length is None or length < longest or side not in ("right", "left"):
        got = f"max_length={max_length}, side={side!r} for tensors of up to {longest}"
        do = f'self.pad(tensor, 0, max_length={longest}, side="right"); tensor[..., :8] cuts a tensor'
        raise fail(ArgumentError, "self.pad", got=got, expected="at least the longest, and right or left", do=do)
    padded = []
    for part in map(torch.atleast_1d, tensors):
        missing = length - part.shape[-1]
        padded.append(functional.pad(part, (0, missing) if side == "right" else (missing, 0), value=value))
    if isinstance(tensor, Tensor):
        return padded[0]
    if op is not None:
        return (getattr(torch, op) if isinstance(op, str) else op)(padded)
    return type(tensor)(padded)


def free_memory(*objects: object, clear_cache: bool = False, gc_collect: bool = False) -> None:
    """Collect garbage, and return unused memory to the device.

    Args:
        objects: Ignored: an object is freed when the last variable is gone that holds it (`del name`).
        clear_cache: Whether to empty the device's cache.
        gc_collect: Whether to collect garbage first.
    """
    if gc_collect:
        gc.collect()
    if clear_cache and torch.accelerator.is_available():
        torch.accelerator.empty_cache()
