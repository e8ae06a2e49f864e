"""The attributes of the module and of callbacks that training changes, such as a queue, a counter or an average.

accmt neither trains nor moves them, but they belong to the checkpoint: otherwise, a resumed run would continue with the
values that the constructor sets. What counts is what an attribute holds, whatever its name: tensors, NumPy arrays,
numbers, strings, modules, objects with `state_dict` and `load_state_dict`, and collections of these. Whether training
has changed it is decided by digests of what a checkpoint would contain, when one is written.
"""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from accmt.checkpoint.frozen import checksum
from accmt.checkpoint.state_dicts import SIMPLE, copy_state, encode, is_namedtuple, map_leaves, split_tensors
from accmt.errors import CheckpointError, fail
from accmt.glances import digest_glance, digest_state, digest_text, pickle_plain
from accmt.messages import warn_once
from accmt.module import OF_RUN, AcceleratorModule
from accmt.secrets import is_secret
from accmt.sharded_tensors import is_dtensor, is_expanded, write_into
from accmt.state import Stateful

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
        is_plain: Whether there are only numbers, strings, and collections of them.
    """

    digest: str
    size: int = 0
    is_storable: bool = False
    has_tensors: bool = False
    is_plain: bool = False


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
        shared_digests: Digests of what the last state contains for all processes: they should be the same on each.
    """

    def __init__(
        self, owners: Mapping[str, Any], model: nn.Module, device: torch.device, objects: Iterable[Any]
    ) -> None:
        self._owners = owners
        self._process_names: set[str] = set()
        for name, owner in owners.items():
            self._process_names |= {f"{name}.{attribute}" for attribute in owner.process_state}
        self.of_process = _ProcessAttributes(self, self._process_names) if self._process_names else None
        self._device = device
        parts = (*model.modules(), *model.parameters(), *model.buffers(), *objects)
        plain = (*SIMPLE, list, tuple, dict, set)  # True is the same object everywhere
        self._of_run = {id(part): part for part in parts if type(part) not in plain}
        self._loaded: dict[str, Any] = {"values": {}, "digests": {}, "deleted": []}
        self._places: set[str] | None = None
        self._copies: Mapping[str, Any] = {}
        self._before: dict[str, _Look] | None = None
        self._latest: dict[str, _Look] = {}
        self.changed: set[str] = set()
        self.shared_digests: dict[str, str] = {}

    def begin(self) -> None:
        """Restore the checkpoint's values, which hooks of the start may have set again, and begin to compare."""
        self._restore(self._loaded)
        places: set[str] = set()
        for name, value in self._find().items():
            with suppress(RecursionError):  # a list may contain itself
                map_leaves(value, name, (nn.Module, Stateful), lambda _, path: places.add(path))
        self._places = places
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
        for name, look in self._latest.items():
            if name not in before or before[name].digest != look.digest:
                self.changed.add(name)

    def capture(self, *, compares: bool) -> dict[str, Any] | None:
        """Return copies of what is known to change, the smallest first; None if nothing was compared so far.

        Args:
            compares: Whether others may have changed, or may change from here on: all are compared and copied.
        """
        if self._before is None:
            return None
        if compares:
            self.compare()
        names = self._latest.keys() if compares else self.changed
        if not names:
            return {}
        values, copies, total_size = self._find(), {}, 0
        sizes = [(self._latest[name].size, name) for name in names & values.keys() & self._latest.keys()]
        for size, name in sorted(sizes):
            total_size += size
            # This happens after each step; what has no copy is compared before an emergency checkpoint is written.
            if self._latest[name].is_storable and total_size <= _LARGEST_COPIES:
                copies[name] = self._copy(name, values[name])
        return copies

    def _copy(self, name: str, value: Any) -> Any:
        content = pickle_plain(value) if self._latest[name].is_plain else None
        return copy_state(self._to_state(name, value)) if content is None else _Pickled(content)

    def find_changed(self, copies: Mapping[str, Any] | None) -> list[str]:
        """Return the attributes without a copy in `capture` that have changed, or may have, since it was made."""
        if copies is None:
            return []
        looks, changed = self._look_at_all(), []
        for name in sorted({**self._latest, **looks}.keys() - copies.keys()):
            look = looks.get(name)  # None if the step has deleted it
            if look != self._latest.get(name) and (look is None or look.is_storable):
                changed.append(name)
        return changed

    @contextmanager
    def at(self, copies: Mapping[str, Any] | None) -> Iterator[None]:
        """Let `state_dict` return values from `capture` in place of the current ones."""
        self._copies = copies or {}
        try:
            yield
        finally:
            self._copies = {}

    def state_dict(self) -> dict[str, Any]:
        """Return what training has changed, and digests of tensors that it has not."""
        if self._before is None:
            return self._loaded
        self.compare()
        # Of unchanged tensors too: `begin` of the next run warns of those that the constructor draws again.
        digests = {}
        for name, look in self._latest.items():
            if look.has_tensors and name not in self.changed:
                digests[name] = look.digest
        values = self.collect(self.changed - self._process_names)
        self.shared_digests = {name: digest_state(value) for name, value in values.items() if not _is_sharded(value)}
        deleted = self._before.keys() | set(self._loaded["deleted"])
        deleted -= self._latest.keys() | self._copies.keys() | self._process_names
        return {"values": values, "digests": {self._device.type: digests}, "deleted": sorted(deleted)}

    def collect(self, names: Set[str]) -> dict[str, Any]:
        """Return the values of attributes as a checkpoint contains them; those that it cannot contain are named."""
        values, state = self._find(), {}
        for name in sorted((values.keys() | self._copies.keys()) & names):
            if name in self._copies:
                copied = self._copies[name]
                state[name] = pickle.loads(copied.content) if isinstance(copied, _Pickled) else copied
            elif self._latest[name].is_storable:
                state[name] = self._to_state(name, values[name])
            else:
                self._name_unstorable(name, values[name])
        return {name: value for name, value in _without_secrets(state).items() if not _is_of_run(value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the attributes from `state_dict`; `begin` does so again."""
        self._loaded = {**state, "values": dict(state["values"])}
        self._restore(copy_state(state), is_final=False)

    def load_also(self, values: Mapping[str, Any]) -> None:
        """Restore further attributes, which each process has for itself."""
        self._loaded["values"] |= values
        self._restore({"values": copy_state(values)}, is_final=False)

    def collect_all(self) -> dict[str, Any]:
        """Return all attributes that a checkpoint can contain, whether or not training has changed them."""
        looks = self._look_at_all()
        return {name: self._to_state(name, value) for name, value in self._find().items() if looks[name].is_storable}

    @contextmanager
    def keeping(self, *, unchanged: bool = False) -> Iterator[None]:
        """Restore the attributes that training has changed afterwards; with `unchanged`, the others as well.

        What the code within has not changed is left alone: loading a state into an optimizer may disturb it.
        """
        before = self._look_at_all()
        values = self.collect_all()
        if not unchanged:
            values = {name: value for name, value in values.items() if name in self.changed}
        copies = copy_state(values)
        yield
        after = self._look_at_all()
        changed = {name: value for name, value in copies.items() if after.get(name) != before[name]}
        added = after.keys() - before.keys() if unchanged else ()
        self._restore({"values": changed, "deleted": added})

    def _find(self) -> dict[str, Any]:
        values = {}
        for owner_name, owner in self._owners.items():
            for name, value in _attributes_of(owner).items():
                if id(value) not in self._of_run:  # such as `self.encoder = self.model.encoder`
                    values[f"{owner_name}.{name}"] = value
        return values

    def _look_at_all(self) -> dict[str, _Look]:
        return {name: self._look_at(name, value) for name, value in self._find().items()}

    def _look_at(self, name: str, value: Any) -> _Look:
        content = pickle_plain(value)
        if content is not None:
            is_storable = len(content) <= _LARGEST_STORED
            return _Look(xxhash.xxh3_64_hexdigest(content), len(content), is_storable, is_plain=True)
        try:
            tensors, structure = split_tensors(self._to_state(name, value))
            text = encode(structure)
            size = len(text) + sum(tensor.nbytes for tensor in tensors.values())
            digest = digest_text(f"{text} {[checksum(tensor) for tensor in tensors.values()]}")
            return _Look(digest, size, size <= _LARGEST_STORED, bool(tensors))
        except (CheckpointError, RecursionError):  # a list may contain itself
            return _Look(digest_glance(value))

    def _to_state(self, name: str, value: Any) -> Any:
        """Return a value with plain data in place of modules and objects; tensors are shared."""
        return map_leaves(value, name, (Tensor, nn.Module, Stateful), self._describe)

    def _describe(self, value: Any, path: str) -> Any:
        if id(value) in self._of_run:
            return {_OF_RUN: True}
        if isinstance(value, Tensor):
            return value if value.device.type == "cpu" else {_ON_DEVICE: value}
        if self._places is not None and path not in self._places:
            # A resumed run has nothing that its state could be restored to, as in a list of snapshots of the model.
            expected, do = "objects that exist when training begins", "create it in __init__ or on_fit_start"
            raise fail(CheckpointError, path, got=f"a new {type(value).__name__}", expected=expected, do=do)
        try:
            if isinstance(value, nn.Module):
                return {_MODULE: self._state_of(value)}
            return {_OBJECT: self._to_state(path, value.state_dict())}
        except Exception as error:
            # A library's object may need arguments, or be unable to say its state now: it is named if it changes.
            got, do = f"{type(error).__name__} in state_dict: {error}", "see there"
            raise fail(CheckpointError, type(value).__name__, got=got, expected="a state", do=do) from error

    def _state_of(self, module: nn.Module) -> dict[str, Any]:
        """Return a module's state with all its buffers, without what belongs to the run's model."""
        state = {**dict(module.named_buffers()), **module.state_dict(keep_vars=True)}
        return {name: part for name, part in state.items() if id(part) not in self._of_run and not is_lazy(part)}

    def _name_unstorable(self, name: str, value: Any) -> None:
        size = f" of more than {_LARGEST_STORED >> 30} GiB" if self._latest[name].size else ""
        what = f"{name} has changed since training began, and a checkpoint cannot contain this {type(value).__name__}"
        do = "return what the next step needs of it from `state_dict`, as numbers and tensors, and restore it in "
        do += "load_state_dict (of the module, the callback, or the object itself)"
        warn_once(f"{what}{size}: {do}", about=f"attribute {name}")

    def _restore(self, state: Mapping[str, Any], *, is_final: bool = True) -> None:
        current = self._find()
        merge = _Merge(self._device, self._state_of)
        for path, saved in state["values"].items():
            owner_name, _, name = path.rpartition(".")
            if owner_name not in self._owners:  # a callback that the resumed run does not have
                continue
            try:
                value = merge.into(current.get(path), saved, path)
            except _MissingError as error:
                if is_final:  # otherwise, on_fit_start may create it
                    do = "create it in __init__ or on_fit_start, and another one for each name"
                    warn_once(f"{path}: {error}, so it is not restored: {do}", about=f"attribute {path}")
                continue
            if value is not current.get(path):
                setattr(self._owners[owner_name], name, value)
        for path in state.get("deleted", ()):
            owner_name, _, name = path.rpartition(".")
            if path in current:
                delattr(self._owners[owner_name], name)


def _without_secrets(value: Any, path: str = "") -> Any:
    """Return the state of attributes with a mark in place of each secret, which is named.

    The states of modules and objects are left as they are: their `load_state_dict` may need all that is in them.
    """
    if type(value) in (dict, OrderedDict, defaultdict) and value.keys().isdisjoint((_MODULE, _OBJECT)):
        state = copy.copy(value)
        for key, item in value.items():
            place = f"{path}.{key}" if path else str(key)
            if isinstance(key, str) and is_secret(key.rpartition(".")[2], item):
                what = f"{place} has a secret's name, so checkpoints do not contain it"
                warn_once(f"{what}: set it in on_fit_start, or rename it if it is none", about=f"secret {place}")
                state[key] = {_OF_RUN: True}
            else:
                state[key] = _without_secrets(item, place)
        return state
    if type(value) in (list, tuple) and not set(map(type, value)) <= SIMPLE:
        return type(value)(_without_secrets(item, f"{path}.{index}") for index, item in enumerate(value))
    return value


def _is_of_run(saved: Any) -> bool:
    return isinstance(saved, dict) and _OF_RUN in saved


class _ProcessAttributes:
    """The attributes that each process has for itself, as their owners declare in `process_state`."""

    def __init__(self, attributes: Attributes, names: set[str]) -> None:
        self._attributes, self._names = attributes, names

    def state_dict(self) -> dict[str, Any]:
        return self._attributes.collect(self._attributes.changed & self._names)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._attributes.load_also(state)


class _Pickled(NamedTuple):
    """A copy of plain data, made by `pickle_plain`."""

    content: bytes


class _MissingError(Exception):
    """A saved value needs an object that the program does not have now."""


class _Merge:
    """Gives the objects of a program the values of a checkpoint, in place where they exist: others may refer to them.

    Two attributes that were the same at the start, as in `self.h = self.c = torch.zeros(4)`, may differ in the
    checkpoint: only the first is written in place.
    """

    def __init__(self, device: torch.device, state_of: Any) -> None:
        self._device, self._state_of = device, state_of
        self._written: dict[int, Any] = {}

    def into(self, current: Any, saved: Any, path: str) -> Any:
        """Return the saved value: `current` with other content, or a new object."""
        if type(saved) in (dict, OrderedDict, defaultdict):
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
            # State can only be loaded into an object of the program: creating one would run code that a file names.
            if not is_same_kind or not self._may_write(current, saved):
                got = f"the checkpoint contains the state of an object, which is {type(current).__name__} now"
                raise _MissingError(got)
            if _OBJECT in saved:
                current.load_state_dict(saved[_OBJECT])
            else:
                self._into_module(current, saved[_MODULE], path)
            return current
        by_key = current if isinstance(current, dict) else {}
        entries = {}
        for key, value in saved.items():
            # A part of the run's model, or a secret, is not in the checkpoint: only the program can have it.
            if key in by_key or not _is_of_run(value):
                entries[key] = self.into(by_key.get(key), value, path)
        if type(current) is not type(saved) or not self._may_write(current, saved):
            saved.clear()
            saved.update(entries)
            return saved
        current.clear()
        current.update(entries)
        return current

    def _into_module(self, module: nn.Module, saved: Mapping[str, Any], path: str) -> None:
        parts = self._state_of(module)
        extra_states = {name: value for name, value in saved.items() if not isinstance(value, Tensor)}
        if extra_states:  # what `get_extra_state` returned
            module.load_state_dict(extra_states, strict=False)
        for name, value in saved.items():
            if name in extra_states:
                continue
            tensor = parts.get(name)
            # Otherwise the module would continue with some saved tensors and some new ones.
            if tensor is None or tensor.shape != value.shape:
                got = "nothing of this name" if tensor is None else f"a tensor of shape {tuple(tensor.shape)}"
                expected = f"the checkpoint's tensor of shape {tuple(value.shape)}"
                do = "build it as in the saved run, or start a new run"
                raise fail(CheckpointError, f"{path}: {name}", got=got, expected=expected, do=do)
            write_into(tensor, value)
            self._written[_memory_of(tensor)] = value

    def _into_tensor(self, current: Any, saved: Tensor, device: torch.device) -> Any:
        is_same_kind = isinstance(current, Tensor) and (current.shape, current.dtype) == (saved.shape, saved.dtype)
        # torch cannot write into these, at least outside of inference mode.
        if not is_same_kind or current.is_inference() or is_expanded(current) or current.layout != torch.strided:
            return saved.to(device)
        if self._written.setdefault(_memory_of(current), saved) is saved:
            write_into(current, saved)
        elif not torch.equal(current.detach().cpu(), saved.cpu()):  # it was the same tensor under another name
            return saved.to(device)
        return current

    def _into_sequence(self, current: Any, saved: Any, path: str) -> Any:
        places: list[Any] = [None] * len(saved)
        # Of another length, nothing says which object belongs to which saved state.
        if isinstance(current, list | tuple | deque) and len(current) == len(saved):
            places = list(current)
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


def _memory_of(tensor: Tensor) -> Any:
    is_plain = tensor.layout == torch.strided and tensor.numel() and type(tensor) in (Tensor, nn.Parameter)
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if is_plain else id(tensor)


def _is_sharded(value: Any) -> bool:
    return any(map(is_dtensor, split_tensors(value)[0].values()))


_SET_BY_RUN = {"trainer", "state", "module"}
_OF_LAYERS = frozenset(vars(nn.Module()))


def _attributes_of(owner: Any) -> dict[str, Any]:
    """Return the attributes of a module or callback, without those that a run sets."""
    attributes = dict(vars(owner))
    left_out = _SET_BY_RUN
    if isinstance(owner, AcceleratorModule):
        left_out = {"model", "device", *OF_RUN}
    if isinstance(owner, nn.Module):  # a module may be both
        left_out = left_out | _OF_LAYERS
        attributes.update(owner.named_children())
        attributes.update(owner.named_buffers(recurse=False))
        attributes.update(owner.named_parameters(recurse=False))
    return {name: value for name, value in attributes.items() if name not in left_out}
