"""Reduced precision: autocast of a run's steps, and TF32, which accmt leaves as it is unless asked."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator

_AS_IT_IS = nullcontext()


def allow_tf32(flag: bool = True) -> None:  # noqa: FBT001, FBT002 - the documented signature
    """Let matrix products and convolutions on NVIDIA GPUs round their inputs to TF32.

    Args:
        flag: False takes it back.
    """
    torch.set_float32_matmul_precision("high" if flag else "highest")
    torch.backends.cudnn.allow_tf32 = flag


def autocast(accelerator: Accelerator) -> AbstractContextManager[None]:
    """Return the context in which steps run: the mixed precision of the run, if any."""
    if accelerator.mixed_precision == "no":
        return _AS_IT_IS
    context: AbstractContextManager[None] = accelerator.autocast()
    return context
