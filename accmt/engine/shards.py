"""Models of which each process holds a part: how they are built without values, sharded, split and filled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from accmt.engine.reduction import broadcast_tensors, require_same_tensors
from accmt.errors import ModuleContractError, explain
from accmt.libraries.private_names import (
    checkpoint_activations_by_plugin,
    draw_first_values,
    draws_first_values,
    generate_together,
    has_first_value,
    layers_to_shard,
    plan_of_tensors,
    shard_by_plugin,
    sums_gradients_of_parts,
    twin_of,
)
from accmt.libraries.versions import parallel_size
from accmt.optimization import needs_closure
from accmt.optimization.stepper import has_modes
from accmt.processes import broadcast_object, num_data_processes, num_processes, process_index
from accmt.sharded_tensors import class_of, is_dtensor, make_whole, mesh_of, shard_like

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer


# ---- Models without values yet, built on the meta device: they are sharded first, and filled part by part.


_WHERE = "self.model, built on the meta device"


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, has no values yet."""
    return any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers()))


def fill(model: nn.Module, device: torch.device) -> None:
    """Give a model its first values, sharded or not, in place: those that it would have been built with.

    One part after the other is drawn as a whole, by all processes alike from the main one's state of torch's generator,
    and each keeps what is its own. So no process ever holds more than its shards and the tensors of one part.

    Processes: collective.

    Raises:
        ModuleContractError: A part cannot be filled.
    """
    _require_fillable(model)
    untie(model)  # for a model that is built whole draws each place of a tied weight, and keeps the first
    model.to_empty(device=device)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(broadcast_object(torch.get_rng_state()))
        if draws_first_values(model):
            draw_first_values(model, as_wholes)
            tie: Any = model.tie_weights
            tie()
            return
        for part in filter(_has_own, _bottom_up(model)):
            with as_wholes(part), torch.no_grad():
                _reset(part)


def untie(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Give each place of a tied weight one of its own, and return the places of each such weight."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((module, name))
    tied = {parameter: of_one for parameter, of_one in places.items() if len(of_one) > 1}
    for parameter, of_one in tied.items():
        for module, name in of_one[1:]:
            setattr(module, name, nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad))
    return list(tied.values())


def _require_fillable(model: nn.Module) -> None:
    if draws_first_values(model):
        return
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if len(names) > len(list(model.parameters())):
        got, do = "tied weights, which would get values of their own each", "build it on the CPU"
        raise ModuleContractError(explain(_WHERE, got, "weights that are not tied, but by transformers", do))
    for name, part in model.named_modules():
        if _has_own(part) and not hasattr(part, "reset_parameters"):
            got = f"{name or 'the model'}, a {type(part).__name__} with tensors of its own and without reset_parameters"
            do = "def reset_parameters(self), which fills its tensors, as torch's layers have it"
            raise ModuleContractError(explain(_WHERE, got, "parts that fill themselves", do))


