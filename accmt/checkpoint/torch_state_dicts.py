"""The states of model and optimizers under the parameters' plain names, as if nothing were wrapped.

`torch.distributed.checkpoint.state_dict` does the same for more wrappers, but steps an optimizer that has no state yet
(which leaves momenta behind), misses the second name of a module that a wrapped model has twice, and costs several
times as much while training waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accmt.errors import CheckpointError, ModuleContractError, explain
from accmt.libraries.private_names import buffers_of, children_of, is_saved
from accmt.sharded_tensors import is_expanded, write_into

State = dict[str, Any]


def require_known(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Check that model and optimizers are such that every tensor has a plain name."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        got, do = "a model sharded by FSDP version 1", "set `fsdp_version: 2` in Accelerate's configuration"
        raise CheckpointError(explain(type(model).__name__, got, "DDP, or `fully_shard` (FSDP version 2)", do))
    for index, optimizer in enumerate(optimizers):
        _require_parameters_of(model, optimizer, f"{type(optimizer).__name__} (optimizer {index})")


def model_state(model: nn.Module) -> State:
    """Return the model's state by plain names; its tensors are the model's, not copies."""
    wrapped = _wrapped_paths(model)
    return {_plain_name(key, wrapped): value for key, value in model.state_dict().items()}


def plain_parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by plain name; one that is tied stands under each of its names."""
    wrapped = _wrapped_paths(model)
    return {_plain_name(name, wrapped): weight for name, weight in model.named_parameters(remove_duplicate=False)}


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict holds, by plain name; one that is shared stands under each of its names."""
    wrapped = _wrapped_paths(model)
    return {
        _plain_name(f"{path}.{name}".removeprefix("."), wrapped): buffer
        for path, module in model.named_modules(remove_duplicate=False)
        for name, buffer in buffers_of(module).items()
        if buffer is not None and is_saved(module, name)
    }


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> State:
    """Return an optimizer's state: its class, `state` by parameter name, `param_groups` with names; nothing is copied.

    What its own `state_dict` adds, such as the slow weights of Lookahead, is in `added`.
    """
    try:
        names = _parameter_names(model, optimizer)
    except KeyError:
        _require_parameters_of(model, optimizer, type(optimizer).__name__)
        raise
    state = optimizer.state_dict()
    unknown = [key for key in state["state"] if key not in range(len(names))]
    if unknown:
        got = f"entries that belong to no parameter: {', '.join(map(repr, unknown))}"
        expected, do = "state by parameter, as torch.optim keeps it", "keep them in the module's `state_dict`"
        raise CheckpointError(explain(f"the state of {type(optimizer).__name__}", got, expected, do))
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
    entries = {names[index]: entry for index, entry in state["state"].items()}
    added = {key: entry for key, entry in state.items() if key not in ("state", "param_groups")}
    kept = {"class": _class_of(optimizer), "state": entries, "param_groups": groups}
    return {**kept, "added": added} if added else kept


def restore_model(model: nn.Module, state: State) -> None:
    """Give the model a state as `model_state` returns it; what is not in it stays as it is."""
    wrapped = _wrapped_paths(model)
    names = {key: _plain_name(key, wrapped) for key in model.state_dict()}
    expanded = {name: buffer for name, buffer in kept_buffers(model).items() if is_expanded(buffer)}
    loaded = {key: state[name] for key, name in names.items() if name in state and name not in expanded}
    model.load_state_dict(loaded, strict=False)
    for name in expanded.keys() & state.keys():
        write_into(expanded[name], state[name])


def restore_optimizer(model: nn.Module, optimizer: Optimizer, state: State) -> None:
    """Give the optimizer a state as `optimizer_state` returns it, with the groups that were added during the run."""
    if state["class"] != _class_of(optimizer):
        raise _other_groups(optimizer, f"{_class_of(optimizer)}; the checkpoint's is {state['class']}")
    _add_later_groups(model, optimizer, state["param_groups"][len(optimizer.param_groups) :])
    names = _parameter_names(model, optimizer)
    groups = optimizer.state_dict()["param_groups"]
    _require_same_groups(
        optimizer,
        [[names[index] for index in group["params"]] for group in groups],
        [group["params"] for group in state["param_groups"]],
    )
    indices = {name: index for index, name in enumerate(names)}
    optimizer.load_state_dict(
        {
            **state.get("added", {}),
            "state": {indices[name]: entry for name, entry in state["state"].items()},
            "param_groups": [
                {**saved, "params": group["params"]} for saved, group in zip(state["param_groups"], groups, strict=True)
            ],
        }
    )
    _restore_dtypes(optimizer, names, state["state"])


def _class_of(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class, or the names of those that it chains."""
    return str(getattr(optimizer, "class_names", type(optimizer).__qualname__))


