"""Splits a nested state into its tensors and its structure, which is stored as typed JSON, and joins them again."""

from __future__ import annotations

import copy
import functools
import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accmt.errors import CheckpointCorruptError, CheckpointError, ModuleContractError, fail
from accmt.libraries.private_names import buffers_of, is_saved, is_traceable_wrapper_subclass, tree_leaves
from accmt.options.optimizer_and_scheduler_arguments import state_of, weights_of
from accmt.sharded_tensors import is_expanded, write_into

# ---- JSON that preserves the exact type and bits of every value, and never executes anything when read.
#
# Values that JSON cannot represent are written as an object with one key that starts with `$`:
#
# | value | written as |
# |---|---|
# | `(1, 2)` | `{"$tuple": [1, 2]}` |
# | `{0: "a"}`, or a dict with a key that starts with `$` | `{"$dict": [[0, "a"]]}` |
# | `Counter({3: 1})`, as `MultiStepLR` keeps | `{"$counter": [[3, 1]]}` |
# | `{1, 2}`, `frozenset({1})`, `deque([1], 3)` | `{"$set": [1, 2]}`, `{"$frozenset": [1]}`, `{"$deque": [[1], 3]}` |
# | a named tuple, a member of an enum | `{"$namedtuple": ["replay:Step", [0.5, 1]]}`, `{"$enum": [..., "LATE"]}` |
# | `OrderedDict(a=1)`, `defaultdict(list)` | `{"$ordered": [["a", 1]]}`, `{"$defaultdict": ["builtins:list", []]}` |
# | `b"a"`, `1j`, `np.float32(0.5)` | `{"$bytes": "61"}`, `{"$complex": "1j"}`, `{"$scalar": ["<f4", 0.5]}` |
# | a NumPy array, stored as a tensor of bytes | `{"$array": {"content": ..., "dtype": "<f4", "shape": ...}}` |
# | `inf`, `-inf`, `nan` | `{"$float": "inf"}` |
# | an int of more than 53 bits, which other readers would round | `{"$int": "0x20000000000001"}` |
# | a tensor, stored elsewhere under a name | `{"$tensor": "model.weight"}` |
# | a tensor subclass that wraps other tensors | `{"$wrapped": {"kind": "torchao...", "parts": ...}}` |
# | `torch.Size([2])`, `torch.float32` | `{"$size": [2]}`, `{"$dtype": "float32"}` |
#
# None, booleans, strings, lists, other floats (in their shortest exact form) and ints are written as plain JSON.


_EXACT_BITS = 53


@dataclass(frozen=True)
class TensorReference:
    """Placeholder in a state for a tensor that is stored elsewhere."""

    name: str


@dataclass(frozen=True)
class WrappedTensor:
    """Placeholder in a state for a tensor subclass that wraps other tensors, such as a quantized tensor.

    Attributes:
        kind: The subclass: its module and name.
        context: Everything but the inner tensors, as returned by `__tensor_flatten__`.
    """

    kind: str
    parts: dict[str, Any]
    context: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ArrayContent:
    """A NumPy array in a state.

    Attributes:
        content: Its bytes.
        dtype: Its dtype, as `np.lib.format.dtype_to_descr` returns it.
    """

    content: Any
    dtype: Any
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: np.ndarray[Any, Any]) -> ArrayContent:
        """Return a copy of an array's content."""
        content = torch.empty(0, dtype=torch.uint8)
        if array.nbytes:  # `torch.frombuffer` rejects an empty buffer
            content = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
        return cls(content, np.lib.format.dtype_to_descr(array.dtype), array.shape)

    def to_array(self) -> np.ndarray[Any, Any]:
        dtype = np.lib.format.descr_to_dtype(self.dtype)
        return np.frombuffer(self.content.numpy().tobytes(), dtype).reshape(self.shape).copy()


def encode(value: Any, where: str = "state") -> str:
    """Encode a value as typed JSON; `where` names it in error messages. An `OrderedDict` is read back as a dict."""
    return json.dumps(_to_json(value, where), allow_nan=False)


