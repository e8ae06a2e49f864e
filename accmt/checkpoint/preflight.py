"""Tests saving and loading in memory, before a run depends on it.

The state that a checkpoint would hold of a model is copied, the model is overwritten, and the copy is loaded as on
resume. A weight that is not restored bit for bit is missing from checkpoints, or cannot be loaded from them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accmt.checkpoint.frozen import find_frozen
from accmt.checkpoint.state_dicts import (
    State,
    decode,
    encode,
    join_tensors,
    kept_buffers,
    local_part,
    model_state,
    optimizer_state,
    plain_parameter_names,
    plain_parts,
    restore_model,
    restore_optimizer,
    split_tensors,
)
from accmt.errors import CheckpointError, explain
from accmt.libraries.private_names import twin_of
from accmt.messages import warn
from accmt.sharded_tensors import is_expanded

_ROOM = 256 * 2**20
_SHOWN = 5
_PARTS_OF_OPTIMIZERS = ("state", "param_groups", "defaults")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def try_model(model: nn.Module) -> None:
    """Check that everything in the model is restored bit for bit from its checkpoint state.

    Weights that training does not write are not written here either: they may be mapped read-only from a file, or be
    views of other memory. Frozen weights and buffers are replaced by copies during the test.

    Memory: copies of the trainable weights, like their gradients, or 256 MiB with buffers and frozen weights.
    """
    left_out = find_frozen(model)
    kept = {name: tensor for name, tensor in _tensors_of(model).items() if name not in left_out}
    for name, tensor in kept.items():  # without data to store, or parameters that cannot be written in place
        is_fixed = tensor.requires_grad and is_expanded(local_part(tensor))
        if tensor.is_meta or tensor.layout != torch.strided or is_fixed:
            raise _failure(name, f"a tensor that is expanded, sparse, or without data ({tensor.layout})")
    tried = _choose(kept)
    # Training leaves the memory of these to the model, so that another tensor can replace it.
    replaced = {
        name: tensor
        for name, tensor in tried.items()
        if not tensor.requires_grad and type(tensor) in (Tensor, nn.Parameter) and not tensor.is_inference()
    }
    own = {id(tensor): tensor.detach() for tensor in replaced.values()}
    live = {name: plain_parts(local_part(tensor)) for name, tensor in tried.items() if name not in replaced}
    copies = {name: [part.detach().clone() for part in parts] for name, parts in live.items()}
    copies |= {name: [own[id(tensor)]] for name, tensor in replaced.items()}
    untried = {_storage(part) for name in kept.keys() - tried.keys() for part in plain_parts(local_part(kept[name]))}
    tensors, rest = split_tensors({name: entry for name, entry in model_state(model).items() if name not in left_out})
    text = encode(rest, "the state of the model")
    copied = {
        name: entry if _storage(local_part(entry)) in untried else _as_read(entry) for name, entry in tensors.items()
    }
    try:
        for tensor in replaced.values():
            inverted = _bits(own[id(tensor)].clone(memory_format=torch.contiguous_format)).bitwise_not_()
            tensor.data = inverted.view(tensor.dtype)
        inverted_memory = set()
        for part in (part for parts in live.values() for part in parts):
            if part.numel() and part.data_ptr() not in inverted_memory:  # tensors may share it
                inverted_memory.add(part.data_ptr())
                _bits(part).bitwise_not_()
        _load(model, join_tensors(copied, decode(text)))
        now = _tensors_of(model)
        lost = [name for name in tried if name not in now or not _has_bits(now[name], copies[name])]
        if lost:
            got = f"{len(lost)} of its weights and buffers are not restored: {', '.join(lost[:_SHOWN])}"
            raise _failure("the model's `state_dict` and `load_state_dict`", got)
        others = [name for name, tensor in tried.items() if tensor.requires_grad and now[name] is not tensor]
        if others:
            got = f"parameters are replaced, so the optimizer would train the old ones: {', '.join(others[:_SHOWN])}"
            raise _failure("the model's `load_state_dict`", got)
    finally:
        _put_back(live, copies)
        for tensor in replaced.values():
            tensor.data = own[id(tensor)]


def try_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Check that an optimizer's state, once it exists, is restored with its bits and types.

    Among parameters with the same kind of state, only the smallest is tested, on another instance of the optimizer.
    """
    state = optimizer_state(model, optimizer)
    _require_nothing_left_out(optimizer, state)
    smallest: dict[str, str] = {}  # parameter by kind of state
    for name, entry in sorted(state["state"].items(), key=lambda item: _size_of(item[1])):
        smallest.setdefault(_kind_of(entry), name)
    state["state"] = {name: state["state"][name] for name in smallest.values()}
    tensors, rest = split_tensors(state)
    copied = {name: _as_read(tensor) for name, tensor in tensors.items()}
    loaded = join_tensors(copied, decode(encode(rest, f"the state of {type(optimizer).__name__}")))
    twin = twin_of(optimizer)
    try:
        restore_optimizer(model, twin, loaded)
    except CheckpointError:
        raise
    except Exception as error:
        raise _failure(f"`{type(optimizer).__name__}.load_state_dict`", f"{type(error).__name__}: {error}") from error
    returned = optimizer_state(model, twin)
    faults = list(_differences(state, returned, ""))
    if faults:
        got = f"{len(faults)} entries change on load: {'; '.join(faults[:_SHOWN])}"
        raise _failure(f"the state of {type(optimizer).__name__}", got)


