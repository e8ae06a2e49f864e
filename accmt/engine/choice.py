"""The one place where the engine of a run is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from accmt.engine.base import Alone, Engine
from accmt.engine.data_parallel import DataParallel
from accmt.engine.sharded import Sharded, Split
from accmt.engine.shards import is_sharded
from accmt.module import AcceleratorModule
from accmt.processes import num_data_processes, num_processes

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.optim import Optimizer


def choose_engine(
    module: AcceleratorModule,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    set_to_none: bool = True,
) -> Engine:
    """Return the engine that works with a model as it was prepared.

    Args:
        module: The module.
        accelerator: The Accelerator of the run.
        model: The model as it is trained.
        optimizer: Its optimizer; None where it is only evaluated.
        set_to_none: Whether gradients are dropped after each step.
    """
    unwrapped: nn.Module = accelerator.unwrap_model(model, keep_torch_compile=False)
    if is_sharded(unwrapped):
        kind = Split if num_data_processes() < num_processes() else Sharded
        return kind(module, accelerator, model, unwrapped)
    if num_processes() == 1 and model is unwrapped:  # a launcher may start one process, which Accelerate wraps, too
        return Alone(module, accelerator, model, unwrapped)
    return DataParallel(module, accelerator, model, unwrapped, optimizer, set_to_none=set_to_none)