def decode(text: str) -> Any:
    """Decode the output of `encode`.

    Raises:
        CheckpointCorruptError: `text` is not valid JSON.
        CheckpointError: `text` contains a mark unknown to this version.
    """
    try:
        return json.loads(text, object_hook=_unmark)
    except json.JSONDecodeError as error:
        got, do = f"invalid JSON: {error}", "resume from another checkpoint"
        raise fail(CheckpointCorruptError, "a checkpoint's state", got=got, expected="typed JSON", do=do) from error


def _to_json(value: Any, where: str) -> Any:
    write = _WRITERS.get(type(value))
    if write is not None:
        return write(value, where)
    match value:
        case np.generic() if type(value.item()) in (bool, int, float, str):
            return {"$scalar": [value.dtype.str, _to_json(value.item(), where)]}
        case Enum() if value.name in type(value).__members__:  # a combination of flags is no member
            return {"$enum": [describe_kind(type(value)), value.name]}
        case tuple() if is_namedtuple(type(value)):
            return {"$namedtuple": [describe_kind(type(value)), _write_list(value, where)]}
    raise _cannot_store(where, value)


def _cannot_store(where: str, value: Any) -> CheckpointError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return fail(
        CheckpointError,
        where,
        got=f"a {kind}, which cannot be stored",
        expected="None, numbers, strings, bytes, tensors, NumPy arrays, and lists, tuples, named tuples, dicts, sets "
        "and deques of them (no subclasses)",
        do="convert it in `state_dict` (float(x), list(x), torch.as_tensor(x)) and back in `load_state_dict`",
    )


def _write_list(value: Iterable[Any], where: str) -> list[Any]:
    if set(map(type, value)) <= _PLAIN:  # a long list of strings or flags, in a hundredth of the time
        return list(value)
    return [_to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]


def _write_pairs(value: dict[Any, Any], where: str) -> list[Any]:
    pairs = []
    for key, item in value.items():
        pairs.append([_to_json(key, f"a key of {where}: {key!r}"), _to_json(item, where)])
    return pairs


def _write_counter(value: Counter[Any], where: str) -> Any:
    counts = []
    for key, count in value.items():
        counts.append([_to_json(key, where), count])
    return {"$counter": counts}


def _write_defaultdict(value: defaultdict[Any, Any], where: str) -> Any:
    factory: Any = value.default_factory
    # A lambda, or a class defined in a function, could not be found again when the state is read.
    if factory is not None and not (isinstance(factory, type) and find_kind(describe_kind(factory)) is factory):
        raise _cannot_store(f"the default of {where}", factory)
    return {"$defaultdict": [factory and describe_kind(factory), _write_pairs(value, where)]}


def _write_set(value: Iterable[Any], where: str) -> list[Any]:
    return sorted(_write_list(value, where), key=json.dumps)  # the order of a set differs between processes


def _write_dict(value: dict[Any, Any], where: str) -> Any:
    items = {key: _to_json(item, f"{where}.{key}") for key, item in value.items()}
    if all(type(key) is str and not key.startswith("$") for key in items):
        return items
    keys = [_to_json(key, f"a key of {where}: {key!r}") for key in items]
    return {"$dict": list(zip(keys, items.values(), strict=True))}


_PLAIN = frozenset({bool, str, type(None)})

# Keyed by exact type: a value of a subclass would be read back as its base class.
_WRITERS: dict[type, Callable[[Any, str], Any]] = {
    type(None): lambda value, where: value,
    bool: lambda value, where: value,
    str: lambda value, where: value,
    int: lambda value, where: value if value.bit_length() <= _EXACT_BITS else {"$int": hex(value)},
    float: lambda value, where: value if math.isfinite(value) else {"$float": repr(value)},
    list: _write_list,
    tuple: lambda value, where: {"$tuple": _write_list(value, where)},
    dict: _write_dict,
    OrderedDict: lambda value, where: {"$ordered": _write_pairs(value, where)},
    defaultdict: _write_defaultdict,
    set: lambda value, where: {"$set": _write_set(value, where)},
    frozenset: lambda value, where: {"$frozenset": _write_set(value, where)},
    deque: lambda value, where: {"$deque": [_write_list(value, where), value.maxlen]},
    bytes: lambda value, where: {"$bytes": value.hex()},
    complex: lambda value, where: {"$complex": repr(value)},
    ArrayContent: lambda value, where: {"$array": _write_dict(vars(value), where)},
    Counter: _write_counter,
    TensorReference: lambda value, where: {"$tensor": value.name},
    WrappedTensor: lambda value, where: {"$wrapped": _write_dict(vars(value), where)},
    torch.Size: lambda value, where: {"$size": list(value)},
    torch.dtype: lambda value, where: {"$dtype": str(value).removeprefix("torch.")},
}

