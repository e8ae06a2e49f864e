"""The attributes of the user's module and callbacks, such as a queue, a counter or a moving average of the model.

accmt neither trains nor moves them. But what training changes in them belongs to the checkpoint: otherwise, a resumed
run would continue with the values that the constructor sets.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from accmt.callbacks import Callback, MainProcessCallback
from accmt.checkpoint.frozen import checksum
from accmt.checkpoint.state_dicts import split_tensors
from accmt.checkpoint.typed_json import encode
from accmt.errors import CheckpointError, explain
from accmt.libraries.private_names import count_writes, is_made_of_tensors
from accmt.messages import warn_once
from accmt.module import OF_RUN
from accmt.sharded_tensors import write_into

_NUMBERS = frozenset({type(None), bool, int, float, str})
_COLLECTIONS = frozenset({list, tuple, dict, OrderedDict, Counter, set, deque})
_MOST_VALUES = 10_000
"""Of a collection that is copied after each step; a longer one is expected to change its length if it changes."""
_NUM_COMPARED = 3
"""Weights of a module whose bits are compared; a moving average changes all of them."""
_LARGEST_OUTPUT = 1 << 24
"""Bytes of a tensor with a graph that is still taken for a state, not for an output kept for a log."""


def name_owners(module: Any, callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Return the objects of a user whose attributes are state: the module, and callbacks without a `state_dict`.

    Callbacks that run only on the main process are left out: processes save and restore the same.
    """
    owners = {"self": module}
    for callback in callbacks:
        kind = type(callback)
        is_own = kind.__module__.startswith("accmt.") or isinstance(callback, MainProcessCallback)
        if not is_own and kind.state_dict is Callback.state_dict:
            number = sum(type(other) is kind for other in owners.values()) + 1
            owners[kind.__name__ if number == 1 else f"{kind.__name__}#{number}"] = callback
    return owners


class Captured(NamedTuple):
    """The attributes after an optimizer step: collections are copies, but tensors and modules are shared."""

    of: Attributes
    values: dict[str, Any]
    writes: dict[str, object]

    def state_dict(self) -> dict[str, Any]:
        """Return what training has changed, as JSON values and tensors."""
        return self.of.describe(self.values)

    def is_outdated(self) -> bool:
        """Return whether a shared value has changed since, or may have."""
        return any(self.of.has_changed(name, self.values[name], writes) for name, writes in self.writes.items())


