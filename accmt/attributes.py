"""The attributes of the user's objects, such as a queue, a counter or a moving average of the model.

These are the module and callbacks, the layers of the user's classes, and the training dataset.

accmt neither trains nor moves them. But what training changes in them belongs to the checkpoint: otherwise, a resumed
run would continue with the values that the constructor sets.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset, Sampler

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
    is_plain,
    is_user_class,
    may_change,
    memory_of,
    pack,
    parts_of,
    text_of,
)
from accmt.callbacks import Callback, MainProcessCallback, name_by_class
from accmt.checkpoint.frozen import checksum
from accmt.checkpoint.state_dicts import encode, split_tensors
from accmt.errors import CheckpointError, explain
from accmt.libraries.private_names import buffers_of, children_of, count_writes, is_made_of_tensors, is_saved
from accmt.messages import warn_once
from accmt.module import OF_RUN
from accmt.sharded_tensors import write_into

_LARGEST_HASHED = 1 << 22
"""Bytes of a tensor whose bits are all compared at each checkpoint."""
_NUM_HASHED = 1 << 16
"""Entries that are compared of a larger one."""
_LARGEST_ARRAY = 1 << 28
"""Bytes of a NumPy array, whose writes are not counted, of which all bits are compared."""
_MOST_SAMPLES = 100
"""Of a collection in a dataset that are compared with all that they contain."""
_MOST_COMPARED = 1 << 18
"""Samples of a dataset that are compared if they are dicts, lists or objects."""
_LARGEST_OF_LAYER = 1 << 20
"""Bytes of a tensor that a layer sets in training and that is still taken for a state."""

T = TypeVar("T")


def name_owners(module: Any, callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Return the objects of a user whose attributes are state: the module, and callbacks without a `state_dict`.

    Callbacks that run only on the main process are left out: processes save and restore the same.
    """
    own = (one for one in callbacks if type(one).state_dict is Callback.state_dict)
    of_users = (one for one in own if not type(one).__module__.startswith("accmt."))
    return {"self": module} | name_by_class(one for one in of_users if not isinstance(one, MainProcessCallback))


def find_datasets(data: Any) -> dict[str, Any]:
    """Return the training dataset, and those within it, whose attributes are state: labels, weights, a difficulty.

    Streams and datasets with a `state_dict` resume by themselves, and the tables of `datasets` do not change.
    """
    found, left = {}, [("train_data", data)]
    seen: set[int] = set()
    while left:
        path, one = left.pop()
        if id(one) in seen or not hasattr(one, "__dict__"):
            continue
        seen.add(id(one))
        held = vars(one)  # a property may fail, or make another dataset each time
        several = held.get("datasets")
        inner = held.get("dataset"), *(several if isinstance(several, list | tuple) else ())
        left += [(f"{path}.{number or 'dataset'}", part) for number, part in enumerate(inner) if part is not None]
        is_left_out = isinstance(one, DataLoader | IterableDataset) or hasattr(one, "state_dict")
        if not is_left_out and _has_state(one, ("torch", "torchvision", "torchaudio")):
            found[path] = one
    return found


def find_samplers(data: Any, *given: Any) -> list[Sampler[Any]]:
    """Return the samplers of the training data, given or in a DataLoader, that cannot restore their state."""
    every = (*given, getattr(data, "batch_sampler", None), getattr(data, "sampler", None))
    samplers = [one for one in every if isinstance(one, Sampler)]
    return [one for one in samplers if not (hasattr(one, "state_at") or hasattr(one, "set_epoch"))]


