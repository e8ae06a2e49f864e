"""Sharding a model with FSDP2, and checks of models that are sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from accmt.engine.reduction import broadcast_tensors, require_same_tensors
from accmt.errors import ModuleContractError, fail
from accmt.libraries.private_names import (
    generate_together,
    layers_to_shard,
)
from accmt.optimization import needs_closure
from accmt.optimization.stepper import has_modes
from accmt.options.optimizer_and_scheduler_arguments import build_alike, members_of
from accmt.processes import num_data_processes, num_processes
from accmt.sharded_tensors import class_of, is_dtensor

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.optim import Optimizer


_WHERE = "the model, sharded by FSDP2"


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, has no values yet."""
    return any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers()))


def untie(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Give each occurrence of a tied weight a separate parameter, and return the occurrences of each such weight."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((module, name))
    tied = []
    for parameter, occurrences in places.items():
        if len(occurrences) > 1:
            tied.append(occurrences)
        for module, name in occurrences[1:]:
            setattr(module, name, nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad))
    return tied


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
    # Built by each process, whose random numbers may differ: shards of different models would be one model.
    if not (is_sharded(model) or is_on_meta(model)):
        broadcast_tensors([*model.parameters(), *model.buffers()], accelerator.device)
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    tied = [names for names in names_of.values() if len(names) > 1]
    try:
        with _embeddings_for_themselves(model, accelerator.state.fsdp_plugin):
            _shard(model, accelerator, optimizer)
    except (ValueError, KeyError) as error:
        layers = ", ".join(layers_to_shard(model)) or "parts of the model"
        do = "check auto_wrap_policy and transformer_cls_names_to_wrap, or leave them out"
        expected = f"layers that can be sharded one by one, such as {layers}"
        raise fail(ModuleContractError, _WHERE, got=str(error), expected=expected, do=do) from error
    # Check that tied weights are sharded together: torch rejects a weight in two groups, but only in the forward.
    shards = dict(model.named_parameters(remove_duplicate=False))
    for names in tied:
        groups = {id(shards[name]) for name in names if name in shards}
        if len(groups) > 1:
            got = f"{' and '.join(names)}, which are tied, in two groups of sharded layers"
            expected = "tied weights in one group, as Accelerate does for embeddings and head"
            do = "untie them, or train it without `parallelism`"
            raise fail(ModuleContractError, _WHERE, got=got, expected=expected, do=do)
    generate_together(model)


@contextmanager
def _embeddings_for_themselves(model: nn.Module, plugin: Any) -> Iterator[None]:
    """Keep a plugin from sharding a layer that contains the embeddings: Accelerate shards those again afterwards.

    BERT, for example, lists BertEmbeddings among the layers to shard; torch then raises a TypeError about an invariant
    (seen with Accelerate 1.15 and torch 2.13).

    Raises:
        ModuleContractError: The user has listed such a layer.
    """
    names = plugin.transformer_cls_names_to_wrap
    embeddings = [getattr(model, f"get_{kind}_embeddings", lambda: None)() for kind in ("input", "output")]
    parents = set()
    for module in model.modules():
        descendants = list(module.modules())[1:]
        if any(embedding in descendants for embedding in embeddings):
            parents.add(class_of(module).__name__)
    # torch's TypeError would name neither the list nor the layer.
    if names is not None and parents.intersection(names):
        listed = ", ".join(sorted(parents.intersection(names)))
        got = f"transformer_cls_names_to_wrap with {listed}, which contains the embeddings"
        raise fail(ModuleContractError, _WHERE, got=got, expected="layers without them", do=f"leave {listed} out")
    layers = layers_to_shard(model)
    if names is None and parents.intersection(layers):
        plugin.transformer_cls_names_to_wrap = [name for name in layers if name not in parents]
    try:
        yield
    finally:
        plugin.transformer_cls_names_to_wrap = names


