"""Models of which each process holds a part: building them without values, sharding, splitting and filling them."""

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


# ---- Models without values, built on the meta device: they are sharded first, then filled part by part.


_WHERE = "self.model, built on the meta device"


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, has no values yet."""
    return any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers()))


def fill(model: nn.Module, device: torch.device) -> None:
    """Initialize a model in place, sharded or not, with the same values as if it had been built with them.

    One part after the other is initialized in full, on all processes with the main process's state of torch's
    generator, and each process keeps its shards. No process ever holds more than its shards and the tensors of one
    part.

    Processes: collective.

    Raises:
        ModuleContractError: A part cannot be initialized.
    """
    _require_fillable(model)
    untie(model)  # a model that is built in full initializes each occurrence of a tied weight, and keeps the first
    model.to_empty(device=device)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(broadcast_object(torch.get_rng_state()))
        if draws_first_values(model):
            draw_first_values(model, as_wholes)
            tie: Any = model.tie_weights
            tie()
            return
        bottom_up: dict[nn.Module, None] = {}  # the order in which the parts were built: children before their parent
        model.apply(lambda part: bottom_up.setdefault(part))
        for part in filter(_has_own, bottom_up):
            with as_wholes(part), torch.no_grad():
                _reset(part)


def untie(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Give each occurrence of a tied weight a separate parameter, and return the occurrences of each such weight."""
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
        got, do = "tied weights, each of which would get different values", "build it on the CPU"
        raise ModuleContractError(explain(_WHERE, got, "weights that only transformers ties", do))
    for name, part in model.named_modules():
        if _has_own(part) and not hasattr(part, "reset_parameters"):
            got = f"{name or 'the model'}, a {type(part).__name__} with tensors but without reset_parameters"
            do = "define reset_parameters(self), which initializes its tensors, as in torch's layers"
            raise ModuleContractError(explain(_WHERE, got, "modules that initialize their own tensors", do))


def _has_own(part: nn.Module) -> bool:
    return any(True for _ in chain(part.parameters(recurse=False), part.buffers(recurse=False)))


def _reset(part: nn.Module) -> None:
    reset: Callable[[], None] = part.reset_parameters  # type: ignore[assignment]
    reset()


@contextmanager
def as_wholes(part: nn.Module) -> Iterator[None]:
    """Give a part and its children full parameters on the CPU, and keep this process's shards of them afterwards.

    Includes children, because some parts initialize their children's values again (attention in GPT-2). Values read
    from a file are kept.

    Processes: collective.
    """
    own = {
        (holder, name): parameter
        for holder in (part, *part.children())
        for name, parameter in holder.named_parameters(recurse=False)
        if not has_first_value(parameter)
    }
    for (holder, name), parameter in own.items():
        # A part's own parameter is about to be initialized, a child's has been.
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
    """Rejects in-place initialization of sharded tensors: each process would initialize its shard independently."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        changed = next(chain(args, named.values()), None)
        if name.endswith("_") and not name.endswith("__") and is_dtensor(changed):
            got = f"initial values that a part draws ({name}) for parts below its children"
            raise ModuleContractError(
                explain(_WHERE, got, "modules that initialize their own tensors", "build it on the CPU")
            )
        return func(*args, **named)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, is sharded over processes."""
    return any(is_dtensor(parameter) for parameter in model.parameters())


