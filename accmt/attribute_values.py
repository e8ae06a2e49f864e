"""How a checkpoint stores the value of an attribute: as JSON values and tensors, and restored in place.

What exists is given its content in place, because others may refer to it: a tensor, a list, a module, an object of a
class of the user's.
"""

from __future__ import annotations

import ast
import functools
import sys
import sysconfig
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, Sampler

from accmt.callbacks import Callback
from accmt.checkpoint.frozen import checksum
from accmt.checkpoint.state_dicts import describe_kind, encode, find_kind, split_tensors
from accmt.errors import CheckpointError
from accmt.libraries.private_names import is_made_of_tensors
from accmt.module import AcceleratorModule
from accmt.sharded_tensors import is_expanded, write_into

NUMBERS = frozenset({type(None), bool, int, float, str})
_LITERALS = frozenset({complex, bytes})
_DICTS = {kind.__name__: kind for kind in (dict, OrderedDict, Counter, defaultdict)}
_BY_NAME = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)} | _DICTS
COLLECTIONS = frozenset(_BY_NAME.values())
MOST_VALUES = 10_000
"""Of a collection that is copied after each step."""
_FEW_VALUES = 100
"""Of a collection in which tensors may be written in place; longer ones are buffers and logs."""
LARGEST_COPY = 1 << 20
"""Bytes of a NumPy array that is copied after each step."""
_LARGEST_OUTPUT = 1 << 24
"""Bytes of a tensor with a graph that is still taken for a state, not for an output kept for a log."""
DEEPEST = 3
"""Of objects within objects, which may refer to each other."""

DIGEST = "digest"
"""The kind of a value that training has not changed, of which only a digest is stored."""

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class ObjectCopy:
    """A copy of the attributes of an object."""

    kind: type
    values: dict[str, Any]


def may_change(value: Any) -> bool:
    kind = type(value)
    if kind in NUMBERS or kind in COLLECTIONS or kind is np.ndarray or kind in _LITERALS:
        return True
    return isinstance(value, Tensor | nn.Module | np.generic | Enum) or _is_namedtuple(kind) or is_object(value)


def _is_namedtuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make")


def is_object(value: Any) -> bool:
    kind: Any = type(value)
    return (hasattr(value, "__dict__") or hasattr(kind, "__slots__")) and _is_of_user(kind)


def _is_of_user(kind: Any) -> bool:
    """Return whether the attributes of an object are state: its class is the user's, and not one of data."""
    others = (AcceleratorModule, Callback, Dataset, Sampler, DataLoader, nn.Module, Tensor, type, BaseException)
    if issubclass(kind, (*others, Enum, tuple, list, dict, set, int, float, str)):
        return False
    return is_user_class(kind) or hasattr(kind, "partial_fit")  # an estimator of scikit-learn learns from batches


@functools.cache
def is_user_class(kind: Any) -> bool:
    """Return whether a class is neither Python's, accmt's nor an installed library's."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    is_of_library = kind.__module__ in ("builtins", *sys.builtin_module_names) or kind.__module__.startswith("accmt.")
    return not (is_of_library or (path is not None and path.startswith(_LIBRARIES)))


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, a tensor, an array or a collection."""
    kind = type(value)
    return kind in NUMBERS or kind in COLLECTIONS or kind in (Tensor, np.ndarray) or isinstance(value, np.generic)


def parts_of(value: Any) -> dict[str, Any]:
    parts = value.values if isinstance(value, ObjectCopy) else _all_parts_of(value)
    return {name: one for name, one in parts.items() if not (callable(one) and not isinstance(one, nn.Module))}


def _all_parts_of(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if name[:2] != "__"}}


def few_items(value: Any) -> Iterable[Any]:
    if len(value) > _FEW_VALUES:
        return ()
    return tuple(value.values()) if isinstance(value, dict) else value


def copy_value(value: Any, depth: int = 0) -> Any:
    """Copy collections, small arrays and objects' attributes; tensors, modules and long collections are shared."""
    kind: Any = type(value)
    if kind in NUMBERS or isinstance(value, Tensor | nn.Module):
        return value
    if kind is np.ndarray:
        return value.copy() if value.nbytes <= LARGEST_COPY else value
    if kind in COLLECTIONS:
        if len(value) > MOST_VALUES or kind in (set, frozenset):
            return value.copy() if kind is set and len(value) <= MOST_VALUES else value
        if len(value) > _FEW_VALUES:
            return value if kind is tuple else value.copy()
        if not isinstance(value, dict):
            items = [copy_value(one, depth) for one in value]
            return deque(items, value.maxlen) if isinstance(value, deque) else kind(items)
        copied = value.copy()
        copied.update({key: copy_value(one, depth) for key, one in value.items()} if kind is not Counter else ())
        return copied
    if depth < DEEPEST and is_object(value):
        return ObjectCopy(kind, {name: copy_value(one, depth + 1) for name, one in _all_parts_of(value).items()})
    return value


