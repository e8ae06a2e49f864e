"""Reduced precision: autocast of a run's steps, and TF32, which accmt leaves as it is unless asked."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from accmt.sharded_tensors import is_dtensor

if TYPE_CHECKING:
    from accelerate import Accelerator

HALVES = frozenset({torch.bfloat16, torch.float16})
"""Types in which weights are too coarse to add small updates to."""

_AS_IT_IS = nullcontext()


def allow_tf32(flag: bool = True) -> None:  # noqa: FBT001, FBT002 - the documented signature
    """Let matrix products and convolutions on NVIDIA GPUs round their inputs to TF32.

    Args:
        flag: False takes it back.
    """
    torch.set_float32_matmul_precision("high" if flag else "highest")
    torch.backends.cudnn.allow_tf32 = flag


def hold_in_float32(model: nn.Module) -> None:
    """Let weights that are trained be float32, as mixed precision means: computing in 16 bits, adding up in 32.

    What is frozen stays as it is. FSDP2 does the same to weights that it shards, so a launch changes nothing.

    Source: `fsdp2_prepare_model` in accelerate/utils/fsdp_utils.py.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in HALVES:
            parameter.grad = None
            if is_dtensor(parameter):  # whose `data` cannot be set to another type
                raised = nn.Parameter(parameter.detach().float())
                torch.utils.swap_tensors(parameter, raised)  # type: ignore[no-untyped-call]
            else:
                parameter.data = parameter.data.float()


def autocast(accelerator: Accelerator) -> AbstractContextManager[None]:
    """Return the context in which steps run: the mixed precision of the run, if any."""
    if accelerator.mixed_precision == "no":
        return _AS_IT_IS
    context: AbstractContextManager[None] = accelerator.autocast()
    return context
