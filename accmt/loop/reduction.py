"""What processes do by hand: reduce gradients where one had no batch, share buffers, compare initial weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accmt.errors import ModuleContractError, explain
from accmt.processes import gather_objects, num_processes


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


def settle_buckets(model: nn.Module) -> None:
    """Let DistributedDataParallel form its buckets of gradients for good, before the first update.

    It forms them anew after its first backward. Where more than two processes add up, the order in which they do
    depends on a gradient's place in its bucket: the first update of a run that continues would round otherwise than the
    same update of one that was not interrupted.

    Processes: collective.

    Source: `Reducer::should_rebuild_buckets` in torch/csrc/distributed/c10d/reducer.cpp, which says when it does.
    """
    if num_processes() <= 2 or not isinstance(model, DistributedDataParallel):
        return
    if model.find_unused_parameters or model.static_graph:
        return
    model.reducer.prepare_for_backward([])
    torch.stack([parameter.sum() for parameter in model.parameters() if parameter.requires_grad]).sum().backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)


def rebuild_reducer(model: DistributedDataParallel) -> None:
    """Let DistributedDataParallel average the gradients of those parameters that require them now.

    It notes them once, when it is built. This is what it does when it is unpickled, with its communication hooks.

    Processes: collective; every process trains the same parameters.

    Source: `DistributedDataParallel.__setstate__` in torch/nn/parallel/distributed.py.
    """
    wrapper: Any = model  # these methods have no types
    wrapper._remove_autograd_hooks()
    parameters, expect_sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, expect_sparse, names, model.static_graph)
    if model.static_graph:
        model.reducer._set_static_graph()
        wrapper._static_graph_delay_allreduce_enqueued = False
    for hook, state in model._comm_hooks:
        for memory in ("error_dict", "p_memory_dict", "q_memory_dict"):  # PowerSGD's, by number of bucket
            getattr(state, memory, {}).clear()
        dist._register_comm_hook(model.reducer, state, hook)  # type: ignore[attr-defined]
    settle_buckets(model)


def broadcast_buffers(model: nn.Module) -> None:
    """Give every process the main process's buffers, such as running statistics of batch norm.

    Processes: collective. Training does the same at each forward; this brings the last batch's up to date.
    """
    _broadcast(model.buffers())


def broadcast_weights(model: nn.Module) -> None:
    """Give every process the main process's parameters, as DistributedDataParallel does when it is built.

    Processes: collective.
    """
    _broadcast(parameter.detach() for parameter in model.parameters())


def _broadcast(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors if num_processes() > 1 else ():
        dist.broadcast(tensor, src=0)


def require_equal_weights(model: nn.Module) -> None:
    """Check that training begins with the same weights on all processes.

    DistributedDataParallel sees to that unless it is told not to (`init_sync=False`) or to pass over a parameter.

    Processes: collective.

    Raises:
        ModuleContractError: They differ; the message names the first parameter or buffer that does.
    """
    if num_processes() == 1:
        return
    own = {name: _digest(tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    every = gather_objects(own)
    names = [name for name in every[0] if any(other.get(name) != every[0][name] for other in every)]
    if not names:
        return
    processes = [rank for rank, other in enumerate(every) if other.get(names[0]) != every[0][names[0]]]
    got = f"{names[0]!r} differs between process 0 and {processes} (and so do {len(names) - 1} others)"
    do = "set_seed(seed) before the model is built, and leave DDP's init_sync on"
    raise ModuleContractError(explain("initial weights", got, "the same weights on every process", do))


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_64_hexdigest(flat.view(torch.uint8).numpy().data)