_READERS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda text: int(text, 16),
    "$float": float,
    "$tuple": tuple,
    "$dict": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$ordered": lambda pairs: OrderedDict(pairs),
    "$defaultdict": lambda parts: defaultdict(parts[0] and _find_saved_kind(parts[0]), parts[1]),
    "$enum": lambda parts: _find_saved_kind(parts[0])[parts[1]],
    "$set": set,
    "$frozenset": frozenset,
    "$deque": lambda parts: deque(*parts),
    "$bytes": bytes.fromhex,
    "$complex": complex,
    "$scalar": lambda parts: np.dtype(parts[0]).type(parts[1]),
    "$array": lambda fields: ArrayContent(**fields),
    "$namedtuple": lambda parts: _find_saved_kind(parts[0])._make(parts[1]),
    "$tensor": TensorReference,
    "$wrapped": lambda fields: WrappedTensor(**fields),
    "$size": torch.Size,
    "$dtype": lambda name: getattr(torch, name),
}


def _unmark(value: dict[str, Any]) -> Any:
    mark = next(iter(value), "")
    if not mark.startswith("$"):
        return value
    if mark not in _READERS:  # written by a newer accmt
        got = f"the mark {mark!r}, which this version of accmt does not know"
        do = "load it with the version of accmt that wrote it (see manifest.json)"
        raise fail(CheckpointError, "a checkpoint's state", got=got, expected=f"one of {', '.join(_READERS)}", do=do)
    return _READERS[mark](value[mark])


def is_namedtuple(kind: Any) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_make")


def _find_saved_kind(description: str) -> Any:
    kind = find_kind(description)
    if kind is None:
        got, module = f"{description}, which is not defined", description.partition(":")[0]
        do = f"define it at the top level of {module}, and import that module before fit"
        raise fail(CheckpointError, "a value of the checkpoint", got=got, expected="the class that was saved", do=do)
    return kind


# ---- The states of model and optimizers by the parameters' plain names, independent of wrappers.
#
# `torch.distributed.checkpoint.state_dict` supports more wrappers, but it steps an optimizer that has no state yet
# (which leaves momentum buffers behind), misses the second name of a module that appears twice in a wrapped model, and
# takes several times as long while training waits.


State = dict[str, Any]
T = TypeVar("T")


