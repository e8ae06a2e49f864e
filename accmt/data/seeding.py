"""Randomness that is derived from the place in training, so that no generator's state has to be saved.

Each fetch of a batch and each batch's computation are seeded by (seed, purpose, epoch, position). So prefetching,
workers and evaluations in between change nothing.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash

_TORCH_DEFAULT = 67280421310721  # torch's initial seed until one is set
_MAX_SEED = 2**63
_RANDOM: Any = getattr(random.seed, "__self__")  # noqa: B009 - the generator of the module's functions
_seed_random = super(random.Random, _RANDOM).seed  # what `random.seed` comes to for a whole number, without its checks


OWN: list[Any] = []
"""The generators of the user's objects that are seeded with the global ones: see `own_generators.py`."""


def derive_seed(seed: int, purpose: str, *place: int) -> int:
    """Mix a seed, from 0 to 2**63 - 1, for one purpose ("order", "fetch") at one place (epoch, position, process)."""
    packed = struct.pack(f"<{len(place) + 2}Q", seed % 2**64, zlib.crc32(purpose.encode()), *place)
    return xxhash.xxh3_64_intdigest(packed) % _MAX_SEED


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed torch, numpy and random, and the generator of `device` where it has one of its own.

    About 10 microseconds: `torch.manual_seed` would visit every backend and cost ten times that.
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
        workers: Kept for scripts of other trainers: loader workers of a `Trainer` always have distinct, repeatable
            seeds.

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
    """Return the seed that torch was set to, as by `set_seed`; else one from the operating system."""
    seed = torch.initial_seed()
    return random.SystemRandom().randrange(2**31) if seed == _TORCH_DEFAULT else seed % 2**31


class BatchIndices(list[int]):
    """Indices of one batch, with the seed under which it is fetched; both are sent to loader workers."""

    def __init__(self, indices: Iterable[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> tuple[type[BatchIndices], tuple[list[int], int]]:
        return type(self), (list(self), self.seed)
