"""Tensor parallelism: processes that share each batch hold a part of most tensors, and compute with it.

Implemented by transformers (the plan of each model) and torch (`DTensor`). Other tensors, such as those of norms, are
replicated with the same gradients; so operations over all parameters encounter several kinds of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from accmt.engine.reduction import broadcast_tensors, require_same_tensors
from accmt.engine.shards import is_by_fsdp, is_on_meta, untie
from accmt.errors import ModuleContractError, explain
from accmt.libraries.private_names import plan_of_tensors
from accmt.libraries.versions import parallel_size
from accmt.processes import num_data_processes, num_processes, process_index
from accmt.sharded_tensors import is_dtensor, mesh_of

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from torch.distributed.device_mesh import DeviceMesh

_NAME = "tp"
_ASKED = 'Trainer(parallelism={"tp": ...})'


def config_of(accelerator: Accelerator) -> ParallelismConfig | None:
    """Return the sizes of an Accelerator's device mesh, or None."""
    state: Any = getattr(accelerator, "state", None)
    return getattr(state, "parallelism_config", None)


def tensor_parallel_size(accelerator: Accelerator) -> int:
    """Return the number of processes that each tensor of a model is to be split over; 1 if it is not split."""
    config = config_of(accelerator)
    return 1 if config is None else parallel_size(config, "tp")


def split_tensors(model: nn.Module, accelerator: Accelerator) -> None:
    """Split the tensors of a transformers model in place, with its own plan.

    Every process starts with the main process's weights and buffers, as in data parallelism.

    Processes: collective.

    Raises:
        ModuleContractError: The model has no plan, or cannot be split over that many processes.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh: Any = accelerator.torch_device_mesh[_NAME]
    try:
        plan = plan_of_tensors(model, mesh.size())
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        got = f"a {type(model).__name__} without a plan for tensor parallelism: {error}"
        expected = "a transformers model with a plan (transformers 5.23 or newer), or a model that is already split"
        do = f"split it in configure_model with torch's parallelize_module, over a mesh with a dimension {_NAME!r}"
        do = f'Trainer(parallelism={{"fsdp": True}}), which shards any model; or {do}'
        raise ModuleContractError(explain(_ASKED, got, expected, do)) from error
    require_same_tensors(model)
    if not is_on_meta(model):
        broadcast_tensors([*model.parameters(), *model.buffers()], accelerator.device)
    tied = untie(model)  # a plan is applied to each occurrence, and creates a separate parameter each time
    apply_tensor_parallelism(model, mesh, plan)
    _tie_again(model, tied)
    vars(model)["_tp_size"] = mesh.size()  # read by `generate`


def require_whole_heads(model: nn.Module, size: int) -> None:
    """Check that the plan of a transformers model keeps whole attention heads on each process.

    Raises:
        ModuleContractError: It does not.
    """
    config: Any = getattr(model, "config", None)
    if not (hasattr(config, "get_text_config") and getattr(model, "tp_plan", None)):
        return
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    plan: Any = model.tp_plan
    if heads is not None and get_kv_heads_per_rank(plan, heads, size) is None:
        got = f"{heads} key and value heads of a {type(model).__name__}, over {size} processes"
        raise ModuleContractError(
            explain(_ASKED, got, "whole heads on each process", 'a size that divides it, such as "tp": 2')
        )


def _tie_again(model: nn.Module, tied: list[list[tuple[nn.Module, str]]]) -> None:
    for (first, first_name), *others in tied:
        parameter = getattr(first, first_name)
        for module, name in others:
            other = getattr(module, name)
            if getattr(other, "placements", None) != getattr(parameter, "placements", None):
                got = f"tied weights of a {type(model).__name__} that its plan splits in different ways"
                do = "tie_word_embeddings=False, or FSDP2"
                raise ModuleContractError(explain(_ASKED, got, "the same split for both", do))
            setattr(module, name, parameter)


def share_weights(model: nn.Module, accelerator: Accelerator) -> None:
    """Copy the main process's weights of an already split model to every process that holds the same ones.

    Those are the replicated tensors; and of split tensors, the parts of the main process and those that share its
    batches.

    Processes: collective.
    """
    tensors = [*model.parameters(), *model.buffers()]
    broadcast_tensors([tensor for tensor in tensors if not is_dtensor(tensor)], accelerator.device)
    if num_data_processes() == 1:
        return
    mesh: Any = accelerator.torch_device_mesh
    for tensor in filter(is_dtensor, tensors):
        dist.broadcast(tensor.to_local().detach(), group=mesh["dp"].get_group(), group_src=0)


def ranks_of_batch(model: nn.Module, asked: int) -> int:
    """Return how many processes share each batch: those over which tensors of the model are or will be split.

    Args:
        model: The model, split or not.
        asked: The size requested by the run, 1 if there is none.

    Raises:
        ModuleContractError: The model is split over processes that are not neighbors, or with another size.
    """
    found = (_mesh_of_split(parameter, by_fsdp=is_by_fsdp(model)) for parameter in model.parameters())
    meshes = {id(mesh): mesh for mesh in found if mesh is not None}
    sizes = {mesh.size() for mesh in meshes.values()}
    if not sizes:
        return asked
    size = max(sizes)
    first = process_index() // size * size
    ranks = [mesh.mesh.flatten().tolist() for mesh in meshes.values()]
    expected = f"processes {first} to {first + size - 1} together, like the last dimension of a mesh over all processes"
    if asked not in (1, size):
        got = f"a model that is already split over {size} processes, while {asked} are requested"
        raise ModuleContractError(explain(_ASKED, got, "the same size", f'parallelism={{"{_NAME}": {size}}}'))
    if any(of_one != list(range(first, first + size)) for of_one in ranks) or num_processes() % size:
        got = f"a model that is already split over the processes {ranks[0]}"
        do = 'init_device_mesh(device, (shard, tp), mesh_dim_names=("shard", "tp"))'
        raise ModuleContractError(explain("self.model", got, expected, do))
    return size


def _mesh_of_split(parameter: Tensor, *, by_fsdp: bool) -> DeviceMesh | None:
    """Return the device mesh over which a tensor is split for tensor parallelism, or None.

    It is the mesh dimension "tp" or, if FSDP2 has not sharded the model, a mesh without dimension names.
    """
    mesh = mesh_of(parameter)
    if mesh is None or mesh.mesh_dim_names is None:
        return None if by_fsdp else mesh
    return mesh[_NAME] if _NAME in mesh.mesh_dim_names else None


def partial_gradients(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose gradients transformers sums over the processes of a split with its own hook.

    It does so whenever a gradient is accumulated: at the second micro-batch of a window the sum of the first would be
    summed again (seen with transformers 5.23).
    """
    size = getattr(model, "tp_size", None)
    if size in (None, 1):
        return []
    styles = plan_of_tensors(model, size)
    summed = {name for name, style in styles.items() if style == "replicated_with_grad_allreduce"}
    named = model.named_parameters()
    return [parameter for name, parameter in named if name in summed and not is_dtensor(parameter)]


@contextmanager
def beginning_anew(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Run a backward pass without these parameters' previous gradients, and add them to the result."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, gradient in zip(parameters, before, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
