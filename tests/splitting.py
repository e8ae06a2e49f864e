"""Models that come split by tensor parallelism, where a script is launched for it, by torch's own means."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import accmt


def is_split() -> bool:
    """Return whether the script was launched for tensor parallelism."""
    return "PARALLELISM_CONFIG_TP_SIZE" in os.environ


def num_data_processes() -> int:
    """Return over how many processes the data of a script that was launched are divided."""
    return int(os.environ.get("WORLD_SIZE", "1")) // int(os.environ.get("PARALLELISM_CONFIG_TP_SIZE", "1"))


def split(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> nn.Module:
    """Split a model by a plan; in `configure_model`, when there is an Accelerator with the groups of processes."""
    return parallelize_module(model, accmt.accelerator.torch_device_mesh["tp"], dict(plan))