def _bottom_up(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model in the order in which they were built: what is in a part before the part."""
    found: dict[nn.Module, None] = {}
    model.apply(lambda part: found.setdefault(part))
    return list(found)


def _has_own(part: nn.Module) -> bool:
    return any(True for _ in chain(part.parameters(recurse=False), part.buffers(recurse=False)))


def _reset(part: nn.Module) -> None:
    reset: Callable[[], None] = part.reset_parameters  # type: ignore[assignment]
    reset()


@contextmanager
def as_wholes(part: nn.Module) -> Iterator[None]:
    """Let a part and its children have whole parameters on the CPU, and keep of them what is this process's.

    Children too, because some parts draw their children's values once more (attention in GPT-2). What was read from a
    file stays as it is.

    Processes: collective.
    """
    own = {
        (holder, name): parameter
        for holder in (part, *part.children())
        for name, parameter in holder.named_parameters(recurse=False)
        if not has_first_value(parameter)
    }
    for (holder, name), parameter in own.items():
        # An own parameter is about to be drawn, a child's has been.
        whole = torch.empty(parameter.shape, dtype=parameter.dtype)
        if holder is not part:
            whole.copy_(make_whole(parameter.detach()))
        setattr(holder, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    with _RejectsDraws():
        yield
    for (holder, name), parameter in own.items():
        value = shard_like(getattr(holder, name).detach(), parameter)
        _local(parameter.detach()).copy_(_local(value))
        setattr(holder, name, parameter)


class _RejectsDraws(TorchFunctionMode):
    """Rejects to change sharded tensors in place: each process would draw its part by itself."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        changed = next(chain(args, named.values()), None)
        if name.endswith("_") and not name.endswith("__") and is_dtensor(changed):
            got = f"first values that a part draws ({name}) for parts below its children"
            raise ModuleContractError(explain(_WHERE, got, "parts that fill themselves", "build it on the CPU"))
        return func(*args, **named)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, is sharded over processes."""
    return any(is_dtensor(parameter) for parameter in model.parameters())


def shard_model(model: nn.Module, accelerator: Accelerator, optimizer: Optimizer | None) -> None:
    """Shard a model in place as the Accelerator's plugin says, and let its optimizer have the shards.

    Every process begins with the main one's weights and buffers, as under data parallelism.

    Processes: collective.
    """
    if not is_sharded(model):
        require_same_tensors(model)
    if not (is_sharded(model) or is_on_meta(model)):
        broadcast_tensors([*model.parameters(), *model.buffers()], accelerator.device)
    tied = _names_of_tied(model)
    try:
        with _embeddings_for_themselves(model, accelerator.state.fsdp_plugin):
            _shard(model, accelerator, optimizer)
    except (ValueError, KeyError) as error:
        layers = ", ".join(layers_to_shard(model)) or "parts of the model"
        do = "look at auto_wrap_policy and transformer_cls_names_to_wrap, or leave them out"
        expected = f"layers that can be sharded one by one, such as {layers}"
        message = explain("the model, sharded by FSDP2", str(error), expected, do)
        raise ModuleContractError(message) from error
    _require_tied(model, tied)
    _require_one_type(model)
    generate_together(model)


def _require_one_type(model: nn.Module) -> None:
    """Check that what FSDP2 gathers together is of one type, which torch asserts in the first forward only."""
    of_others: set[nn.Module] = set()
    for part in reversed(list(_fsdp_modules(model))):  # what is within another comes first
        own = {
            f"{path}.{name}".removeprefix("."): weight
            for path, layer in part.named_modules()
            if layer not in of_others
            for name, weight in layer.named_parameters(recurse=False)
            if weight.requires_grad
        }
        of_others |= set(part.modules())
        kinds = {weight.dtype: name for name, weight in own.items()}
        if len(kinds) > 1:
            got = ", ".join(f"{name} of {dtype}" for dtype, name in kinds.items())
            expected = "trained weights of one type in each group of layers that is sharded"
            do = 'self.model.float() before fit, and Trainer(mixed_precision="bf16")'
            raise ModuleContractError(explain("the model, sharded by FSDP2", got, expected, do))


def _names_of_tied(model: nn.Module) -> list[list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [of_one for of_one in names.values() if len(of_one) > 1]


def _require_tied(model: nn.Module, tied: list[list[str]]) -> None:
    """Check that weights which were tied are sharded together: torch rejects a weight of two groups, in the forward."""
    now = dict(model.named_parameters(remove_duplicate=False))
    for names in tied:
        if len({id(now[name]) for name in names if name in now}) > 1:
            got = f"{' and '.join(names)}, which are tied, in two groups of layers that are sharded"
            expected = "tied weights in one group, as Accelerate has embeddings and head"
            do = "untie them, or train it without `parallelism`"
            raise ModuleContractError(explain("the model, sharded by FSDP2", got, expected, do))


@contextmanager
def _embeddings_for_themselves(model: nn.Module, plugin: Any) -> Iterator[None]:
    """Let a plugin not shard a layer that holds the embeddings: Accelerate shards them afterwards, once more.

    BERT, say, names its BertEmbeddings among the layers to shard; torch answers with a TypeError about an invariant
    (seen with Accelerate 1.15 and torch 2.13).

    Raises:
        ModuleContractError: The user has named such a layer.
    """
    names = plugin.transformer_cls_names_to_wrap
    found = [getattr(model, f"get_{kind}_embeddings", lambda: None)() for kind in ("input", "output")]
    held = [module for module in model.modules() if any(one in list(module.modules())[1:] for one in found)]
    holders = {class_of(module).__name__ for module in held}
    if names is not None and holders.intersection(names):
        named = ", ".join(sorted(holders.intersection(names)))
        got = f"transformer_cls_names_to_wrap with {named}, which holds the embeddings"
        message = explain("the model, sharded by FSDP2", got, "layers without them", f"leave {named} out")
        raise ModuleContractError(message)
    own = layers_to_shard(model)
    if names is None and holders.intersection(own):
        plugin.transformer_cls_names_to_wrap = [name for name in own if name not in holders]
    try:
        yield
    finally:
        plugin.transformer_cls_names_to_wrap = names


def _shard(model: nn.Module, accelerator: Accelerator, optimizer: Optimizer | None) -> None:
    if optimizer is not None:
        accelerator.prepare(model, optimizer)
        return
    if is_sharded(model) or is_on_meta(model):  # whose weights Accelerate would take for whole ones
        accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
        checkpoint_activations_by_plugin(model, accelerator)
    shard_by_plugin(model, accelerator)


def is_by_fsdp(model: nn.Module) -> bool:
    """Return whether FSDP2 shards a model, as a whole."""
    return next(_fsdp_modules(model), None) is model


def require_known_shards(model: nn.Module) -> None:
    """Check that a model which comes sharded is so over all processes, by `fully_shard` or tensor parallelism.

    Raises:
        ModuleContractError: It is sharded otherwise, so that processes would have to share batches.
    """
    if has_tied_shards(model):
        got = "a model with tied weights that transformers has sharded: one of them would not follow the other's steps"
        do = "load it without distributed_config: AcceleratorModule.from_hf(path, type, in_fit=True)"
        raise ModuleContractError(explain("self.model", got, "tied weights sharded as one", do))
    meshes = {parameter.device_mesh for parameter in model.parameters() if is_dtensor(parameter)}
    sizes = {num_processes(), num_data_processes()}  # of what is split as well, and of what is not
    if (is_by_fsdp(model) or num_data_processes() == 1) and all(mesh.size() in sizes for mesh in meshes):
        return
    shapes = ", ".join(
        str(dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)) or mesh.shape) for mesh in meshes
    )
    got = f"a model sharded over meshes of {shapes}, on {num_processes()} processes"
    do = 'leave it whole, and let Trainer(parallelism={"fsdp": True}) shard it, or {"tp": 2} split it'
    expected = "fully_shard(model) over all processes that do not share batches"
    raise ModuleContractError(explain("self.model", got, expected, do))


def as_shard(tensor: Tensor) -> Tensor:
    """Return a tensor as this process's part of one that all processes hold together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(tensor.device.type, (num_processes(),))
    return DTensor.from_local(tensor, mesh, [Shard(0)])


def try_steps_of_shards(optimizer: Any) -> None:
    """Check, before the first step, that an optimizer can step the shards that it has.

    Of weights that are sharded alike the smallest is tried, on a copy, by another object of the optimizer's class.

    Processes: collective.

    Raises:
        ModuleContractError: torch cannot compute the step with shards.
    """
    for one in getattr(optimizer, "optimizers", (optimizer,)):
        for group in one.param_groups:
            smallest: dict[object, Any] = {}
            for weight in group["params"]:
                if is_dtensor(weight) and weight.requires_grad:
                    kind = _kind_of(weight)
                    smallest[kind] = min(smallest.get(kind, weight), weight, key=lambda shard: shard.numel())
            for weight in smallest.values():
                _try_step(one, group, weight)


def _kind_of(weight: Any) -> object:
    """Return what decides how torch computes with a shard: an optimizer such as Muon turns wide matrices around."""
    shape = weight.shape
    is_even = all(size % weight.device_mesh.size() == 0 for size in shape)
    is_tall = weight.dim() == 2 and shape[0] > shape[1]
    return weight.device_mesh, weight.placements, weight.dim(), is_even, is_tall


def _try_step(optimizer: Optimizer, group: Mapping[str, Any], weight: Any) -> None:
    twin: Any = twin_of(optimizer)
    copied = nn.Parameter(weight.detach().clone())
    copied.grad = copied.detach() * 0.5 + 0.01
    twin.param_groups = [{**group, "params": [copied]}]
    closure: dict[str, Any] = {"closure": lambda: copied.detach().sum()} if needs_closure(optimizer) else {}
    if has_modes(twin):  # which steps in training mode only
        twin.train()
    try:
        type(twin).step(twin, **closure)
    except Exception as error:
        name = type(optimizer).__name__
        got = f"{name}, whose step torch cannot compute where weights are shards (FSDP2, tensor parallelism): {error}"
        expected, do = "an optimizer that steps shards, such as AdamW", "write `type: AdamW` in `optim`; "
        do += "or launch with `accmt launch --strat ddp`"
        raise ModuleContractError(explain("the optimizer", got, expected, do)) from error


def reshard(model: nn.Module) -> None:
    """Let each process hold no more than its shards again.

    After a forward without a backward some layers still have their whole parameters; what then looks at the
    parameters would find tensors of both kinds.
    """
    for part in _fsdp_modules(model):
        part.reshard()


def has_tied_shards(model: nn.Module) -> bool:
    """Return whether transformers has sharded tied weights, each in a group of its own.

    Each group gathers its own copy, and the optimizer changes that of one (seen with transformers 5.23 and torch 2.13).
    Its mesh is known by the name of its dimension.
    """
    parameters = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    is_tied = len({id(parameter) for parameter in parameters}) < len(parameters)
    return is_tied and any(is_dtensor(one) and "fsdp" in (one.device_mesh.mesh_dim_names or ()) for one in parameters)


def _fsdp_modules(model: nn.Module) -> Iterator[Any]:
    module = sys.modules.get("torch.distributed.fsdp")
    return (part for part in model.modules() if module is not None and isinstance(part, module.FSDPModule))


# ---- Tensor parallelism: processes that share each batch hold a part of most tensors, and compute with it.
#
# The engine is transformers' (the plan of each model) and torch's (`DTensor`). Beside the tensors that are split there
# are others, such as those of norms, which all processes have, with the same gradients; so what concerns all parameters
# at once meets tensors of several kinds.


_NAME = "tp"
_ASKED = 'Trainer(parallelism={"tp": ...})'


def config_of(accelerator: Accelerator) -> ParallelismConfig | None:
    """Return the sizes of an Accelerator's mesh of processes; None where it has none."""
    state: Any = getattr(accelerator, "state", None)
    return getattr(state, "parallelism_config", None)


def tensor_parallel_size(accelerator: Accelerator) -> int:
    """Return over how many processes each tensor of a model is asked to be split; 1 where it is not."""
    config = config_of(accelerator)
    return 1 if config is None else parallel_size(config, "tp")


def split_tensors(model: nn.Module, accelerator: Accelerator) -> None:
    """Split the tensors of a transformers model in place, by its own plan.

    Every process begins with the main one's weights and buffers, as under data parallelism.

    Processes: collective.

    Raises:
        ModuleContractError: The model has no plan, or cannot be split over so many processes.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh: Any = accelerator.torch_device_mesh[_NAME]
    plan = _find_plan(model, mesh.size())
    require_same_tensors(model)
    if not is_on_meta(model):
        broadcast_tensors([*model.parameters(), *model.buffers()], accelerator.device)
    tied = untie(model)  # a plan is followed place by place, and makes another parameter at each
    apply_tensor_parallelism(model, mesh, plan)
    _tie_again(model, tied)
    vars(model)["_tp_size"] = mesh.size()  # which `generate` reads


def _find_plan(model: nn.Module, size: int) -> dict[str, str]:
    try:
        plan = plan_of_tensors(model, size)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        got = f"a {type(model).__name__} without a plan for tensor parallelism: {error}"
        expected = "a transformers model with one (transformers 5.23 or newer), or a model that comes split"
        do = f"split it in configure_model by torch's parallelize_module, over a mesh with a dimension {_NAME!r}"
        do = f'Trainer(parallelism={{"fsdp": True}}), which shards any model; or {do}'
        raise ModuleContractError(explain(_ASKED, got, expected, do)) from error
    return plan


def require_whole_heads(model: nn.Module, size: int) -> None:
    """Check that the plan of a transformers model leaves whole heads of attention on each process.

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
        got = f"{heads} heads of keys and values of a {type(model).__name__}, over {size} processes"
        raise ModuleContractError(
            explain(_ASKED, got, "whole heads on each", 'a size that divides it, such as "tp": 2')
        )


def _tie_again(model: nn.Module, tied: list[list[tuple[nn.Module, str]]]) -> None:
    for (first, first_name), *others in tied:
        parameter = getattr(first, first_name)
        for module, name in others:
            other = getattr(module, name)
            if getattr(other, "placements", None) != getattr(parameter, "placements", None):
                got = f"tied weights of a {type(model).__name__}, of which its plan splits each in another way"
                do = "tie_word_embeddings=False, or FSDP2"
                raise ModuleContractError(explain(_ASKED, got, "one way for both", do))
            setattr(module, name, parameter)


def share_weights(model: nn.Module, accelerator: Accelerator) -> None:
    """Give every process the main one's weights of a model that comes split, as far as it has the same ones.

    That is what is not split; and of what is, the parts of the main process and of those that share its batches.

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
    """Return how many processes share each batch: those over which tensors of the model are split, or will be.

    Args:
        model: The model, split or not.
        asked: What the run asks for, 1 where it does not.

    Raises:
        ModuleContractError: The model comes split over others than processes with neighbouring ranks, or than asked.
    """
    found = (_mesh_of_split(parameter, by_fsdp=is_by_fsdp(model)) for parameter in model.parameters())
    meshes = {id(mesh): mesh for mesh in found if mesh is not None}
    sizes = {mesh.size() for mesh in meshes.values()}
    if not sizes:
        return asked
    size = max(sizes)
    first = process_index() // size * size
    ranks = [mesh.mesh.flatten().tolist() for mesh in meshes.values()]
    expected = f"processes {first} to {first + size - 1} together, as the last dimension of a mesh over all has them"
    if asked not in (1, size):
        got = f"a model that comes split over {size} processes, where {asked} are asked for"
        raise ModuleContractError(explain(_ASKED, got, "one size", f'parallelism={{"{_NAME}": {size}}}'))
    if any(of_one != list(range(first, first + size)) for of_one in ranks) or num_processes() % size:
        got = f"a model that comes split over the processes {ranks[0]}"
        do = 'init_device_mesh(device, (shard, tp), mesh_dim_names=("shard", "tp"))'
        raise ModuleContractError(explain("self.model", got, expected, do))
    return size


def _mesh_of_split(parameter: Tensor, *, by_fsdp: bool) -> DeviceMesh | None:
    """Return the processes over which a tensor is split for computing with its parts; None where it is not.

    A dimension of a mesh that is called "tp" says so; where FSDP2 has not sharded the model, a mesh without names too.
    """
    mesh = mesh_of(parameter)
    if mesh is None or mesh.mesh_dim_names is None:
        return None if by_fsdp else mesh
    return mesh[_NAME] if _NAME in mesh.mesh_dim_names else None


def partial_gradients(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose gradients transformers adds up over the processes of a split by a hook of its own.

    It does so whenever a gradient is added to what is there: at the second micro-batch of a window what was added up
    at the first would be added up again (seen with transformers 5.23).
    """
    return [parameter for parameter in sums_gradients_of_parts(model) if not is_dtensor(parameter)]


@contextmanager
def beginning_anew(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Let a backward pass find no gradients of these parameters, and add what was there before to what it leaves."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, gradient in zip(parameters, before, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


# ---- Models that are built when a run begins: distributed while they have no values, so that no process has the whole.


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