class Attributes:
    """The attributes of a user's objects during a run, and which of them training has changed.

    Args:
        owners: The objects by the names that they have in a checkpoint.
        model: The model, whose parts are left out.
        device: The device of the run.
    """

    def __init__(self, owners: Mapping[str, Any], model: nn.Module, device: torch.device) -> None:
        self._owners = owners
        self._device = device
        self._of_model = {id(part): part for part in (*model.modules(), *model.parameters(), *model.buffers())}
        self._tensors: dict[int, list[Tensor]] = {}
        self._restored: dict[str, Any] = {}
        self._before: dict[str, tuple[object, object]] | None = None

    def begin(self) -> None:
        """Note the values with which training begins, after restoring those of a checkpoint.

        They have been restored before, but hooks of the start may have set them again.
        """
        self._restore(is_last=True)
        values = self._find()
        self._tensors = {id(value): self._tensors_of(value) for value in values.values()}
        before = {name: (self._fingerprint(value), self._count_writes(value)) for name, value in values.items()}
        self._before = {name: both for name, both in before.items() if name not in self._restored}

    def capture(self) -> Captured:
        """Return the current attributes, without reading a tensor."""
        values, writes = self._find(), {}
        for name, value in values.items():
            if type(value) in _NUMBERS:
                continue
            writes[name] = self._count_writes(value)
            if type(value) in _COLLECTIONS and len(value) <= _MOST_VALUES and not isinstance(value, tuple):
                values[name] = value.copy()
        return Captured(self, values, writes)

    def state_dict(self) -> dict[str, Any]:
        """Return what training has changed, as JSON values and tensors."""
        return self.describe(self._find())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the attributes from `state_dict`."""
        self._restored = state
        self._restore(is_last=False)

    def describe(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the values that training has changed, as JSON values and tensors."""
        if self._before is None:
            return self._restored
        state = {}
        for name, value in values.items():
            if name in self._before and self._fingerprint(value) == self._before[name][0]:
                continue
            if self._is_of_model(value):
                continue
            packed = self._pack(value)
            if packed is not None:
                state[name] = packed
                continue
            what = f"{name} has changed since training began, but a checkpoint cannot contain {_kind(value)}"
            do = "return it from `state_dict` as numbers and tensors, and restore it in load_state_dict"
            warn_once(f"{what}: {do}", about=f"attribute {name}")
        return state

    def has_changed(self, name: str, value: Any, writes: object) -> bool:
        """Return whether a captured value that is shared has changed since, or may have."""
        if self._count_writes(value) != writes:
            return True
        if self._before is None or name not in self._before or not isinstance(value, Tensor | nn.Module):
            return False
        # Writes to `.data` are not counted. If that is how the value changes, its last change may be newer.
        fingerprint, first_writes = self._before[name]
        return writes == first_writes and self._fingerprint(value) != fingerprint

    def _find(self) -> dict[str, Any]:
        found = {}
        for owner, one in self._owners.items():
            for name, value in vars(one).items():
                if name in _LEFT_OUT or id(value) in self._of_model:
                    continue
                if type(value) in _NUMBERS or type(value) in _COLLECTIONS or isinstance(value, _SHARED):
                    found[f"{owner}.{name}"] = value
        return found

    def _is_of_model(self, value: Any) -> bool:
        """Return whether a value is a part of the model, or a collection of some, such as a list of its parameters."""
        if type(value) in _COLLECTIONS:
            return any(map(self._is_of_model, value.values() if isinstance(value, dict) else value))
        return id(value) in self._of_model

    def _named_tensors(self, module: nn.Module) -> dict[str, Tensor]:
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return {name: tensor for name, tensor in named.items() if id(tensor) not in self._of_model}

    def _tensors_of(self, value: Any) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value]
        return list(self._named_tensors(value).values()) if isinstance(value, nn.Module) else []

    def _count_writes(self, value: Any) -> object:
        """Return a value that changes with most writes, without reading a tensor."""
        if type(value) in _COLLECTIONS:
            return len(value)
        if not isinstance(value, Tensor | nn.Module):
            return None
        tensors = self._tensors.get(id(value))
        return [_place(tensor) for tensor in (self._tensors_of(value) if tensors is None else tensors)]

    def _fingerprint(self, value: Any) -> object:
        """Return a value that changes with the attribute."""
        if isinstance(value, nn.Module):
            tensors = self._tensors_of(value)
            return [_place(tensor) for tensor in tensors], [checksum(tensor) for tensor in tensors[:_NUM_COMPARED]]
        if type(value) in _COLLECTIONS and len(value) > _MOST_VALUES:
            return len(value)
        packed = self._pack(value)
        if packed is None:
            return _kind(value), len(value) if type(value) in _COLLECTIONS else None
        found, rest = split_tensors(packed)
        return encode(rest), [checksum(tensor) for tensor in found.values()]

    def _restore(self, *, is_last: bool) -> None:
        for path, packed in self._restored.items():
            owner, _, name = path.partition(".")
            attributes = vars(self._owners[owner]) if owner in self._owners else {}
            now = attributes.get(name)
            if "module" not in packed:
                attributes[name] = self._unpack(packed, now)
            elif isinstance(now, nn.Module):
                self._restore_module(path, now, packed["module"])
            elif is_last:
                what = f"the checkpoint contains weights of {path}, which is {_kind(now)} now"
                warn_once(f"{what}: they are ignored", about=f"attribute {path}")

    def _restore_module(self, name: str, module: nn.Module, saved: Mapping[str, Tensor]) -> None:
        own = self._named_tensors(module)
        for path, value in saved.items():
            tensor = own.get(path)
            if tensor is None or tensor.shape != value.shape:
                got = "nothing of this name" if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
                do = "build it as in the saved run, or start a new run"
                where, expected = f"{name}: {path}", f"the checkpoint's tensor of shape {tuple(value.shape)}"
                raise CheckpointError(explain(where, got, expected, do))
            write_into(tensor, value)

    def _pack(self, value: Any) -> dict[str, Any] | None:
        """Return a value as JSON values and tensors, or None if it cannot be stored."""
        packed: dict[str, Any] = {"value": value}
        if isinstance(value, nn.Module):
            packed = {"module": self._named_tensors(value)}
        elif isinstance(value, Tensor):
            if value.grad_fn is not None and value.nbytes > _LARGEST_OUTPUT:
                return None
        elif isinstance(value, np.ndarray):
            if value.dtype == object:
                return None
            packed = {"kind": "ndarray", "value": torch.from_numpy(value.copy())}
        elif isinstance(value, set):
            packed = {"kind": "set", "value": list(value)}
        elif isinstance(value, deque):
            packed = {"kind": "deque", "value": list(value), "maxlen": value.maxlen}
        try:
            found, rest = split_tensors(packed)
            encode(rest)
        except CheckpointError:
            return None
        if any(tensor.device.type != "cpu" for tensor in found.values()):
            packed["is_placed"] = True
        return packed

    def _unpack(self, packed: Mapping[str, Any], now: Any) -> Any:
        kind, value = packed.get("kind"), packed["value"]
        device = self._device if packed.get("is_placed") else torch.device("cpu")
        if kind == "ndarray":
            return value.numpy()
        if kind == "set":
            return set(value)
        value = _restored(value, list(now) if kind == "deque" and isinstance(now, deque) else now, device)
        return deque(value, packed["maxlen"]) if kind == "deque" else value


def _restored(saved: Any, now: Any, device: torch.device) -> Any:
    """Return a saved value; tensors, lists and dicts that exist get its content in place, since others may use them."""
    if isinstance(saved, Tensor):
        if isinstance(now, Tensor) and (now.shape, now.dtype) == (saved.shape, saved.dtype) and not now.is_inference():
            write_into(now, saved)
            return now
        return saved.to(device)
    if isinstance(saved, list | tuple):
        existing = now if isinstance(now, list | tuple) and len(now) == len(saved) else [None] * len(saved)
        items = [_restored(item, one, device) for item, one in zip(saved, existing, strict=True)]
        if isinstance(saved, tuple) or not isinstance(now, list):
            return type(saved)(items)
        now[:] = items
        return now
    if isinstance(saved, dict):
        by_key = now if isinstance(now, dict) else {}
        entries = {key: _restored(item, by_key.get(key), device) for key, item in saved.items()}
        if type(now) not in (dict, OrderedDict, Counter):
            return entries
        now.clear()
        now.update(entries)
        return now
    return saved


_SHARED = (Tensor, nn.Module, np.ndarray)
_LEFT_OUT = frozenset({"model", "module", *OF_RUN, *vars(nn.Module())})


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _place(tensor: Tensor) -> tuple[int, int]:
    memory = 0 if is_made_of_tensors(tensor) else tensor.data_ptr()
    return memory, -1 if tensor.is_inference() else count_writes(tensor)