def _shard(model: nn.Module, accelerator: Accelerator, optimizer: Optimizer | None) -> None:
    if optimizer is not None:
        accelerator.prepare(model, optimizer)
        return
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model

    plugin: Any = accelerator.state.fsdp_plugin
    if is_sharded(model) or is_on_meta(model):  # Accelerate would treat these weights as full ones
        plugin.cpu_ram_efficient_loading = False
        plugin.set_auto_wrap_policy(model)
        if plugin.activation_checkpointing:
            fsdp2_apply_ac(accelerator, model)
    fsdp2_prepare_model(accelerator, model)


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
        raise fail(ModuleContractError, "self.model", got=got, expected="tied weights sharded as one", do=do)
    meshes = {parameter.device_mesh for parameter in model.parameters() if is_dtensor(parameter)}
    sizes = {num_processes(), num_data_processes()}  # of tensors that are also split, and of others
    if (is_by_fsdp(model) or num_data_processes() == 1) and all(mesh.size() in sizes for mesh in meshes):
        return
    shapes = []
    for mesh in meshes:
        sizes_by_name = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        shapes.append(str(sizes_by_name or mesh.shape))
    got = f"a model sharded over meshes of {', '.join(shapes)}, on {num_processes()} processes"
    do = 'leave it unsharded, and let Trainer(parallelism={"fsdp": True}) shard it, or {"tp": 2} split it'
    expected = "fully_shard(model) over all processes that do not share batches"
    raise fail(ModuleContractError, "self.model", got=got, expected=expected, do=do)


def as_shard(tensor: Tensor) -> Tensor:
    """Return a tensor as this process's part of one that all processes hold together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(tensor.device.type, (num_processes(),))
    return DTensor.from_local(tensor, mesh, [Shard(0)])


def try_steps_of_shards(optimizer: Any) -> None:
    """Check, before the first step, that an optimizer can step its shards.

    Among weights that are sharded alike, only the smallest is tested, as a copy, with a new optimizer of the same
    class.

    Processes: collective.

    Raises:
        ModuleContractError: torch cannot compute the step with shards.
    """
    for member in members_of(optimizer):
        for group in member.param_groups:
            smallest: dict[object, Any] = {}
            for weight in group["params"]:
                if is_dtensor(weight) and weight.requires_grad:
                    kind = _kind_of(weight)
                    smallest[kind] = min(smallest.get(kind, weight), weight, key=lambda shard: shard.numel())
            for weight in smallest.values():
                _try_step(member, group, weight)


def _kind_of(weight: Any) -> object:
    """Return the properties that determine how torch computes with a shard (Muon transposes wide matrices)."""
    shape = weight.shape
    is_even = all(size % weight.device_mesh.size() == 0 for size in shape)
    is_tall = weight.dim() == 2 and shape[0] > shape[1]
    return weight.device_mesh, weight.placements, weight.dim(), is_even, is_tall


def _try_step(optimizer: Optimizer, group: Mapping[str, Any], weight: Any) -> None:
    copied = nn.Parameter(weight.detach().clone())
    copied.grad = copied.detach() * 0.5 + 0.01
    closure: dict[str, Any] = {}
    if needs_closure(optimizer):
        closure["closure"] = lambda: copied.detach().sum()
    try:
        alike = build_alike(optimizer, group, copied)
    except Exception:  # noqa: BLE001 - built from something else: nothing is tried
        return
    if has_modes(alike):  # steps in training mode only
        alike.train()
    try:
        alike.step(**closure)
    except Exception as error:
        name = type(optimizer).__name__
        got = f"{name}, whose step torch cannot compute with sharded weights (FSDP2, tensor parallelism): {error}"
        expected, do = "an optimizer that steps shards, such as AdamW", "set `type: AdamW` in `optim`; "
        do += "or launch with `accmt launch --strat ddp`"
        raise fail(ModuleContractError, "the optimizer", got=got, expected=expected, do=do) from error


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
    parameters = list(dict(model.named_parameters(remove_duplicate=False)).values())
    is_tied = len(set(parameters)) < len(parameters)
    if not is_tied:
        return False
    for parameter in parameters:
        if is_dtensor(parameter) and "fsdp" in (parameter.device_mesh.mesh_dim_names or ()):
            return True
    return False


def _fsdp_modules(model: nn.Module) -> Iterator[Any]:
    return (part for part in model.modules() if isinstance(part, FSDPModule))
