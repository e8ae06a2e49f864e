"""Randomness derived from the position in training, so that no generator state has to be saved.

Each fetch of a batch and each computation on it is seeded by (seed, purpose, epoch, position). Prefetching, workers
and evaluations in between therefore change nothing.
"""

from __future__ import annotations

import copy
import random
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

_TORCH_DEFAULT = 67280421310721  # torch's initial seed until one is set
_MAX_SEED = 2**63
_RANDOM: Any = random.seed.__self__  # type: ignore[attr-defined]  # of the module's functions
_seed_random = super(random.Random, _RANDOM).seed  # what `random.seed` does for a whole number, without its checks


USER_GENERATORS: list[Any] = []
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
    _RANDOM.gauss_next = None  # as `random.seed` does: else the first `gauss` would be half of the pair drawn before
    if device is not None and device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    elif device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    for generator in USER_GENERATORS:
        generator.seed(seed)


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
    if torch.initial_seed() == _TORCH_DEFAULT:
        return random.SystemRandom().randrange(2**31)
    return torch.initial_seed() % 2**31


class BatchIndices(NamedTuple):
    """Indices of one batch, with the seed for fetching it; both are sent to loader workers."""

    indices: list[int]
    seed: int


# ---- Generators of the user: direct attributes of data, collate functions, samplers, the module and callbacks
#
# No checkpoint has their state. Like the global generators, they are seeded by the run's seed and the position in
# training, regardless of the user's seed, and restored after the run. Samplers and streams draw an order while they are
# iterated: their generators are seeded for each epoch, also by the user's seed (`samplers.py`). All other generators
# are the user's to seed.


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_GLOBAL: tuple[Any, ...] = (
    torch.default_generator,
    np.random.get_state.__self__,  # type: ignore[attr-defined]  # noqa: NPY002 - the generator of its functions
    _RANDOM,
)
_DRAWN_BY_SYSTEM = 2**64  # numpy's generators without a seed draw 128 bits, others at each start


def find_generators(owner: Any) -> list[Any]:
    """Return the generators that are direct attributes of an object, or of the object of a bound method."""
    if isinstance(owner, MethodType):
        owner = owner.__self__
    generators = []
    for value in getattr(owner, "__dict__", {}).values():
        # The global ones are seeded anyway, and those of the system have no seed.
        if isinstance(value, _GENERATORS) and value not in _GLOBAL and not isinstance(value, random.SystemRandom):
            generators.append(value)
    return generators


def user_seed(generator: Any) -> int:
    """Return the seed that the user set on a generator; 0 if it is unknown or was not set."""
    match generator:
        case torch.Generator():
            return generator.initial_seed()
        case np.random.Generator():  # `random.Random` and `RandomState` do not keep theirs
            seeds = getattr(generator.bit_generator, "seed_seq", None)  # which older versions of numpy do not show
            entropy = getattr(seeds, "entropy", None)
            if isinstance(entropy, int) and entropy < _DRAWN_BY_SYSTEM:
                return entropy
    return 0


def reseed(generator: Any, seed: int) -> None:
    """Seed a generator of any library in place."""
    match generator:
        case torch.Generator():
            generator.manual_seed(seed)
        case np.random.Generator():
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        case np.random.RandomState():  # takes 32 bits
            generator.seed(seed & 0xFFFFFFFF)
        case _:
            generator.seed(seed)


def state_of(generator: Any) -> Callable[[], object]:
    """Return a function that restores the generator's current state."""
    match generator:
        case torch.Generator() | np.random.RandomState():
            state: Any = generator.get_state()
            return partial(generator.set_state, state)
        case np.random.Generator():
            return partial(setattr, generator.bit_generator, "state", copy.deepcopy(generator.bit_generator.state))
        case _:
            return partial(generator.setstate, generator.getstate())


class _Seeded:
    """A generator that is seeded together with the global ones."""

    def __init__(self, generator: Any, name: str) -> None:
        self.generator = generator
        self.restore = state_of(generator)
        self._name = name

    def seed(self, seed: int) -> None:
        reseed(self.generator, derive_seed(seed, self._name))


def seed_with_global(*owners: Any) -> None:
    """Seed the generators of objects together with the global ones until `keeping_generators` ends."""
    for owner in owners:
        _seed_all(find_generators(owner), getattr(owner, "__qualname__", type(owner).__qualname__))


def seed_parts_with_global(whole: Any, parts: Iterable[Any]) -> None:
    """Do the same for the parts of an object, such as the datasets of a mixture; each draws different numbers."""
    _seed_all(list(chain.from_iterable(map(find_generators, parts))), type(whole).__qualname__)


def _seed_all(generators: Iterable[Any], kind: str) -> None:
    known = {id(seeded.generator) for seeded in USER_GENERATORS}
    for number, generator in enumerate(generators):
        if id(generator) not in known:  # dataset and collate function may share one: it keeps its first name
            known.add(id(generator))
            USER_GENERATORS.append(_Seeded(generator, f"generator {number} of {kind}"))


@contextmanager
def keeping_generators() -> Iterator[None]:
    """Afterwards, stop seeding the generators added meanwhile, and restore their state."""
    first = len(USER_GENERATORS)
    try:
        yield
    finally:
        for generator in USER_GENERATORS[first:]:
            generator.restore()
        del USER_GENERATORS[first:]