def shard_model(model: nn.Module, accelerator: Accelerator, optimizer: Optimizer | None) -> None:
    """Shard a model in place with the Accelerator's plugin, and give its optimizer the shards.

    Every process starts with the main process's weights and buffers, as in data parallelism.

    Processes: collective.
    """
    if not is_sharded(model):
        require_same_tensors(model)
    if not (is_sharded(model) or is_on_meta(model)):
        broadcast_tensors([*model.parameters(), *model.buffers()], accelerator.device)
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    tied = [of_one for of_one in names_of.values() if len(of_one) > 1]
    try:
        with _embeddings_for_themselves(model, accelerator.state.fsdp_plugin):
            _shard(model, accelerator, optimizer)
    except (ValueError, KeyError) as error:
        layers = ", ".join(layers_to_shard(model)) or "parts of the model"
        do = "check auto_wrap_policy and transformer_cls_names_to_wrap, or leave them out"
        expected = f"layers that can be sharded one by one, such as {layers}"
        message = explain("the model, sharded by FSDP2", str(error), expected, do)
        raise ModuleContractError(message) from error
    # Check that tied weights are sharded together: torch rejects a weight in two groups, but only in the forward.
    now = dict(model.named_parameters(remove_duplicate=False))
    for names in tied:
        if len({id(now[name]) for name in names if name in now}) > 1:
            got = f"{' and '.join(names)}, which are tied, in two groups of sharded layers"
            expected = "tied weights in one group, as Accelerate does for embeddings and head"
            do = "untie them, or train it without `parallelism`"
            raise ModuleContractError(explain("the model, sharded by FSDP2", got, expected, do))
    _require_one_type(model)
    generate_together(model)


def _require_one_type(model: nn.Module) -> None:
    """Check that parameters that FSDP2 gathers together have one dtype; torch asserts it only in the first forward."""
    of_others: set[nn.Module] = set()
    for part in reversed(list(_fsdp_modules(model))):  # inner modules first
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
            expected = "trained weights of one dtype in each group of sharded layers"
            do = 'self.model.float() before fit, and Trainer(mixed_precision="bf16")'
            raise ModuleContractError(explain("the model, sharded by FSDP2", got, expected, do))


@contextmanager
def _embeddings_for_themselves(model: nn.Module, plugin: Any) -> Iterator[None]:
    """Keep a plugin from sharding a layer that contains the embeddings: Accelerate shards those again afterwards.

    BERT, for example, lists BertEmbeddings among the layers to shard; torch then raises a TypeError about an invariant
    (seen with Accelerate 1.15 and torch 2.13).

    Raises:
        ModuleContractError: The user has listed such a layer.
    """
    names = plugin.transformer_cls_names_to_wrap
    found = [getattr(model, f"get_{kind}_embeddings", lambda: None)() for kind in ("input", "output")]
    held = [module for module in model.modules() if any(one in list(module.modules())[1:] for one in found)]
    holders = {class_of(module).__name__ for module in held}
    if names is not None and holders.intersection(names):
        named = ", ".join(sorted(holders.intersection(names)))
        got = f"transformer_cls_names_to_wrap with {named}, which contains the embeddings"
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
    if is_sharded(model) or is_on_meta(model):  # Accelerate would treat these weights as full ones
        accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
        checkpoint_activations_by_plugin(model, accelerator)
    shard_by_plugin(model, accelerator)


def is_by_fsdp(model: nn.Module) -> bool:
    """Return whether FSDP2 shards the whole model."""
    return next(_fsdp_modules(model), None) is model


def require_known_shards(model: nn.Module) -> None:
    """Check that a model that is already sharded is sharded over all processes, by `fully_shard` or tensor parallelism.

    Raises:
        ModuleContractError: It is sharded differently, so that processes would have to share batches.
    """
    if has_tied_shards(model):
        got = "a model with tied weights that transformers has sharded: an optimizer step would update only one of them"
        do = "load it without distributed_config: AcceleratorModule.from_hf(path, type, in_fit=True)"
        raise ModuleContractError(explain("self.model", got, "tied weights sharded as one", do))
    meshes = {parameter.device_mesh for parameter in model.parameters() if is_dtensor(parameter)}
    sizes = {num_processes(), num_data_processes()}  # of tensors that are also split, and of others
    if (is_by_fsdp(model) or num_data_processes() == 1) and all(mesh.size() in sizes for mesh in meshes):
        return
    shapes = ", ".join(
        str(dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)) or mesh.shape) for mesh in meshes
    )
    got = f"a model sharded over meshes of {shapes}, on {num_processes()} processes"
    do = 'leave it unsharded, and let Trainer(parallelism={"fsdp": True}) shard it, or {"tp": 2} split it'
    expected = "fully_shard(model) over all processes that do not share batches"
    raise ModuleContractError(explain("self.model", got, expected, do))


