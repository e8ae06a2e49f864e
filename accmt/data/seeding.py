"""Randomness derived from the position in training, so that no generator state has to be saved.

Each fetch of a batch and each computation on it is seeded by (seed, purpose, epoch, position). Prefetching, workers
and evaluations in between therefore change nothing.
"""

from __future__ import annotations

import copy
import random
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset, Sampler

_TORCH_DEFAULT = 67280421310721  # torch's initial seed until one is set
_MAX_SEED = 2**63
_RANDOM: Any = getattr(random.seed, "__self__")  # noqa: B009 - the generator of the module's functions
_seed_random = super(random.Random, _RANDOM).seed  # what `random.seed` does for a whole number, without its checks


OWN: list[Any] = []
"""The generators in the user's objects that are seeded together with the global ones."""


def derive_seed(seed: int, purpose: str, *place: int) -> int:
    """Derive a seed (0 to 2**63 - 1) for one purpose ("order", "fetch") at one place (epoch, position, process)."""
    packed = struct.pack(f"<{len(place) + 2}Q", seed % 2**64, zlib.crc32(purpose.encode()), *place)
    return xxhash.xxh3_64_intdigest(packed) % _MAX_SEED


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed torch, numpy and random, and the generator of `device` if it has one.

    Takes about 10 microseconds: `torch.manual_seed` visits every backend and takes ten times as long.
    """
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 - users' datasets draw from the global generator
    _seed_random(seed)
    _RANDOM.gauss_next = None
    if device is not None and device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    elif device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    for own in OWN:
        own.seed(seed)


def set_seed(seed: int, *, workers: bool = True) -> int:
    """Seed torch (all devices), numpy and random.

    Args:
        seed: A whole number from 0.
        workers: Ignored, for compatibility with other trainers: loader workers of a `Trainer` always have distinct,
            reproducible seeds.

    Returns:
        The seed.
    """
    del workers
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002
    torch.manual_seed(seed)
    return seed


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore the state of the global generators afterwards."""
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed the global generators, and restore their state afterwards."""
    with preserve_generators():
        seed_generators(seed)
        yield


def draw_seed() -> int:
    """Return torch's seed if it was set, as by `set_seed`; otherwise one from the operating system."""
    seed = torch.initial_seed()
    return random.SystemRandom().randrange(2**31) if seed == _TORCH_DEFAULT else seed % 2**31


