"""The attributes of the module and of callbacks that training changes, such as a queue, a counter or an average.

accmt neither trains nor moves them, but they belong to the checkpoint: otherwise, a resumed run would continue with the
values that the constructor sets. What counts is what an attribute holds, whatever its name: tensors, NumPy arrays,
numbers, strings, modules, objects with `state_dict` and `load_state_dict`, and collections of these. Whether training
has changed it is decided by digests of what a checkpoint would contain, when one is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parameter import is_lazy

from accmt.checkpoint.frozen import checksum
from accmt.checkpoint.state_dicts import copy_state, encode, is_namedtuple, map_leaves, split_tensors
from accmt.errors import CheckpointError, explain
from accmt.glances import digest_glance, digest_state, digest_text
from accmt.messages import warn_once
from accmt.module import OF_RUN
from accmt.sharded_tensors import is_dtensor, is_expanded, write_into

_LARGEST_STORED = 1 << 30
"""Bytes of an attribute that a checkpoint contains."""
_LARGEST_COPIES = 1 << 20
"""Bytes of all attributes that are copied after each step, for an emergency checkpoint."""

# How a checkpoint stores values that are not plain data.
_MODULE, _OBJECT, _ON_DEVICE, _OF_RUN = "$module", "$object", "$on_device", "$of_run"


class _Look(NamedTuple):
    """What is known of an attribute.

    Attributes:
        digest: A digest of what a checkpoint would contain.
        size: The bytes that it takes there.
        is_storable: Whether a checkpoint can contain it.
        has_tensors: Whether there are tensors in it.
        is_sharded: Whether each process holds a part of one.
    """

    digest: str
    size: int = 0
    is_storable: bool = False
    has_tensors: bool = False
    is_sharded: bool = False


class Attributes:
    """The attributes of the module and of callbacks during a run, and which of them training has changed.

    Args:
        owners: The module and callbacks by the names that they have in a checkpoint.
        model: The model, which checkpoints contain anyway.
        device: The device of the run.
        objects: The run's own objects, such as its optimizer and data, which checkpoints contain elsewhere.

    Attributes:
        changed: The names of attributes that training has changed, at the last comparison.
        of_process: Those that each process has for itself; None if none is declared.
    """

    def __init__(
        self, owners: Mapping[str, Any], model: nn.Module, device: torch.device, objects: Iterable[Any]
    ) -> None:
        self._owners = owners
        names = {f"{name}.{attribute}" for name, owner in owners.items() for attribute in owner.process_state}
        self.of_process = _ProcessAttributes(self, names) if names else None
        self._process_names = names
        self._device = device
        parts = (*model.modules(), *model.parameters(), *model.buffers(), *objects)
        self._of_run = {id(part): part for part in parts}
        self._loaded: dict[str, Any] = {"values": {}, "digests": {}}
        self._copies: Mapping[str, Any] = {}
        self._before: dict[str, _Look] | None = None
        self._latest: dict[str, _Look] = {}
        self.changed: set[str] = set()

    def begin(self) -> None:
        """Restore the checkpoint's values, which hooks of the start may have set again, and begin to compare."""
        self._restore(self._loaded["values"])
        self._before = self._latest = self._look_at_all()
        self.changed = self._loaded["values"].keys() & self._before.keys()
        for name, digest in self._loaded["digests"].get(self._device.type, {}).items():
            # A projection that the constructor draws without a seed is another one after each start.
            if name in self._before and self._before[name].digest != digest and name not in self.changed:
                do = "if the constructor draws it at random, call accmt.set_seed before building the module"
                warn_once(f"{name} is not what it was in the saved run: {do}", about=f"attribute {name}")

    def compare(self) -> None:
        """Find out what training has changed."""
        before = self._before or {}
        self._latest = self._look_at_all()
        self.changed |= {
            name for name, look in self._latest.items() if name not in before or before[name].digest != look.digest
        }

    def capture(self, *, compares: bool) -> dict[str, Any] | None:
        """Return copies of what is known to change, while it is small; None if nothing was compared so far.

        Args:
            compares: Whether other attributes may change from here on, as after an evaluation.
        """
        if self._before is None:
            return None
        if compares or self._latest is self._before:
            self.compare()
        if not self.changed:
            return {}
        names = [name for name in self.changed if name in self._latest and self._latest[name].is_storable]
        if sum(self._latest[name].size for name in names) > _LARGEST_COPIES:
            return {}
        values = self._find()
        return {name: copy_state(self._to_state(values[name])) for name in names if name in values}

    def find_changed(self, copies: Mapping[str, Any] | None) -> list[str]:
        """Return the attributes without a copy in `capture` that have changed, or may have, since it was made."""
        if copies is None:
            return []
        looks = ((name, look) for name, look in self._look_at_all().items() if look.is_storable and name not in copies)
        return [name for name, look in looks if look != self._latest.get(name)]

    @contextmanager
    def at(self, copies: Mapping[str, Any] | None) -> Iterator[None]:
        """Let `state_dict` return values from `capture` in place of the current ones."""
        self._copies = copies or {}
        yield
        self._copies = {}

    def state_dict(self) -> dict[str, Any]:
        """Return what training has changed, and digests of tensors that it has not."""
        if self._before is None:
            return self._loaded
        self.compare()
        looks = self._latest.items()
        digests = {name: look.digest for name, look in looks if look.has_tensors and name not in self.changed}
        values = self.collect(self.changed - self._process_names)
        return {"values": values, "digests": {self._device.type: digests}}  # other devices compute other digests

    def collect(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of attributes as a checkpoint contains them; those that it cannot contain are named."""
        values, state = self._find(), {}
        for name in sorted(values.keys() & names):
            if name in self._copies:
                state[name] = self._copies[name]
            elif self._latest[name].is_storable:
                state[name] = self._to_state(values[name])
            else:
                self._name_unstorable(name, values[name])
        return state

    def digests_of_changed(self) -> dict[str, str]:
        """Return digests of what a checkpoint contains for all processes, which should be the same on each."""
        shared = self.changed - self._process_names
        looks = ((name, look) for name, look in self._latest.items() if name in shared)
        return {name: look.digest for name, look in looks if look.is_storable and not look.is_sharded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the attributes from `state_dict`; `begin` does so again."""
        self._loaded = {"values": dict(state["values"]), "digests": state["digests"]}
        self._restore(copy_state(state["values"]))

    def load_also(self, values: Mapping[str, Any]) -> None:
        """Restore further attributes, which each process has for itself."""
        self._loaded["values"] |= values
        self._restore(copy_state(values))

    def collect_all(self) -> dict[str, Any]:
        """Return all attributes that a checkpoint can contain, whether or not training has changed them."""
        looks = self._look_at_all()
        return {name: self._to_state(value) for name, value in self._find().items() if looks[name].is_storable}

    @contextmanager
    def keeping(self, *, unchanged: bool = False) -> Iterator[None]:
        """Restore the attributes that training has changed afterwards; with `unchanged`, the others as well."""
        values = self.collect_all()
        if not unchanged:
            values = {name: value for name, value in values.items() if name in self.changed}
        copies = copy_state(values)
        yield
        self._restore(copies)

    def _find(self) -> dict[str, Any]:
        return {
            f"{owner_name}.{name}": value
            for owner_name, owner in self._owners.items()
            for name, value in _attributes_of(owner).items()
            if name not in _LEFT_OUT and id(value) not in self._of_run
        }

    def _look_at_all(self) -> dict[str, _Look]:
        return {name: self._look_at(value) for name, value in self._find().items()}

    def _look_at(self, value: Any) -> _Look:
        try:
            tensors, rest = split_tensors(self._to_state(value))
            text = encode(rest)
            size = len(text) + sum(tensor.nbytes for tensor in tensors.values())
            content = f"{text} {[checksum(tensor) for tensor in tensors.values()]}"
            is_sharded = any(map(is_dtensor, tensors.values()))
            return _Look(digest_text(content), size, size <= _LARGEST_STORED, bool(tensors), is_sharded)
        except CheckpointError:
            return _Look(digest_glance(value))

    def _to_state(self, value: Any) -> Any:
        """Return a value with plain data in place of modules and objects; tensors are shared."""
        return map_leaves(value, "", (Tensor, nn.Module, Stateful), self._describe)

    def _describe(self, value: Any, path: str) -> Any:
        if id(value) in self._of_run:
            return {_OF_RUN: True}
        if isinstance(value, Tensor):
            return value if value.device.type == "cpu" else {_ON_DEVICE: value}
        if isinstance(value, nn.Module):
            return {_MODULE: self._tensors_of(value)}
        try:
            return {_OBJECT: self._to_state(value.state_dict())}
        except Exception as error:
            # A library's object may need arguments, or be unable to say its state now: it is named if it changes.
            got, do = f"{type(error).__name__} in state_dict: {error}", "see there"
            raise CheckpointError(explain(type(value).__name__, got, "a state", do)) from error

    def _tensors_of(self, module: nn.Module) -> dict[str, Tensor]:
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return {name: part for name, part in named.items() if id(part) not in self._of_run and not is_lazy(part)}

    def _name_unstorable(self, name: str, value: Any) -> None:
        size = f" of more than {_LARGEST_STORED >> 30} GiB" if self._latest[name].size else ""
        what = f"{name} has changed since training began, and a checkpoint cannot contain this {type(value).__name__}"
        do = "return what the next step needs of it from `state_dict`, as numbers and tensors, and restore it in "
        do += "load_state_dict (of the module, the callback, or the object itself)"
        warn_once(f"{what}{size}: {do}", about=f"attribute {name}")

    def _restore(self, values: Mapping[str, Any]) -> None:
        current = self._find()
        merge = _Merge(self._device, self._tensors_of)
        for path, saved in values.items():
            owner_name, _, name = path.rpartition(".")
            if owner_name in self._owners:
                value = merge.into(current.get(path), saved, path)
                if value is not current.get(path):
                    setattr(self._owners[owner_name], name, value)


class _ProcessAttributes:
    """The attributes that each process has for itself, as their owners declare in `process_state`."""

    def __init__(self, attributes: Attributes, names: set[str]) -> None:
        self._attributes, self._names = attributes, names

    def state_dict(self) -> dict[str, Any]:
        return self._attributes.collect(self._attributes.changed & self._names)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._attributes.load_also(state)


class _Merge:
    """Gives the objects of a program the values of a checkpoint, in place where they exist: others may refer to them.

    Two attributes that were the same at the start, as in `self.h = self.c = torch.zeros(4)`, may differ in the
    checkpoint: only the first is written in place.
    """

    def __init__(self, device: torch.device, tensors_of: Any) -> None:
        self._device, self._tensors_of = device, tensors_of
        self._written: dict[int, Any] = {}

    def into(self, current: Any, saved: Any, path: str) -> Any:
        """Return the saved value: `current` with other content, or a new object."""
        if type(saved) is dict:
            return self._into_dict(current, saved, path)
        if isinstance(saved, Tensor):
            return self._into_tensor(current, saved, torch.device("cpu"))
        if isinstance(saved, np.ndarray):
            is_same_kind = type(current) is np.ndarray and (current.shape, current.dtype) == (saved.shape, saved.dtype)
            if is_same_kind and current.flags.writeable and self._may_write(current, saved):
                current[...] = saved
                return current
            return saved
        if isinstance(saved, list | tuple | deque):
            return self._into_sequence(current, saved, path)
        return saved

    def _into_dict(self, current: Any, saved: dict[Any, Any], path: str) -> Any:
        if _OF_RUN in saved:
            return current
        if _ON_DEVICE in saved:
            return self._into_tensor(current, saved[_ON_DEVICE], self._device)
        if _MODULE in saved or _OBJECT in saved:
            is_same_kind = isinstance(current, nn.Module if _MODULE in saved else Stateful)
            if not is_same_kind or not self._may_write(current, saved):
                what = f"{path}: the checkpoint contains the state of an object, which is {type(current).__name__} now"
                do = "create it in __init__ or on_fit_start, and another one for each name"
                warn_once(f"{what}: it is ignored; {do}", about=f"attribute {path}")
            elif _OBJECT in saved:
                current.load_state_dict(saved[_OBJECT])
            else:
                self._into_module(current, saved[_MODULE], path)
            return current
        by_key = current if isinstance(current, dict) else {}
        entries = {key: self.into(by_key.get(key), value, path) for key, value in saved.items()}
        if not isinstance(current, dict) or not self._may_write(current, saved):
            return entries
        current.clear()
        current.update(entries)
        return current

    def _into_module(self, module: nn.Module, saved: Mapping[str, Tensor], path: str) -> None:
        tensors = self._tensors_of(module)
        for name, value in saved.items():
            tensor = tensors.get(name)
            if tensor is None or tensor.shape != value.shape:
                got = "nothing of this name" if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
                expected = f"the checkpoint's tensor of shape {tuple(value.shape)}"
                do = "build it as in the saved run, or start a new run"
                raise CheckpointError(explain(f"{path}: {name}", got, expected, do))
            write_into(tensor, value)
            self._written[_memory_of(tensor)] = value

    def _into_tensor(self, current: Any, saved: Tensor, device: torch.device) -> Any:
        is_same_kind = isinstance(current, Tensor) and (current.shape, current.dtype) == (saved.shape, saved.dtype)
        if not is_same_kind or current.is_inference() or is_expanded(current) or current.layout != torch.strided:
            return saved.to(device)
        if self._written.setdefault(_memory_of(current), saved) is not saved:  # by another name
            return current if torch.equal(current.detach().cpu(), saved.cpu()) else saved.to(device)
        write_into(current, saved)
        return current

    def _into_sequence(self, current: Any, saved: Any, path: str) -> Any:
        has_places = isinstance(current, list | tuple | deque) and len(current) == len(saved)
        places = list(current) if has_places else [None] * len(saved)
        items = [self.into(place, value, path) for place, value in zip(places, saved, strict=True)]
        if is_namedtuple(type(saved)):
            return saved._make(items)
        if isinstance(saved, tuple):
            return tuple(items)
        is_same_kind = type(current) is type(saved) and getattr(current, "maxlen", 0) == getattr(saved, "maxlen", 0)
        if not is_same_kind or not self._may_write(current, saved):
            return deque(items, saved.maxlen) if isinstance(saved, deque) else items
        current.clear()
        current.extend(items)
        return current

    def _may_write(self, current: Any, saved: Any) -> bool:
        """Return whether an object was not written yet, or gets the same content under another name."""
        written = self._written.setdefault(id(current), saved)
        return written is saved or digest_state(written) == digest_state(saved)


_LEFT_OUT = frozenset({"model", "module", *OF_RUN, *vars(nn.Module())})


def _memory_of(tensor: Tensor) -> int:
    is_plain = tensor.layout == torch.strided and tensor.numel() and type(tensor) in (Tensor, nn.Parameter)
    return tensor.data_ptr() if is_plain else id(tensor)


def _attributes_of(owner: Any) -> dict[str, Any]:
    attributes = dict(vars(owner))
    if isinstance(owner, nn.Module):  # a module may be both
        attributes.update(owner.named_children())
        attributes.update(owner.named_buffers(recurse=False))
        attributes.update(owner.named_parameters(recurse=False))
    return attributes