def text_of(packed: Any) -> object:
    """Return a packed value in a form that can be compared."""
    if isinstance(packed, bytes):
        return packed
    found, rest = split_tensors(packed)
    return encode(rest), [checksum(tensor) for tensor in found.values()]


def describe_value(value: Any) -> str:
    return f"a {(value.kind if isinstance(value, ObjectCopy) else type(value)).__name__}"


def memory_of(tensor: Tensor) -> int:
    if is_made_of_tensors(tensor) or tensor.layout != torch.strided or is_lazy(tensor) or not tensor.numel():
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


# ---- Storing.


def pack(value: Any, tensors_of: Callable[[nn.Module], dict[str, Tensor]], depth: int = 0) -> Any:
    """Return a value as JSON values and tensors: numbers, CPU tensors and lists as they are, others with a kind.

    Args:
        value: The value.
        tensors_of: Returns the tensors of a module that are to be stored.
        depth: How many objects it is in.

    Raises:
        CheckpointError: It cannot be stored.
    """
    kind = type(value)
    if kind in NUMBERS:
        return value
    pack_one = functools.partial(pack, tensors_of=tensors_of, depth=depth)
    if isinstance(value, Tensor):
        if value.grad_fn is not None and value.nbytes > _LARGEST_OUTPUT:
            raise CheckpointError("an output")
        return value if value.device.type == "cpu" else {"kind": "tensor", "value": value}
    if kind is list:
        return [pack_one(one) for one in value]
    if isinstance(value, Enum) and value.name in kind.__members__:
        return {"kind": "enum", "value": value.name, "class": describe_kind(kind)}
    if kind in _LITERALS:
        return {"kind": "literal", "value": repr(value)}
    if isinstance(value, nn.Module):
        return {"kind": "module", "value": tensors_of(value)}
    if isinstance(value, np.generic) and type(value.item()) in NUMBERS:
        return {"kind": "scalar", "value": value.item(), "dtype": value.dtype.str}
    if kind is np.ndarray and not value.dtype.hasobject and value.dtype.names is None:
        dense = np.ascontiguousarray(value) if value.flags.writeable else value.copy()
        content = torch.from_numpy(dense.reshape(-1).view(np.uint8))
        return {"kind": "ndarray", "value": content, "dtype": value.dtype.str, "shape": list(value.shape)}
    if kind in COLLECTIONS:
        items = None
        if kind in _DICTS.values():  # weights as keys are found by their place
            keys = [
                {"kind": "place", "value": n} if isinstance(key, Tensor) else pack_one(key)
                for n, key in enumerate(value)
            ]
            items = [list(entry) for entry in zip(keys, map(pack_one, value.values()), strict=True)]
        packed = {"kind": kind.__name__, "value": [pack_one(one) for one in value] if items is None else items}
        return {**packed, "maxlen": value.maxlen} if kind is deque else packed
    if _is_namedtuple(kind):
        return {"kind": "namedtuple", "value": [pack_one(one) for one in value], "class": describe_kind(kind)}
    if (isinstance(value, ObjectCopy) or is_object(value)) and depth < DEEPEST:  # objects may refer to each other
        kind = value.kind if isinstance(value, ObjectCopy) else kind
        parts = {name: pack(one, tensors_of, depth + 1) for name, one in parts_of(value).items()}
        return {"kind": "object", "value": parts, "class": describe_kind(kind)}
    raise CheckpointError(describe_value(value))


# ---- Restoring.


class MissingError(Exception):
    """A saved value needs an object that the program does not have now."""


