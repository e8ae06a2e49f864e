"""Reduced precision: autocast of a run's steps, and TF32, which accmt leaves as it is unless asked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from accmt.sharded_tensors import is_dtensor

if TYPE_CHECKING:
    from accelerate import Accelerator

PRECISIONS = ("no", "fp16", "bf16")
"""Those that Accelerate knows; other packages add some: the group `accmt.precisions`."""

HALVES = frozenset({torch.bfloat16, torch.float16})
"""Types in which weights are too coarse to add small updates to."""

_AS_IT_IS = nullcontext()
_NORMALIZATIONS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
WITH_STATISTICS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
"""Layers with running statistics."""


def allow_tf32(flag: bool = True) -> None:  # noqa: FBT001, FBT002 - the documented signature
    """Let matrix products and convolutions on NVIDIA GPUs round their inputs to TF32.

    Args:
        flag: False takes it back.
    """
    torch.set_float32_matmul_precision("high" if flag else "highest")
    torch.backends.cudnn.allow_tf32 = flag


def hold_in_float32(model: nn.Module) -> None:
    """Let weights that are trained be float32, as mixed precision means: computing in 16 bits, adding up in 32.

    What is frozen stays as it is, but for the tensors of normalization: autocast leaves its types alone, and torch
    computes in none that are mixed otherwise than inputs in 16 bits and all its own tensors in float32.

    FSDP2 does the same to weights that it shards, so a launch changes nothing.

    Source: `fsdp2_prepare_model` in accelerate/utils/fsdp_utils.py.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad and weight.dtype in HALVES]
    if not trained:
        return
    tensors: list[torch.Tensor] = [*trained]
    for part in model.modules():
        if isinstance(part, (*_NORMALIZATIONS, *WITH_STATISTICS)):
            tensors += [*part.parameters(), *part.buffers()]
    for tensor in tensors:
        if tensor.dtype in HALVES:
            tensor.grad = None  # it is of the old type, to which backward could not add
            _raise(tensor)


def _raise(tensor: torch.Tensor) -> None:
    """Make a tensor float32 in its place: it stays the one that an optimizer, or another layer, has."""
    if is_dtensor(tensor):  # whose `data` cannot be set to another type
        raised = tensor.detach().float()
        if isinstance(tensor, nn.Parameter):
            raised = nn.Parameter(raised, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, raised)  # type: ignore[no-untyped-call]
    else:
        tensor.data = tensor.data.float()


def use_autocast(accelerator: Accelerator, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Let an Accelerator run steps in the context of a precision that another package adds."""
    accelerator.autocast = context


def is_reduced(accelerator: Accelerator) -> bool:
    """Return whether steps run in a reduced precision."""
    return accelerator.mixed_precision != "no" or "autocast" in vars(accelerator)


def autocast(accelerator: Accelerator) -> AbstractContextManager[None]:
    """Return the context in which steps run: the mixed precision of the run, if any."""
    if not is_reduced(accelerator):
        return _AS_IT_IS
    context: AbstractContextManager[None] = accelerator.autocast()
    return context
