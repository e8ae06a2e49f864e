"""Reducing gradients by hand, for the one window of an epoch in which a process had no batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from accmt.processes import num_processes


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Average gradients over processes, as DistributedDataParallel does; a process without one counts as zero.

    Processes: collective; every process gives the same parameters. A parameter without a gradient anywhere keeps none.

    Args:
        parameters: The parameters that are trained.
    """
    if num_processes() == 1 or not parameters:
        return
    device = parameters[0].device
    present = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(present)
    for parameter, count in zip(parameters, present.tolist(), strict=True):
        if not count:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(num_processes())


def broadcast_buffers(model: nn.Module) -> None:
    """Give every process the main process's buffers, such as running statistics of batch norm.

    Processes: collective. Training does the same at each forward; this brings the last batch's up to date.
    """
    if num_processes() == 1:
        return
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