def require_known(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Check that every tensor of model and optimizers has a plain name."""
    # FSDP version 1 flattens parameters: their names and shapes would depend on the number of processes.
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        got, do = "a model sharded by FSDP version 1", "set `fsdp_version: 2` in Accelerate's configuration"
        raise fail(
            CheckpointError, type(model).__name__, got=got, expected="DDP, or `fully_shard` (FSDP version 2)", do=do
        )
    for index, optimizer in enumerate(optimizers):
        _require_parameters_of(model, optimizer, f"{type(optimizer).__name__} (optimizer {index})")


def model_state(model: nn.Module) -> State:
    """Return the model's state by plain names; the tensors are not copied."""
    return _by_plain_name(model, model.state_dict().items())


def require_complete(model: nn.Module) -> None:
    """Check that a model's `state_dict` leaves out no trained parameter or persistent buffer; it may rename them."""
    tensors: dict[str, Tensor] = {}
    for name, weight in plain_parameter_names(model).items():
        # A `state_dict` may leave out frozen weights: the checkpoint then has their digests (`find_frozen`).
        if weight.requires_grad:
            tensors[name] = weight
    tensors |= persistent_buffers(model)
    state = model_state(model)
    missing = sorted(tensors.keys() - state.keys())
    # By number: a `state_dict` that only renames its entries is complete, and `load_state_dict` knows the names.
    if missing and len(state) < len(tensors):
        got = f"a `state_dict` without {', '.join(missing[:5])} ({len(missing)} of {len(tensors)})"
        expected = "all trained parameters and persistent buffers, so that a run can resume from a checkpoint"
        do = "return them, or train without checkpoints (`checkpoint_every=None`)"
        raise fail(CheckpointError, "self.model", got=got, expected=expected, do=do)


def plain_parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by plain name; a tied parameter is listed under each of its names."""
    return _by_plain_name(model, model.named_parameters(remove_duplicate=False))


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers by plain name; a shared buffer is listed under each of its names."""
    return _buffers(model, is_persistent=True)


def non_persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that the model's `state_dict` leaves out, by plain name, where a file can contain them."""
    return {name: buffer for name, buffer in _buffers(model, is_persistent=False).items() if _is_storable(buffer)}


def _buffers(model: nn.Module, *, is_persistent: bool) -> dict[str, Tensor]:
    wrapped = _wrapped_paths(model)
    buffers = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in buffers_of(module).items():
            if buffer is not None and is_saved(module, name) == is_persistent:
                buffers[_plain_name(f"{path}.{name}".removeprefix("."), wrapped)] = buffer
    return buffers


def restore_non_persistent_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Load buffers returned by `non_persistent_buffers`; training may have registered or resized some."""
    modules = _by_plain_name(model, model.named_modules(remove_duplicate=False))
    for path, value in buffers.items():
        owner, _, name = path.rpartition(".")
        if owner not in modules:  # a layer without weights that training added
            continue
        buffer = buffers_of(modules[owner]).get(name)
        if buffer is not None and buffer.shape == value.shape:
            write_into(buffer, value)
        elif buffer is not None or not hasattr(modules[owner], name):  # never over a plain attribute
            weight = next(model.parameters(), value)
            modules[owner].register_buffer(name, value.to(weight.device), persistent=False)


def optimizer_state(model: nn.Module, optimizer: Any) -> State:
    """Return an optimizer's state; nothing is copied.

    A `state_dict` in the form of `torch.optim` becomes `state` by parameter name, `param_groups` with names, and other
    entries in `added`. Any other one, such as the nested one of an optimizer around another one, is kept as it is, in
    `whole`. The states of optimizers in attributes that `state_dict` leaves out, such as the momentum of a SAM's base,
    are in `inner`.
    """
    try:
        names = _parameter_names(model, optimizer)
    except KeyError:
        _require_parameters_of(model, optimizer, type(optimizer).__name__)
        raise
    # The `state_dict` of torch's ZeroRedundancyOptimizer is an error on all processes but the one that consolidated it.
    if hasattr(optimizer, "consolidate_state_dict"):
        got, expected = "an optimizer whose state is spread over the processes", "an optimizer with its whole state"
        do = (
            "use FSDP2, which shards the optimizer too: accmt launch --strat fsdp2, with the inner optimizer; or train "
        )
        do += "without checkpoints: Trainer(checkpoint_every=None)"
        raise fail(CheckpointError, type(optimizer).__name__, got=got, expected=expected, do=do)
    state = optimizer.state_dict()
    saved: State = {"class": class_name_of(optimizer), "state": {}, "param_groups": []}
    if _is_by_index(state, len(names)):
        for group in state["param_groups"]:
            group_names = [names[index] for index in group["params"]]
            saved["param_groups"].append({**group, "params": group_names})
        saved["state"] = {names[index]: entry for index, entry in state["state"].items()}
        added = dict(state)
        del added["state"], added["param_groups"]
        if added:
            saved["added"] = added
    else:
        saved["whole"] = state
        _require_no_shards(optimizer, state)
    # Lookahead's `state_dict` contains that of the optimizer inside, SAM's does not: what is missing is saved here.
    inner = _inner_optimizers(optimizer)
    stored: set[int] = set()
    if inner:
        stored.update(map(id, _tensors_in(state)))
    for name, part in inner.items():
        part_state = optimizer_state(model, part)
        if not stored.issuperset(map(id, _tensors_in(part_state))):
            saved.setdefault("inner", {})[name] = part_state
    return saved


def with_inner(state: State) -> Iterator[State]:
    """Yield a state returned by `optimizer_state`, and those of the optimizers inside."""
    yield state
    for part in state.get("inner", {}).values():
        yield from with_inner(part)


def _is_by_index(state: State, num_parameters: int) -> bool:
    """Return whether a `state_dict` has the form of `torch.optim`: by the parameters' indices."""
    if not isinstance(state.get("state"), dict) or "param_groups" not in state:
        return False
    indices: list[Any] = []
    for group in state["param_groups"]:
        indices += group["params"]
    return sorted(indices) == list(range(num_parameters)) and set(state["state"]) <= set(indices)


def _inner_optimizers(optimizer: Any) -> dict[str, Optimizer]:
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, Optimizer)}