class Unpacking:
    """Restores packed values; what exists gets its content in place, since others may use it.

    But two attributes that were the same at the start, as in `self.h = self.c = torch.zeros(4)`, may differ in the
    checkpoint, and none may change the model that it was a view of.

    Args:
        restore_module: Restores the tensors of a module, which has a name.
        written: What has been written, by its memory or id.
        device: The device of tensors that were on one.
        path: The attribute.
    """

    def __init__(
        self,
        restore_module: Callable[[str, nn.Module, Mapping[str, Tensor]], None],
        written: dict[int, Any],
        device: torch.device,
        path: str,
    ) -> None:
        self._restore_module, self._written, self._device, self._path = restore_module, written, device, path

    def unpack(self, packed: Any, now: Any) -> Any:
        """Return a saved value."""
        if isinstance(packed, Tensor):
            return self._tensor(packed, now, torch.device("cpu"))
        if isinstance(packed, list):
            items = self._items(packed, now)
            if type(now) is not list or not self._is_first(id(now), packed):
                return items
            now[:] = items
            return now
        return packed if not isinstance(packed, dict) else self._of_kind(packed["kind"], packed["value"], packed, now)

    def _of_kind(self, kind: str, value: Any, packed: Mapping[str, Any], now: Any) -> Any:
        if kind == "tensor":
            return self._tensor(value, now, self._device)
        if kind == "literal":
            return ast.literal_eval(value)
        if kind == "scalar":
            return np.dtype(packed["dtype"]).type(value)
        if kind == "ndarray":
            return self._array(value.numpy().view(np.dtype(packed["dtype"])).reshape(packed["shape"]), now)
        if kind == "module":
            if not isinstance(now, nn.Module):
                raise MissingError(
                    f"the checkpoint contains the weights of a module, which is {describe_value(now)} now"
                )
            self._require_first(now, value)
            self._restore_module(self._path, now, value)
            return now
        if kind == "enum" and isinstance(now, Enum) and describe_kind(type(now)) == packed["class"]:
            return type(now)[value]
        if kind == "namedtuple":
            found = find_kind(packed["class"])
            if not (isinstance(found, type) and _is_namedtuple(found)):
                module = packed["class"].partition(":")[0]
                what = f"the checkpoint contains {packed['class']}, which is not defined at the top level of {module}"
                raise MissingError(what)
            return found._make(self._items(value, now))  # type: ignore[attr-defined]
        if kind in ("object", "enum"):
            if describe_kind(type(now)) != packed["class"]:
                raise MissingError(f"the checkpoint contains {packed['class']}, which is {describe_value(now)} now")
            self._require_first(now, value)
            for name, one in value.items():
                object.__setattr__(
                    now, name, self.unpack(one, getattr(now, name, None))
                )  # it may be a frozen dataclass
            return now
        if kind in _DICTS:
            return self._dict(_DICTS[kind], value, now)
        items = self._items(value, now)
        if kind != "deque":
            made: Any = _BY_NAME[kind]
            return made(items)
        if type(now) is not deque or now.maxlen != packed["maxlen"] or not self._is_first(id(now), value):
            return deque(items, packed["maxlen"])
        now.clear()
        now.extend(items)
        return now

    def _tensor(self, saved: Tensor, now: Any, device: torch.device) -> Any:
        is_like = isinstance(now, Tensor) and (now.shape, now.dtype) == (saved.shape, saved.dtype)
        if not is_like or now.is_inference() or is_expanded(now):
            return saved.to(device)
        memory = memory_of(now)
        if memory in self._written:
            return now if torch.equal(now.cpu(), saved) else saved.to(device)
        self._written[memory] = now
        write_into(now, saved)
        return now

    def _array(self, saved: np.ndarray[Any, Any], now: Any) -> Any:
        is_like = type(now) is np.ndarray and (now.shape, now.dtype) == (saved.shape, saved.dtype)
        if is_like and now.flags.writeable and self._is_first(now.__array_interface__["data"][0], saved.tobytes()):
            now[...] = saved
            return now
        return saved.copy()

    def _items(self, saved: Sequence[Any], now: Any) -> list[Any]:
        is_like = isinstance(now, list | tuple | deque) and len(now) == len(saved)
        existing = now if is_like else [None] * len(saved)
        return [self.unpack(one, before) for one, before in zip(saved, existing, strict=True)]

    def _dict(self, kind: Any, saved: Sequence[Any], now: Any) -> Any:
        by_key = now if isinstance(now, dict) else {}
        keys, entries = list(by_key) if len(by_key) == len(saved) else [], {}
        for packed_key, one in saved:
            key = self._key(packed_key, keys)
            entries[key] = self.unpack(one, by_key.get(key))
        if type(now) is not kind or not self._is_first(id(now), saved):
            made = kind()
            made.update(entries)
            return made
        if now.keys() != entries.keys() or kind is not dict:
            now.clear()
        now.update(entries)
        return now

    def _key(self, packed: Any, keys: Sequence[Any]) -> Any:
        if not (isinstance(packed, dict) and packed["kind"] == "place"):
            return self.unpack(packed, None)
        if packed["value"] >= len(keys) or not isinstance(keys[packed["value"]], Tensor):
            raise MissingError("the checkpoint contains values by tensor, which it does not have now")
        return keys[packed["value"]]

    def _require_first(self, now: Any, saved: Any) -> None:
        if not self._is_first(id(now), saved):
            raise MissingError(f"the checkpoint contains {describe_value(now)} that is another attribute's now")

    def _is_first(self, place: int, saved: Any) -> bool:
        """Return whether a value may be written in place: for the first time, or with the same content."""
        before = self._written.setdefault(place, saved)
        return before is saved or text_of(before) == text_of(saved)
