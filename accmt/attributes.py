"""The attributes of the user's module and callbacks, such as a queue, a counter or a moving average of the model.

accmt neither trains nor moves them. But what training changes in them belongs to the checkpoint: otherwise, a resumed
run would continue with the values that the constructor sets.
"""

from __future__ import annotations

import ast
import copy
import functools
import sys
import sysconfig
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, Sampler

from accmt.callbacks import Callback, MainProcessCallback, name_by_class
from accmt.checkpoint.frozen import checksum
from accmt.checkpoint.state_dicts import describe_kind, encode, find_kind, split_tensors
from accmt.errors import CheckpointError, explain
from accmt.libraries.private_names import buffers_of, children_of, count_writes, is_made_of_tensors
from accmt.messages import warn_once
from accmt.module import OF_RUN, AcceleratorModule
from accmt.sharded_tensors import is_expanded, write_into

_LARGEST_HASHED = 1 << 22
"""Bytes of a tensor whose bits are all compared at each checkpoint."""
_NUM_HASHED = 1 << 16
"""Entries that are compared of a larger one."""


def name_owners(module: Any, callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Return the objects of a user whose attributes are state: the module, and callbacks without a `state_dict`.

    Callbacks that run only on the main process are left out: processes save and restore the same.
    """
    own = (one for one in callbacks if type(one).state_dict is Callback.state_dict)
    of_users = (one for one in own if not type(one).__module__.startswith("accmt."))
    return {"self": module} | name_by_class(one for one in of_users if not isinstance(one, MainProcessCallback))


class Captured(NamedTuple):
    """The attributes after an optimizer step: collections are copies, but tensors and modules are shared."""

    of: Attributes
    values: dict[str, Any]
    writes: dict[str, object]

    def state_dict(self) -> dict[str, Any]:
        """Return what training has changed, as JSON values and tensors."""
        return self.of.describe(self.values)

    def find_changed(self) -> list[str]:
        """Return the names of shared values that have changed since, or may have."""
        return [name for name, writes in self.writes.items() if self.of.has_changed(name, self.values[name], writes)]


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
        self._tensors: dict[int, tuple[nn.Module, list[Tensor]]] = {}
        self._restored: dict[str, Any] = {}
        self._digests: dict[str, str] = {}
        self._before: dict[str, tuple[object, object]] | None = None

    def begin(self) -> None:
        """Note the values with which training begins, after restoring those of a checkpoint.

        They have been restored before, but hooks of the start may have set them again.
        """
        self._restore(is_last=True)
        values = self._find()
        self._tensors = {id(one): (one, self._tensors_of(one)) for one in values.values() if isinstance(one, nn.Module)}
        before = {name: (self._fingerprint(value), self._count_writes(value)) for name, value in values.items()}
        self._digests = {name: found for name, value in values.items() if (found := self._digest(value)) is not None}
        saved = {path: packed["value"] for path, packed in self._restored.items() if _is_digest(packed)}
        for name, digest in saved.items():
            if name in self._digests and self._digests[name] != digest:
                do = "if the constructor draws it at random, call accmt.set_seed before building the module"
                warn_once(f"{name} is not what it was in the saved run: {do}", about=f"attribute {name}")
        self._before = {name: both for name, both in before.items() if name in saved or name not in self._restored}
        self._restored = {}

    def capture(self) -> Captured:
        """Return the current attributes, without reading a tensor."""
        values, writes = self._find(), {}
        for name, value in values.items():
            if type(value) not in NUMBERS:
                values[name] = copy_value(value)
                writes[name] = self._count_writes(values[name])
        return Captured(self, values, writes)

    def state_dict(self) -> dict[str, Any]:
        """Return what training has changed, as JSON values and tensors."""
        return self.describe(self._find())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the attributes from `state_dict`."""
        self._restored = state
        self._restore(is_last=False)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Restore the attributes that training has changed afterwards."""
        state = copy.deepcopy(self.state_dict())
        yield
        self._restored = state
        self._restore(is_last=True)
        self._restored = {}

    def collect_all(self) -> dict[str, Any]:
        """Return all attributes that a checkpoint can contain, whether or not training has changed them."""
        state = {}
        for name, value in self._find().items():
            with suppress(CheckpointError):
                state[name] = pack(value, self._named_tensors)
        return state

    def describe(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the values that training has changed, as JSON values and tensors."""
        if self._before is None:
            return self._restored
        state = {}
        for name, value in values.items():
            if name in self._before and self._fingerprint(value) == self._before[name][0]:
                if name in self._digests:
                    state[name] = {"kind": DIGEST, "value": self._digests[name]}
                continue
            if self._is_of_model(value):
                continue
            try:
                state[name] = pack(value, self._named_tensors)
                encode(split_tensors(state[name])[1])
            except CheckpointError:
                state.pop(name, None)
                what = (
                    f"{name} has changed since training began, but a checkpoint cannot contain {describe_value(value)}"
                )
                do = "return it from `state_dict` as numbers and tensors, and restore it in load_state_dict"
                warn_once(f"{what}: {do}", about=f"attribute {name}")
        return state

    def has_changed(self, name: str, value: Any, writes: object) -> bool:
        """Return whether a captured value that is shared has changed since, or may have."""
        if self._count_writes(value) != writes:
            return True
        if self._before is None:
            return False
        fingerprint, first_writes = self._before.get(name, (None, None))
        if isinstance(value, np.ndarray):  # whose writes are not counted; a small one is a copy
            return value.nbytes > LARGEST_COPY and self._fingerprint(value) != fingerprint
        holds_module = type(value) in COLLECTIONS and any(isinstance(one, nn.Module) for one in few_items(value))
        if name not in self._before or not (holds_module or isinstance(value, Tensor | nn.Module)):
            return False
        # Writes to `.data` are not counted. If that is how the value changes, its last change may be newer.
        return writes == first_writes and self._fingerprint(value) != fingerprint

    def _find(self) -> dict[str, Any]:
        found = {}
        for owner, one in self._owners.items():
            for name, value in _attributes_of(one).items():
                if name not in _LEFT_OUT and id(value) not in self._of_model and may_change(value):
                    found[f"{owner}.{name}"] = value
        return found

    def _is_of_model(self, value: Any) -> bool:
        """Return whether a value is a part of the model, or a collection of some, such as a list of its parameters."""
        if type(value) in COLLECTIONS and len(value):
            return all(map(self._is_of_model, value.values() if isinstance(value, dict) else value))
        return id(value) in self._of_model

    def _named_tensors(self, module: nn.Module) -> dict[str, Tensor]:
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return {n: tensor for n, tensor in named.items() if id(tensor) not in self._of_model and not is_lazy(tensor)}

    def _tensors_of(self, module: nn.Module) -> list[Tensor]:
        known = self._tensors.get(id(module))
        return list(self._named_tensors(module).values()) if known is None else known[1]

    def _count_writes(self, value: Any) -> object:
        """Return a value that changes with most writes, without reading a tensor."""
        if type(value) in NUMBERS:
            return None
        if isinstance(value, Tensor):
            return _place(value)
        if isinstance(value, nn.Module):
            return [_place(tensor) for tensor in self._tensors_of(value)]
        if isinstance(value, ObjectCopy):
            return [self._count_writes(one) for one in value.values.values()]
        if type(value) not in COLLECTIONS:
            return None
        last = id(value[-1]) if isinstance(value, list | deque) and value else None
        return len(value), last, [self._count_writes(one) for one in few_items(value)]

    def _fingerprint(self, value: Any, depth: int = 0) -> object:
        """Return a value that changes with the attribute."""
        if isinstance(value, nn.Module):
            return [(_place(tensor), _checksum(tensor)) for tensor in self._named_tensors(value).values()]
        if isinstance(value, Tensor):
            return _place(value), _checksum(value)
        if isinstance(value, ObjectCopy) or is_object(value):
            parts = parts_of(value).items() if depth < DEEPEST else ()
            return [(name, self._fingerprint(one, depth + 1)) for name, one in parts]
        if type(value) in COLLECTIONS and len(value) > MOST_VALUES:
            items = (*value, *value.values()) if isinstance(value, dict) else tuple(value)
            try:
                return len(value), hash(items)
            except TypeError:  # of lists, for example
                return len(value), hash(tuple(map(id, items)))
        try:
            found, rest = split_tensors(pack(value, self._named_tensors))
            return encode(rest), [checksum(tensor) for tensor in found.values()]
        except CheckpointError:
            return describe_value(value), len(value) if type(value) in COLLECTIONS else None

    def _digest(self, value: Any) -> str | None:
        """Return a digest of a tensor or module, which the next start compares if training does not change it."""
        named = self._named_tensors(value) if isinstance(value, nn.Module) else {"": value}
        tensors = {name: one for name, one in named.items() if isinstance(one, Tensor)}
        if not tensors:
            return None
        sums = [(name, str(one.device.type), tuple(one.shape), _checksum(one)) for name, one in tensors.items()]
        return xxhash.xxh3_64_hexdigest(repr(sums).encode())

    def _restore(self, *, is_last: bool) -> None:
        written: dict[int, Any] = {
            memory_of(part): part for part in self._of_model.values() if isinstance(part, Tensor)
        }
        # A tensor that becomes an attribute is a copy, because steps before `begin` may write into it.
        state = self._restored if is_last else copy.deepcopy(self._restored)
        for path, packed in state.items():
            owner, _, name = path.partition(".")
            one = self._owners.get(owner)
            if one is None or _is_digest(packed):
                continue
            now = _attributes_of(one).get(name)
            try:
                value = Unpacking(self._restore_module, written, self._device, path).unpack(packed, now)
                if value is not now:
                    holder = next((held for held in _registered(one) if name in held), vars(one))
                    holder[name] = value
            except MissingError as error:
                if is_last:
                    warn_once(f"{path}: {error}: it is ignored", about=f"attribute {path}")

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


_LEFT_OUT = frozenset({"model", "module", *OF_RUN, *vars(nn.Module())})


def _is_digest(packed: Any) -> bool:
    return isinstance(packed, dict) and packed["kind"] == DIGEST


def _registered(owner: Any) -> list[dict[str, Any]]:
    """Return the buffers and modules of a module that is also an `nn.Module`, which are not in its `__dict__`."""
    return [buffers_of(owner), children_of(owner)] if isinstance(owner, nn.Module) else []


def _attributes_of(owner: Any) -> dict[str, Any]:
    found = dict(vars(owner))
    for held in _registered(owner):
        found.update(held)
    return found


def _checksum(tensor: Tensor) -> object:
    """Return a checksum of a tensor, or of entries of a large one: what writes only few counts them as writes."""
    try:
        split_tensors(tensor)
    except CheckpointError:
        return None
    is_large = tensor.nbytes > _LARGEST_HASHED and tensor.is_contiguous() and not is_made_of_tensors(tensor)
    return checksum(tensor.detach().view(-1)[:: tensor.numel() // _NUM_HASHED] if is_large else tensor)


def _place(tensor: Tensor) -> tuple[int, int]:
    is_plain = not is_made_of_tensors(tensor) and tensor.layout == torch.strided
    return tensor.data_ptr() if is_plain else 0, -1 if tensor.is_inference() else count_writes(tensor)


# ---- How a checkpoint stores the value of an attribute: as JSON values and tensors, and restored in place.
#
# What exists is given its content in place, because others may refer to it: a tensor, a list, a module, an object of a
# class of the user's.


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


@functools.cache
def _is_of_user(kind: Any) -> bool:
    """Return whether the attributes of an object are state: its class is the user's, and not one of data."""
    others = (AcceleratorModule, Callback, Dataset, Sampler, DataLoader, nn.Module, Tensor, type, BaseException)
    if issubclass(kind, (*others, Enum, tuple, list, dict, set, int, float, str)):
        return False
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    is_of_library = kind.__module__ in ("builtins", *sys.builtin_module_names) or kind.__module__.startswith("accmt.")
    return not (is_of_library or (path is not None and path.startswith(_LIBRARIES)))


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


def _text(packed: Any) -> object:
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
        items = [[pack_one(key), pack_one(one)] for key, one in value.items()] if kind in _DICTS.values() else None
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
        entries = {}
        for packed_key, one in saved:
            key = self.unpack(packed_key, None)
            entries[key] = self.unpack(one, by_key.get(key))
        if type(now) is not kind or not self._is_first(id(now), saved):
            made = kind()
            made.update(entries)
            return made
        if now.keys() != entries.keys() or kind is not dict:
            now.clear()
        now.update(entries)
        return now

    def _require_first(self, now: Any, saved: Any) -> None:
        if not self._is_first(id(now), saved):
            raise MissingError(f"the checkpoint contains {describe_value(now)} that is another attribute's now")

    def _is_first(self, place: int, saved: Any) -> bool:
        """Return whether a value may be written in place: for the first time, or with the same content."""
        before = self._written.setdefault(place, saved)
        return before is saved or _text(before) == _text(saved)