def _tensors_in(state: State) -> list[Tensor]:
    return [value for value in tree_leaves(state) if isinstance(value, Tensor)]


def _require_no_shards(optimizer: Any, state: State) -> None:
    """Reject shards in a state whose parameters are unknown: they could not be loaded as shards again."""
    # The files have them in full, and nothing here says which parameter's shards each of them is like.
    if any(isinstance(value, DTensor) for value in _tensors_in(state)):
        got = "a `state_dict` in another form than that of torch.optim, with sharded tensors"
        do = "use the optimizer inside it alone; or launch with `accmt launch --strat ddp`"
        expected = "`state` by the parameters' indices, and `param_groups`"
        raise fail(CheckpointError, type(optimizer).__name__, got=got, expected=expected, do=do)


def restore_model(model: nn.Module, state: State) -> None:
    """Load a state returned by `model_state`; entries that it lacks stay unchanged."""
    wrapped = _wrapped_paths(model)
    expanded = {name: buffer for name, buffer in persistent_buffers(model).items() if is_expanded(buffer)}
    loaded = {}
    for key in model.state_dict():
        name = _plain_name(key, wrapped)
        # torch refuses to copy into an expanded tensor, whose elements share memory.
        if name in state and name not in expanded:
            loaded[key] = state[name]
    model.load_state_dict(loaded, strict=False)
    for name in expanded.keys() & state.keys():
        write_into(expanded[name], state[name])


def restore_optimizer(model: nn.Module, optimizer: Any, state: State) -> None:
    """Load a state returned by `optimizer_state`, including groups that were added during the run."""
    # torch may load the state of another class without an error.
    if state["class"] != class_name_of(optimizer):
        raise _different_groups(optimizer, f"{class_name_of(optimizer)}; the checkpoint's is {state['class']}")
    inner = _inner_optimizers(optimizer)
    groups_before: list[tuple[Any, list[Any], list[Any]]] = []
    if inner:
        for member in (*inner.values(), optimizer):
            groups_before.append((member, member.param_groups, list(member.param_groups)))
    for name, part in state.get("inner", {}).items():
        if name not in inner:  # without this, its momentum would be lost silently
            raise _different_groups(optimizer, f"no optimizer in its attribute `{name}`, as in the checkpoint")
        restore_optimizer(model, inner[name], part)
    if "whole" in state:
        optimizer.load_state_dict(state["whole"])
    else:
        _restore_by_name(model, optimizer, state)
    for part, groups, before in groups_before:
        _load_groups_into(part, groups, before)