class BatchIndices(list[int]):
    """Indices of one batch, with the seed for fetching it; both are sent to loader workers."""

    def __init__(self, indices: Iterable[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> tuple[type[BatchIndices], tuple[list[int], int]]:
        return type(self), (list(self), self.seed)


# ---- Generators in the user's objects: a `torch.Generator` in a collate function, `self.rng` in a dataset
#
# No checkpoint has their state. Like the global generators, they are seeded by the run's seed and the position in
# training, regardless of the user's seed, and restored after the run. Samplers and streams draw an order while they are
# iterated: their generators are seeded for each epoch, also by the user's seed (`samplers.py`).


T = TypeVar("T")

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_GLOBAL: tuple[Any, ...] = (
    torch.default_generator,
    getattr(np.random.get_state, "__self__"),  # noqa: B009, NPY002 - the generators of the modules' functions
    getattr(random.seed, "__self__"),  # noqa: B009
)
_READ_THROUGH = (IterableDataset, Sampler, DataLoader)
_LEAVES = (str, bytes, int, float, complex, type(None), type, ModuleType, torch.Tensor, np.ndarray)
_LIBRARIES = ("accmt", "datasets", "numpy", "pandas", "pyarrow", "PIL", "tokenizers", "torch", "builtins", "logging")
_OPEN_PARTS = ("accmt.data", "accmt.huggingface", "accmt.addons.curricula", "accmt.addons.mix", "torch.utils.data")
_MAX_OBJECTS = 2000
_MAX_ITEMS = 256
_DRAWN_BY_SYSTEM = 2**64  # numpy's generators without a seed draw 128 bits, others at each start


def find_generators(*owners: Any, through_streams: bool = False) -> list[Any]:
    """Return the generators in objects, at any depth, and those that their functions use as global variables.

    Args:
        owners: The objects.
        through_streams: Whether to look into streams, samplers and loaders in them. Those draw an order while they are
            iterated, so they are seeded for each epoch, not for each batch.
    """
    found: list[Any] = []
    seen: set[int] = set()
    left = deque(owners)
    while left and len(seen) < _MAX_OBJECTS:
        one = left.popleft()  # the nearest first
        if id(one) in seen or isinstance(one, _LEAVES) or not through_streams and isinstance(one, _READ_THROUGH):
            continue
        seen.add(id(one))
        if isinstance(one, _GENERATORS):
            if not (any(one is own for own in _GLOBAL) or isinstance(one, random.SystemRandom)):
                found.append(one)
            continue
        left += _parts_of(one)
    return found


def _parts_of(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping | list | tuple | set):
        if type(value) in (dict, list, tuple, set) and len(value) <= _MAX_ITEMS:
            yield from value.values() if isinstance(value, dict) else value
        return
    if isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                yield cell.cell_contents
        yield from value.__defaults__ or ()
        used = (value.__globals__.get(name) for name in value.__code__.co_names)
        yield from (one for one in used if isinstance(one, _GENERATORS))
    else:
        name = type(value).__module__
        if name.partition(".")[0] in _LIBRARIES and not name.startswith(_OPEN_PARTS):
            return
        with suppress(Exception):  # a proxy of an object that is not there raises whatever it likes
            yield from list(vars(value).values())
        for kind in (kind for kind in type(value).__mro__ if kind.__module__.partition(".")[0] not in _LIBRARIES):
            for slot in getattr(kind, "__slots__", ()):
                with suppress(Exception):
                    yield getattr(value, slot)
            yield from (function for function in vars(kind).values() if isinstance(function, FunctionType))


def user_seed(generator: Any) -> int:
    """Return the seed that the user set on a generator; 0 if it is unknown or was not set."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    seeds: Any = (
        getattr(generator.bit_generator, "seed_seq", None) if isinstance(generator, np.random.Generator) else None
    )
    entropy = getattr(seeds, "entropy", None)
    return entropy if isinstance(entropy, int) and entropy < _DRAWN_BY_SYSTEM else 0


def reseed(generator: Any, seed: int) -> None:
    """Seed a generator of any library in place."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed & 0xFFFFFFFF if isinstance(generator, np.random.RandomState) else seed)


def state_of(generator: Any) -> Callable[[], object]:
    """Return a function that restores the generator's current state."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, generator.get_state())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", copy.deepcopy(generator.bit_generator.state))
    if isinstance(generator, np.random.RandomState):
        return partial(generator.set_state, generator.get_state())
    return partial(generator.setstate, generator.getstate())


class _Seeded:
    """A generator that is seeded together with the global ones."""

    def __init__(self, generator: Any, name: str) -> None:
        self.generator = generator
        self.restore = state_of(generator)
        self._name = name

    def seed(self, seed: int) -> None:
        reseed(self.generator, derive_seed(seed, self._name))


def seed_with_global(*owners: Any) -> list[_Seeded]:
    """Seed the generators in objects together with the global ones until `keeping_generators` ends.

    Returns:
        The newly added generators.
    """
    known = {id(own.generator) for own in OWN}
    new: list[_Seeded] = []
    for owner in owners:
        # Named by the owner's class: a generator made at the first call keeps its name in the next run.
        kind = getattr(owner, "__qualname__", type(owner).__qualname__)
        for number, generator in enumerate(find_generators(owner)):
            if id(generator) not in known:
                known.add(id(generator))
                new.append(_Seeded(generator, f"generator {number} of {kind}"))
    OWN.extend(new)
    return new


@contextmanager
def keeping_generators() -> Iterator[None]:
    """Afterwards, stop seeding the generators added meanwhile, and restore their state."""
    first = len(OWN)
    try:
        yield
    finally:
        for own in OWN[first:]:
            own.restore()
        del OWN[first:]


def call_first(function: Callable[[Any], T], argument: Any, owner: Any) -> T:
    """Call a function for the first time in this process; it may create a generator, as transformers' collators do.

    If so, the generator is seeded and the function called again with a copy of its original argument, so that the first
    call draws the same as a later one would.

    Args:
        function: Reads or collates samples under torch's current seed.
        argument: Its argument.
        owner: The object that may hold the generator.
    """
    seed = torch.initial_seed()
    for own in seed_with_global(owner):
        own.seed(seed)
    try:
        copied = copy.deepcopy(argument)
    except Exception:  # noqa: BLE001 - samples that cannot be copied are collated once
        return function(argument)
    states = [state_of(generator) for generator in (*_GLOBAL, *(own.generator for own in OWN))]
    result = function(argument)
    if not (new := seed_with_global(owner)):
        return result
    for restore in states:
        restore()
    for own in new:
        own.seed(seed)
    return function(copied)