def as_shard(tensor: Tensor) -> Tensor:
    """Return a tensor as this process's part of one that all processes hold together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(tensor.device.type, (num_processes(),))
    return DTensor.from_local(tensor, mesh, [Shard(0)])


def try_steps_of_shards(optimizer: Any) -> None:
    """Check, before the first step, that an optimizer can step its shards.

    Among weights that are sharded alike, only the smallest is tested, as a copy, with another instance of the
    optimizer.

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
    """Return the properties that determine how torch computes with a shard (Muon transposes wide matrices)."""
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
    if has_modes(twin):  # steps in training mode only
        twin.train()
    try:
        type(twin).step(twin, **closure)
    except Exception as error:
        name = type(optimizer).__name__
        got = f"{name}, whose step torch cannot compute with sharded weights (FSDP2, tensor parallelism): {error}"
        expected, do = "an optimizer that steps shards, such as AdamW", "set `type: AdamW` in `optim`; "
        do += "or launch with `accmt launch --strat ddp`"
        raise ModuleContractError(explain("the optimizer", got, expected, do)) from error


def reshard(model: nn.Module) -> None:
    """Free the full parameters, so that each process holds only its shards.

    After a forward without a backward some layers still have full parameters; code that then iterates over the
    parameters would find tensors of both kinds.
    """
    for part in _fsdp_modules(model):
        part.reshard()


def has_tied_shards(model: nn.Module) -> bool:
    """Return whether transformers has sharded tied weights, each in a separate group.

    Each group gathers its own copy, and the optimizer updates only one (seen with transformers 5.23 and torch 2.13).
    Its mesh is recognized by the name of its dimension.
    """
    parameters = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    is_tied = len({id(parameter) for parameter in parameters}) < len(parameters)
    return is_tied and any(is_dtensor(one) and "fsdp" in (one.device_mesh.mesh_dim_names or ()) for one in parameters)


def _fsdp_modules(model: nn.Module) -> Iterator[Any]:
    module = sys.modules.get("torch.distributed.fsdp")
    return (part for part in model.modules() if module is not None and isinstance(part, module.FSDPModule))


# ---- Tensor parallelism: processes that share each batch hold a part of most tensors, and compute with it.
#
# Implemented by transformers (the plan of each model) and torch (`DTensor`). Other tensors, such as those of norms, are
# replicated with the same gradients; so operations over all parameters encounter several kinds of tensors.


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
    return [parameter for parameter in sums_gradients_of_parts(model) if not is_dtensor(parameter)]


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


# ---- Models built at the start of a run: distributed before they have values, so that no process holds all of it.


_accelerator: Accelerator | None = None


@contextmanager
def building_for(accelerator: Accelerator | None) -> Iterator[None]:
    """Load models in distributed form in this context, if the Accelerator of a run distributes them.

    Args:
        accelerator: None loads them in full.
    """
    global _accelerator  # noqa: PLW0603 - `configure_model` takes no arguments
    before, _accelerator = _accelerator, accelerator
    try:
        yield
    finally:
        _accelerator = before


def accelerator_to_build_for() -> Accelerator | None:
    """Return the Accelerator of the run whose model is being built; None if each process holds the full model."""
    if _accelerator is None or not (_accelerator.is_fsdp2 or tensor_parallel_size(_accelerator) > 1):
        return None
    return _accelerator


def distribute_empty(model: nn.Module, accelerator: Accelerator) -> None:
    """Split a model without values by tensor parallelism, and shard it, as requested by the run.

    Processes: collective.
    """
    size = tensor_parallel_size(accelerator)
    if size > 1:
        require_whole_heads(model, size)
        split_tensors(model, accelerator)
    if accelerator.is_fsdp2:
        shard_model(model, accelerator, None)


def device_of_shards(accelerator: Accelerator) -> torch.device:
    """Return the device of a model's shards between the steps."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    is_offloaded = isinstance(getattr(plugin, "cpu_offload", None), CPUOffloadPolicy)
    return torch.device("cpu") if is_offloaded else accelerator.device