def _load_groups_into(optimizer: Any, groups: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """Let an optimizer have the objects again that it had as `param_groups` before a state was loaded.

    torch replaces them. An optimizer and the one inside it would then have groups of their own, and a scheduler would
    reach only those that do not step.

    Source: the end of `Optimizer.load_state_dict` in torch/optim/optimizer.py of torch 2.13.
    """
    loaded = optimizer.param_groups
    # An optimizer with a `load_state_dict` of its own may have changed the list in place.
    if loaded is groups:
        return
    for group, values in zip(before, loaded, strict=False):
        if group is not values:
            group.clear()
            group.update(values)
    groups[:] = [*before, *loaded[len(before) :]]
    optimizer.param_groups = groups


def _restore_by_name(model: nn.Module, optimizer: Any, state: State) -> None:
    # Add the groups that `Optimizer.add_param_group` created during the run, for layers that were unfrozen.
    optimized = set(weights_of(optimizer))
    named = plain_parameter_names(model)
    for group in state["param_groups"][len(optimizer.param_groups) :]:
        unfrozen = [named[name] for name in group["params"] if name in named]
        if len(unfrozen) < len(group["params"]) or not optimized.isdisjoint(unfrozen):
            break  # other parameters, which raises an error below
        optimizer.add_param_group({**group, "params": unfrozen})
    names = _parameter_names(model, optimizer)
    groups = optimizer.state_dict()["param_groups"]
    saved_groups = state["param_groups"]
    for number, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=False)):
        group_names = {names[index] for index in group["params"]}
        different = sorted(group_names ^ set(saved_group["params"]))
        if different:
            listed = f"{', '.join(different[:5])} (of {len(different)})"
            raise _different_groups(optimizer, f"other parameters in group {number}: {listed}")
    if len(groups) != len(saved_groups):
        raise _different_groups(optimizer, f"{len(groups)} parameter groups, {len(saved_groups)} in the checkpoint")
    indices = dict(zip(names, range(len(names)), strict=True))
    by_index = {indices[name]: entry for name, entry in state["state"].items()}
    loaded_groups = []
    for saved_group, group in zip(saved_groups, groups, strict=True):
        loaded_groups.append({**saved_group, "params": group["params"]})
    optimizer.load_state_dict({**state.get("added", {}), "state": by_index, "param_groups": loaded_groups})
    # Undo a conversion: `Optimizer.load_state_dict` rounds float32 state of bfloat16 parameters to bfloat16.
    # Source: `Optimizer._process_value_according_to_param_policy` in torch/optim/optimizer.py.
    for name, parameter in zip(names, weights_of(optimizer), strict=True):
        loaded = state_of(optimizer).get(parameter, {})
        for key, value in state["state"].get(name, {}).items():
            if isinstance(value, Tensor) and key in loaded and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(parameter.device)


def class_name_of(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class, or the names of the chained classes."""
    return str(getattr(optimizer, "class_names", type(optimizer).__qualname__))


def _require_parameters_of(model: nn.Module, optimizer: Optimizer, where: str) -> None:
    known = set(model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        unknown = [tuple(parameter.shape) for parameter in group["params"] if parameter not in known]
        if unknown:  # such as a layer that was replaced after the optimizer was built
            raise fail(
                ModuleContractError,
                f"{where}, param_groups[{number}]",
                got=f"{len(unknown)} parameters that the model does not have, of shapes {unknown[:3]}",
                expected="parameters of the model: only those are saved and loaded",
                do="make the module that owns them a submodule of `self.model`; during a run keep its layers, and "
                "change their values instead (layer.reset_parameters(), layer.load_state_dict(...))",
            )


def _wrapped_paths(model: nn.Module) -> set[str]:
    """Return the paths of modules inside a wrapper; their last component is not part of a plain name."""
    paths = set()
    for path, module in model.named_modules(remove_duplicate=False):
        inner = "_orig_mod"  # torch.compile's
        if isinstance(module, DistributedDataParallel):
            inner = "module"
        if inner in dict(module.named_children()):
            paths.add(f"{path}.{inner}".removeprefix("."))
    return paths


def _by_plain_name(model: nn.Module, entries: Iterable[tuple[str, T]]) -> dict[str, T]:
    wrapped = _wrapped_paths(model)
    return {_plain_name(name, wrapped): entry for name, entry in entries}


def _plain_name(key: str, wrapped: set[str]) -> str:
    if not wrapped:
        return key
    plain, path = [], ""
    for part in key.split("."):
        path = f"{path}.{part}".removeprefix(".")
        if path not in wrapped:
            plain.append(part)
    return ".".join(plain)


def _parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the plain name of each parameter, in the optimizer's order."""
    wrapped = _wrapped_paths(model)
    names = {parameter: _plain_name(name, wrapped) for name, parameter in model.named_parameters()}
    return [names[parameter] for parameter in weights_of(optimizer)]


def _different_groups(optimizer: Optimizer, got: str) -> CheckpointError:
    expected = "the same optimizer and parameter groups as in the saved run"
    reset = 'Trainer(checkpoint_options={"reset_optimizer_on_resume": True})'
    do = f"build it as in the saved run, or start with a new optimizer: {reset}"
    return fail(CheckpointError, type(optimizer).__name__, got=got, expected=expected, do=do)


# The dtypes that both safetensors and its reader in torch.distributed.checkpoint support.
STORABLE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64}
)