def _has_state(one: Any, libraries: tuple[str, ...]) -> bool:
    kinds = [kind for kind in type(one).__mro__ if kind is not object]
    return type(one).__module__.partition(".")[0] in libraries or any(map(is_user_class, kinds))


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
        model: The model. Its weights and saved buffers are left out.
        device: The device of the run.
        datasets: The datasets whose attributes are state, by name.
        samplers: The samplers of the training data whose attributes steps may change.
    """

    def __init__(
        self,
        owners: Mapping[str, Any],
        model: nn.Module,
        device: torch.device,
        datasets: Mapping[str, Any],
        samplers: Iterable[Any] = (),
    ) -> None:
        self._owners = owners
        self._model = model
        self._device = device
        self._datasets = datasets
        self._parts: dict[str, Any] = {}
        self._begun_with: set[str] = set()
        self._names: dict[str, tuple[int, list[str]]] = {}
        self._samplers = tuple(samplers)
        self._drawn: dict[str, object] | None = None
        self._counts_of_reads: set[str] = set()
        self._set_by_reading: set[str] | None = None if datasets else set()
        buffers = [one for layer in model.modules() for name, one in buffers_of(layer).items() if is_saved(layer, name)]
        self._of_model = {id(part): part for part in (*model.modules(), *model.parameters(), *buffers)}
        self._tensors: dict[int, tuple[nn.Module, list[Tensor]]] = {}
        self._restored: dict[str, Any] = {}
        self._digests: dict[str, str] = {}
        self._before: dict[str, tuple[object, object]] | None = None

    def begin(self) -> None:
        """Note the values with which training begins, after restoring those of a checkpoint.

        They have been restored before, but hooks of the start may have set them again.
        """
        self._restore(is_last=True)
        values = {**self._find_numbers(), **self._find()}
        self._tensors = {id(one): (one, self._tensors_of(one)) for one in values.values() if isinstance(one, nn.Module)}
        before = {
            name: (self._fingerprint_of(name, value), self._count_writes(value)) for name, value in values.items()
        }
        self._begun_with = {name for name, value in values.items() if isinstance(value, Tensor)}
        parts = {*self._parts, "self.model"}  # buffers are on another device if the run resumes there
        digests = {n: self._digest(value) for n, value in values.items() if n.rpartition(".")[0] not in parts}
        self._digests = {name: digest for name, digest in digests.items() if digest is not None}
        saved = {path: packed["value"] for path, packed in self._restored.items() if _is_digest(packed)}
        for name, digest in saved.items():
            if name in self._digests and self._digests[name] != digest:
                do = "if the constructor draws it at random, call accmt.set_seed before building the module"
                warn_once(f"{name} is not what it was in the saved run: {do}", about=f"attribute {name}")
        self._before = {name: both for name, both in before.items() if name in saved or name not in self._restored}
        self._restored = {}

    def capture(self) -> Captured:
        """Return the current attributes, without reading a tensor."""
        values = self._find()
        writes: dict[str, object] = {}
        for name, value in values.items():
            if type(value) in NUMBERS:
                continue
            if self._is_of_data(name) and not isinstance(value, Tensor):
                writes[name] = None  # not copied after each step: samples are many
                continue
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

    def noting_reads(self, windows: Iterator[T]) -> Iterator[T]:
        """Leave out what reading the first window changes in a dataset, such as a cache, unless it is a number."""
        self._warn_of_samplers()
        before = self._fingerprints_of_data() if self._set_by_reading is None else {}
        first = list(itertools.islice(windows, 1))
        self._drawn = self._fingerprints_of_samplers()
        if self._set_by_reading is not None:
            return itertools.chain(first, windows)
        changed = {name for name, value in self._fingerprints_of_data().items() if before.get(name) != value}
        self._counts_of_reads = {name for name, value in self._find().items() if type(value) in NUMBERS} & changed
        self._set_by_reading = changed - self._counts_of_reads
        return itertools.chain(first, windows)

    def _warn_of_samplers(self) -> None:
        """Warn about a sampler that steps or hooks have changed since it drew the last epoch."""
        now = self._fingerprints_of_samplers()
        changed = [name for name, value in (self._drawn or now).items() if now.get(name) != value]
        if changed:
            what = f"{', '.join(changed)} of the sampler has changed in training, and is not in checkpoints"
            do = "weight the losses of samples instead, for example by what the dataset returns"
            warn_once(f"{what}, so a resumed run may draw another order: {do}", about="sampler")

    def _fingerprints_of_samplers(self) -> dict[str, object]:
        values = [item for one in self._samplers for item in vars(one).items()]
        return {name: self._fingerprint(one) for name, one in values if is_plain(one) and type(one) not in NUMBERS}

    def digests_of_data(self, state: Mapping[str, Any]) -> dict[str, object]:
        """Return digests of what training has changed in the datasets, from `state_dict`."""
        names = (name for name in state if self._is_of_data(name) and name not in self._counts_of_reads)
        return {name: text_of(state[name]) for name in names}

    def _fingerprints_of_data(self) -> dict[str, object]:
        return {name: self._fingerprint_of(name, v) for name, v in self._find().items() if self._is_of_data(name)}

    def collect_all(self) -> dict[str, Any]:
        """Return all attributes that a checkpoint can contain, whether or not training has changed them."""
        state = {}
        for name, value in self._find().items():
            if self._is_of_data(name):  # shared by the runs that are compared
                continue
            with suppress(CheckpointError):
                state[name] = pack(value, self._named_tensors)
        return state

    def describe(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the values that training has changed, as JSON values and tensors."""
        if self._before is None:
            return self._restored
        state = {}
        for name, value in {**self._find_numbers(), **values}.items():
            if name in self._before and self._fingerprint_of(name, value) == self._before[name][0]:
                if name in self._digests:
                    state[name] = {"kind": DIGEST, "value": self._digests[name]}
                continue
            if self._is_of_model(value) or (self._is_of_layer(name) and self._is_output(name, value)):
                continue
            try:
                state[name] = pack(value, self._named_tensors)
                encode(split_tensors(state[name])[1])
            except CheckpointError:
                state.pop(name, None)
                if self._is_of_layer(name):  # a cache by device, for example
                    continue
                what = (
                    f"{name} has changed since training began, but a checkpoint cannot contain {describe_value(value)}"
                )
                do = "return it from `state_dict` as numbers and tensors, and restore it in load_state_dict"
                warn_once(f"{what}: {do}", about=f"attribute {name}")
        return state

    def has_changed(self, name: str, value: Any, writes: object) -> bool:
        """Return whether a captured value that is shared has changed since, or may have."""
        if name in (self._set_by_reading or ()):
            return False
        fingerprint, first_writes = (self._before or {}).get(name, (None, None))
        if self._is_of_data(name) and not isinstance(value, Tensor):  # if it changes at all, it may have changed now
            return self._before is not None and self._fingerprint_of(name, value) != fingerprint
        if self._count_writes(value) != writes:
            return True
        if self._before is None:
            return False
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
        for path, one in self._parts.items():
            own, buffers = vars(one), buffers_of(one) if isinstance(one, nn.Module) else {}
            size, names = self._names.get(path, (0, []))
            if len(own) + len(buffers) != size:  # looked up again only if there are more: this is part of each step
                unsaved = (name for name in buffers if not is_saved(one, name))
                names = [*(name for name in own if name not in _OF_LAYERS), *unsaved]
                self._names[path] = len(own) + len(buffers), names
            for name in names:
                held = own if name in own else buffers
                if name in held and is_plain(held[name]) and id(held[name]) not in self._of_model:
                    found[f"{path}.{name}"] = held[name]
        for name in self._set_by_reading or ():
            found.pop(name, None)
        return found

    def _find_numbers(self) -> dict[str, Any]:
        """Return what hooks may change in torch's own layers, such as the rate of a dropout."""
        return {
            f"self.model.{path}.{name}".replace("..", "."): value
            for path, layer in self._model.named_modules()
            if type(layer).__module__.startswith("torch.")
            for name, value in vars(layer).items()
            if name not in _OF_LAYERS and type(value) in NUMBERS
        }

    def _find_parts(self) -> dict[str, Any]:
        """Return the datasets, and the layers of the user's classes in the model and in attributes, by their names."""
        held = {
            f"{owner}.{name}": value
            for owner, one in self._owners.items()
            for name, value in _attributes_of(one).items()
            if isinstance(value, nn.Module) and name not in _LEFT_OUT
        }
        layers = {
            f"{path}.{name}".rstrip("."): layer
            for path, module in {"self.model": self._model, **held}.items()
            for name, layer in module.named_modules()
            if _has_state(layer, ("torchmetrics",))
        }
        return {**layers, **self._datasets}

    def _is_of_data(self, name: str) -> bool:
        return name.rpartition(".")[0] in self._datasets

    def _is_of_layer(self, name: str) -> bool:
        return name.rpartition(".")[0] in self._parts and not self._is_of_data(name)

    def _is_output(self, name: str, value: Any) -> bool:
        """Return whether an attribute of a layer is what it has computed last, such as its attention."""
        return isinstance(value, Tensor) and value.nbytes > _LARGEST_OF_LAYER and name not in self._begun_with

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

    def _fingerprint_of(self, name: str, value: Any) -> object:
        """Return a value that changes with the attribute; of a dataset's many samples, without looking deep."""
        if not self._is_of_data(name) or type(value) not in COLLECTIONS or len(value) <= _MOST_SAMPLES:
            return self._fingerprint(value)
        items = (*value, *value.values()) if isinstance(value, dict) else tuple(value)
        with suppress(TypeError):
            return len(value), hash(items)
        return len(value), hash(tuple(map(_shallow_hash, items[:: 1 + len(items) // _MOST_COMPARED])))

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
            largest = _LARGEST_ARRAY if type(value) is np.ndarray else _LARGEST_HASHED
            return encode(rest), [(_writes(tensor), _checksum(tensor, largest)) for tensor in found.values()]
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
        self._parts = self._find_parts()
        layers = {f"self.model.{name}".rstrip("."): layer for name, layer in self._model.named_modules()}
        owners = {**layers, **self._parts, **self._owners}
        written: dict[int, Any] = {
            memory_of(part): part for part in self._of_model.values() if isinstance(part, Tensor)
        }
        # A tensor that becomes an attribute is a copy, because steps before `begin` may write into it.
        state = self._restored if is_last else copy.deepcopy(self._restored)
        for path, packed in state.items():
            owner, _, name = path.rpartition(".")
            one = owners.get(owner)
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


_OF_LAYERS = frozenset(vars(nn.Module()))
_LEFT_OUT = frozenset({"model", "module", *OF_RUN, *_OF_LAYERS})


def _shallow_hash(sample: Any) -> int:
    try:
        values = sample.values() if isinstance(sample, dict) else sample
        return hash(tuple(values) if isinstance(sample, dict | list) else values)
    except TypeError:  # it contains lists, for example
        return id(sample)


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


def _checksum(tensor: Tensor, largest: int = _LARGEST_HASHED) -> object:
    """Return a checksum of a tensor, or of entries of a large one: what writes only few counts them as writes."""
    try:
        split_tensors(tensor)
    except CheckpointError:
        return None
    is_large = tensor.nbytes > largest and tensor.is_contiguous() and not is_made_of_tensors(tensor)
    return checksum(tensor.detach().view(-1)[:: tensor.numel() // _NUM_HASHED] if is_large else tensor)


def _place(tensor: Tensor) -> tuple[int, int]:
    is_plain = not is_made_of_tensors(tensor) and tensor.layout == torch.strided
    return tensor.data_ptr() if is_plain else 0, _writes(tensor)


def _writes(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else count_writes(tensor)
