"""The attributes of the user's module and callbacks, such as a queue, a counter or a moving average of the model.

accmt neither trains nor moves them. But what training changes in them belongs to the checkpoint: otherwise, a resumed
run would continue with the values that the constructor sets.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from accmt.attribute_values import (
    COLLECTIONS,
    DEEPEST,
    DIGEST,
    LARGEST_COPY,
    MOST_VALUES,
    NUMBERS,
    MissingError,
    ObjectCopy,
    Unpacking,
    copy_value,
    describe_value,
    few_items,
    is_object,
    may_change,
    memory_of,
    pack,
    parts_of,
)
from accmt.callbacks import Callback, MainProcessCallback, name_by_class
from accmt.checkpoint.frozen import checksum
from accmt.checkpoint.state_dicts import encode, split_tensors
from accmt.errors import CheckpointError, explain
from accmt.libraries.private_names import buffers_of, children_of, count_writes, is_made_of_tensors
from accmt.messages import warn_once
from accmt.module import OF_RUN
from accmt.sharded_tensors import write_into

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