def split_tensors(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Extract every tensor and NumPy array from a state.

    A tensor's name is the path to it, joined by dots. Tensors that share memory (tied weights) are extracted once.
    Tensor subclasses that wrap other tensors (such as quantized tensors) are split into the inner tensors.

    Returns:
        The tensors by name, and the state with a `TensorReference` or a `WrappedTensor` in place of each.

    Raises:
        CheckpointError: A tensor is sparse, quantized, without data, or of a dtype that safetensors does not support.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}

    def refer(tensor: Any, path: str) -> TensorReference | WrappedTensor | ArrayContent:
        if isinstance(tensor, np.ndarray):
            if tensor.dtype.hasobject or type(tensor) is not np.ndarray:  # a masked array would lose its mask
                raise _cannot_store(path, tensor)
            array = ArrayContent.of(tensor)
            return replace(array, content=refer(array.content, path))
        if has_inner_tensors(tensor):
            return _take_apart(tensor, lambda part, name: map_leaves(part, f"{path}.{name}", Tensor, refer))
        _require_storable(tensor, path)
        memory = _memory_of(tensor)
        if memory not in names:
            name, count = path, 1
            while name in tensors:  # {"a": {"b": x}, "a.b": y} results in the same path twice
                count += 1
                name = f"{path}~{count}"
            names[memory] = name
            tensors[name] = tensor.detach()
        return TensorReference(names[memory])

    return tensors, map_leaves(state, "", (Tensor, np.ndarray), refer)


def join_tensors(tensors: Mapping[str, Tensor], structure: Any) -> Any:
    """Insert the tensors again: the inverse of `split_tensors`.

    Raises:
        CheckpointCorruptError: A tensor that the state refers to is missing.
        CheckpointError: A tensor subclass is unknown because the module that defines it has not been imported.
    """

    def find(reference: Any, path: str) -> Any:
        match reference:
            case ArrayContent():
                return replace(reference, content=find(reference.content, path)).to_array()
            case WrappedTensor():
                return _put_together(reference, join_tensors(tensors, reference.parts))
        if reference.name in tensors:
            return tensors[reference.name]
        got, do = f"no tensor {reference.name!r}", "resume from another checkpoint"
        raise fail(CheckpointCorruptError, path or "state", got=got, expected="the files of one checkpoint", do=do)

    return map_leaves(structure, "", _PLACEHOLDERS, find)


def _put_together(reference: WrappedTensor, parts: Any) -> Any:
    """Return the tensor that wraps these parts: the inverse of `_take_apart`."""
    unflatten = getattr(find_kind(reference.kind), "__tensor_unflatten__", None)
    if unflatten is None:
        got, expected = f"{reference.kind}, which is not imported", "the tensor subclass that was saved"
        do = f"import {reference.kind.partition(':')[0]} (and define it at top level)"
        raise fail(CheckpointError, "a tensor of the checkpoint", got=got, expected=expected, do=do)
    return unflatten(dict(parts), reference.context, torch.Size(reference.size), reference.stride)


def referred_tensors(structure: Any) -> set[str]:
    names: set[str] = set()

    def note(reference: Any, path: str) -> None:
        if isinstance(reference, TensorReference):
            names.add(reference.name)
        else:
            names.update(referred_tensors(vars(reference)))

    map_leaves(structure, "", _PLACEHOLDERS, note)
    return names


