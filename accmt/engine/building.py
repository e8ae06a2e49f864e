"""Models that are built when a run begins: distributed while they have no values, so that no process has the whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from accmt.engine.shards import shard_model
from accmt.engine.tensor_parallel import require_whole_heads, split_tensors, tensor_parallel_size

if TYPE_CHECKING:
    from accelerate import Accelerator

_accelerator: Accelerator | None = None


@contextmanager
def building_for(accelerator: Accelerator | None) -> Iterator[None]:
    """Let models that are read meanwhile come distributed, where the Accelerator of a run distributes them.

    Args:
        accelerator: None reads them whole.
    """
    global _accelerator  # noqa: PLW0603 - as `configure_model` takes no arguments
    before, _accelerator = _accelerator, accelerator
    try:
        yield
    finally:
        _accelerator = before


def accelerator_to_build_for() -> Accelerator | None:
    """Return the Accelerator of the run whose model is being built; None where no process holds only a part of it."""
    if _accelerator is None or not (_accelerator.is_fsdp2 or tensor_parallel_size(_accelerator) > 1):
        return None
    return _accelerator


def distribute_empty(model: nn.Module, accelerator: Accelerator) -> None:
    """Split a model without values by tensor parallelism, and shard it, as the run asks.

    Processes: collective.
    """
    size = tensor_parallel_size(accelerator)
    if size > 1:
        require_whole_heads(model, size)
        split_tensors(model, accelerator)
    if accelerator.is_fsdp2:
        shard_model(model, accelerator, None)


def device_of_shards(accelerator: Accelerator) -> torch.device:
    """Return where the parts of a model lie between the steps."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    is_offloaded = isinstance(getattr(plugin, "cpu_offload", None), CPUOffloadPolicy)
    return torch.device("cpu") if is_offloaded else accelerator.device