def _add_later_groups(model: nn.Module, optimizer: Optimizer, groups: Sequence[State]) -> None:
    """Add the groups that `Optimizer.add_param_group` made during the run, for layers that were unfrozen."""
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    named = plain_parameter_names(model)
    for group in groups:
        parameters = [named[name] for name in group["params"] if name in named]
        if len(parameters) < len(group["params"]) or not held.isdisjoint(parameters):
            return  # they are others, which is an error
        optimizer.add_param_group({**group, "params": parameters})


def _require_parameters_of(model: nn.Module, optimizer: Optimizer, where: str) -> None:
    known = set(model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        unknown = [tuple(parameter.shape) for parameter in group["params"] if parameter not in known]
        if unknown:
            message = explain(
                f"{where}, param_groups[{number}]",
                f"{len(unknown)} parameters that the model does not have, of shapes {unknown[:3]}",
                "parameters of the model: only those are saved and loaded",
                "make the module that owns them a submodule of `self.model`; during a run keep its layers, and change "
                "their values instead (layer.reset_parameters(), layer.load_state_dict(...))",
            )
            raise ModuleContractError(message)


def _wrapped_paths(model: nn.Module) -> set[str]:
    """Return the paths of modules that stand inside a wrapper, whose last part is no part of a plain name."""
    paths = set()
    for path, module in model.named_modules(remove_duplicate=False):
        inner = "module" if isinstance(module, DistributedDataParallel) else "_orig_mod"  # the latter: torch.compile
        if inner in children_of(module):
            paths.add(f"{path}.{inner}".removeprefix("."))
    return paths


def _plain_name(key: str, wrapped: set[str]) -> str:
    if not wrapped:
        return key
    parts = key.split(".")
    return ".".join(part for end, part in enumerate(parts, 1) if ".".join(parts[:end]) not in wrapped)


def _parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the plain name of each parameter, in the order in which the optimizer numbers them."""
    wrapped = _wrapped_paths(model)
    names = {parameter: _plain_name(name, wrapped) for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _require_same_groups(optimizer: Optimizer, got: list[list[str]], saved: list[list[str]]) -> None:
    for number, (ours, theirs) in enumerate(zip(got, saved, strict=False)):
        if set(ours) != set(theirs):
            odd = sorted(set(ours) ^ set(theirs))
            raise _other_groups(optimizer, f"other parameters in group {number}: {', '.join(odd[:5])} (of {len(odd)})")
    if len(got) != len(saved):
        raise _other_groups(optimizer, f"{len(got)} parameter groups, {len(saved)} in the checkpoint")


def _other_groups(optimizer: Optimizer, got: str) -> CheckpointError:
    expected = "the optimizer that was saved, with its parameter groups"
    do = "build it as in the run that saved, or start with a new one: `reset_optimizer_on_resume=True`"
    return CheckpointError(explain(type(optimizer).__name__, got, expected, do))


def _restore_dtypes(optimizer: Optimizer, names: list[str], saved: State) -> None:
    """Undo a conversion: `Optimizer.load_state_dict` rounds float32 state of bfloat16 parameters to bfloat16.

    Source: `Optimizer._process_value_according_to_param_policy` in torch/optim/optimizer.py.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        for key, value in saved.get(name, {}).items():
            if isinstance(value, Tensor) and optimizer.state[parameter][key].dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(parameter.device)