def has_inner_tensors(tensor: Tensor) -> bool:
    """Return whether a tensor wraps other tensors and has no memory itself, such as a quantized tensor."""
    if isinstance(tensor, DTensor) or tensor.layout != torch.strided:  # shards, sparse and nested tensors
        return False
    value: object = tensor  # otherwise mypy considers such a subclass impossible
    return is_traceable_wrapper_subclass(value)


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors inside a tensor, or the tensor itself if it is plain."""
    if not has_inner_tensors(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = []
    for name in names:
        parts += plain_parts(getattr(tensor, name))
    return parts


def describe_kind(kind: type) -> str:
    """Return the name of a class in a checkpoint."""
    return f"{kind.__module__}:{kind.__qualname__}"


def find_kind(description: str) -> Any:
    """Return the class of that name; None if it is not imported. No module is imported because a file names it."""
    module, _, path = description.partition(":")
    try:
        return functools.reduce(getattr, path.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return None


def _take_apart(tensor: Tensor, split: Callable[[Tensor, str], Any]) -> WrappedTensor:
    """Return the placeholder for a tensor that wraps others.

    Source: `torch.utils._python_dispatch.is_traceable_wrapper_subclass` describes both halves of the protocol.
    """
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: split(getattr(tensor, name), name) for name in names}
    size, stride = tuple(tensor.size()), tuple(tensor.stride())
    return WrappedTensor(describe_kind(type(tensor)), parts, context, size, stride, tensor.dtype)


_PLACEHOLDERS = (TensorReference, WrappedTensor, ArrayContent)
SIMPLE = frozenset({bool, int, float, str, type(None)})


def map_leaves(state: Any, path: str, kind: type | tuple[type, ...], function: Callable[[Any, str], Any]) -> Any:
    """Return a copy of a state in which a function of each value of a kind, and of its path, has replaced the value.

    It walks through lists, tuples, named tuples, deques and dicts. `torch.utils._pytree` would take twice as long, and
    its paths are not names.
    """
    if type(state) in SIMPLE:  # before `isinstance` with a protocol, which takes as long as all of this
        return state
    begin = f"{path}." if path else ""
    if type(state) in (dict, OrderedDict, defaultdict):
        copied = copy.copy(state)
        for key, item in state.items():
            copied[key] = map_leaves(item, f"{begin}{key}", kind, function)
        return copied
    if type(state) in (list, tuple, deque, set, Counter) and set(map(type, state)) <= SIMPLE:
        return copy.copy(state)
    if type(state) in (list, tuple, deque) or is_namedtuple(type(state)):
        items = [map_leaves(item, f"{begin}{index}", kind, function) for index, item in enumerate(state)]
        if type(state) is deque:
            return deque(items, state.maxlen)
        if is_namedtuple(type(state)):  # whose constructor takes the items one by one
            return type(state)._make(items)
        return type(state)(items)
    return function(state, path) if isinstance(state, kind) else state


def copy_state(state: Any) -> Any:
    """Return a copy of a state, with copies of its tensors and arrays."""

    def copy_content(content: Any, path: str) -> Any:
        if isinstance(content, Tensor):
            return content.detach().clone()
        return content.copy()

    return map_leaves(state, "", (Tensor, np.ndarray), copy_content)


def _memory_of(tensor: Tensor) -> Any:
    local = local_part(tensor)
    # A subclass may have no memory, and all empty tensors have the address 0: they would pass for one tied weight.
    if type(local) not in (Tensor, torch.nn.Parameter) or local.numel() == 0:
        return id(tensor)
    return (local.device, local.data_ptr(), local.dtype, tensor.shape, tensor.stride())


def _is_storable(tensor: Tensor) -> bool:
    is_dense = tensor.layout == torch.strided and tensor.dtype in STORABLE
    if not is_dense or tensor.is_meta or tensor.is_nested:  # a nested tensor may be strided but has no shape
        return False
    return not (isinstance(tensor, DTensor) and has_inner_tensors(tensor.to_local()))


def _require_storable(tensor: Tensor, path: str) -> None:
    if _is_storable(tensor):
        return
    kind = "nested tensor" if tensor.is_nested else "tensor"
    raise fail(
        CheckpointError,
        path or "state",
        got=f"a {kind} ({tensor.dtype}, {tensor.layout}, on {tensor.device}), which cannot be stored",
        expected=f"a dense tensor with data, of {', '.join(sorted(map(str, STORABLE)))}",
        do="convert it in `state_dict`, or exclude it from the state (a buffer: `persistent=False`)",
    )