def _require_nothing_left_out(optimizer: Optimizer, state: State) -> None:
    """Reject an optimizer whose state omits the state of another optimizer inside it.

    Copies of the weights in an attribute only cause a warning: they may matter within one step only. A `state_dict`
    that adds its own entries is trusted to be complete.
    """
    if "added" in state:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = {id(tensor) for tensor in (*parameters, *_tensors_in(state))}
    where = f"`{type(optimizer).__name__}.state_dict`"
    for name, value in vars(optimizer).items():
        if name in _PARTS_OF_OPTIMIZERS:
            continue
        inner = value if isinstance(value, Optimizer) else None
        left_out = [one for one in _tensors_in(dict(inner.state) if inner else value) if id(one) not in kept]
        if inner and left_out:
            got = f"it leaves out the state of the optimizer in its attribute `{name}` ({type(inner).__name__})"
            raise _failure(where, got)
        if left_out and sorted(one.shape for one in left_out) == sorted(one.shape for one in parameters):
            what = f"{where} omits the tensors in `{name}`, which have the shapes of the parameters"
            warn(f"{what}: if steps depend on them, a resumed run continues differently; add them to its `state_dict`")


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in _children(value).values() for tensor in _tensors_in(item)]


def _as_read(tensor: Tensor) -> Tensor:
    """Return a copy as a file reader would return it: a plain tensor."""
    return tensor.clone() if isinstance(tensor, DTensor) else tensor.as_subclass(Tensor).clone()


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**plain_parameter_names(model), **kept_buffers(model)}


def _choose(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    trained = {name: tensor for name, tensor in kept.items() if tensor.requires_grad}
    room = max(0, _ROOM - sum(local_part(tensor).nbytes for tensor in trained.values()))
    chosen = dict(trained)
    for name, tensor in kept.items():
        size = local_part(tensor).nbytes
        if name not in chosen and size <= room:
            chosen[name] = tensor
            room -= size
    return chosen


def _put_back(live: Mapping[str, list[Tensor]], copies: Mapping[str, list[Tensor]]) -> None:
    for name, parts in live.items():
        for part, copied in zip(parts, copies[name], strict=True):
            _bits(part).copy_(_bits(copied))


def _load(model: nn.Module, state: State) -> None:
    try:
        restore_model(model, state)
    except Exception as error:
        raise _failure("the model's `load_state_dict`", f"{type(error).__name__}: {error}") from error


def _has_bits(tensor: Tensor, copies: list[Tensor]) -> bool:
    parts = plain_parts(local_part(tensor))
    return len(parts) == len(copies) and all(
        one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other.to(one.device)))
        for one, other in zip(parts, copies, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _size_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return local_part(value).numel()
    return sum(map(_size_of, _children(value).values()))


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{type(value)} {value.dtype} {value.dim()}"
    return f"{type(value)} " + ", ".join(f"{key}: {_kind_of(item)}" for key, item in _children(value).items())


def _children(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if isinstance(value, list | tuple) else {}


def _differences(saved: Any, loaded: Any, path: str) -> Iterator[str]:
    expected, got = _type_of(saved), _type_of(loaded)
    if expected is not got:
        yield f"{path} as {_name(got)} instead of {_name(expected)}"
    elif isinstance(saved, Tensor):
        if saved.dtype != loaded.dtype:
            yield f"{path} as {loaded.dtype}"
        elif not _has_bits(loaded, plain_parts(local_part(saved))):
            yield f"{path} with other values"
    elif isinstance(saved, dict | list | tuple):
        items, others = _children(saved), _children(loaded)
        if items.keys() != others.keys():
            yield f"{path} with other entries"
            return
        for key, item in items.items():
            yield from _differences(item, others[key], f"{path}.{key}".removeprefix("."))
    else:
        is_nan = isinstance(saved, float) and math.isnan(saved) and math.isnan(loaded)
        if not (is_nan or bool(saved == loaded)):
            yield f"{path} as {loaded!r} instead of {saved!r}"


def _type_of(value: Any) -> type:
    """Return a value's type, where types that a checkpoint converts by design count as equal."""
    value = value.item() if isinstance(value, np.generic) else value
    kinds: dict[type, type] = {OrderedDict: dict, nn.Parameter: Tensor}
    return kinds.get(type(value), type(value))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _failure(where: str, got: str) -> CheckpointError:
    expected = "a state that is saved and loaded unchanged, so that a run can resume from a checkpoint"
    do = "fix the named entries, or train without checkpoints (`checkpoint_every=None`)"
    return CheckpointError(explain(where, got, expected, do))
