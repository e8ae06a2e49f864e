"""Randomness that is derived from where training is, so that no generator's state has to be saved.

Each fetch of a batch and each batch's computation get a seed made of (seed, what it is for, epoch, position).
Prefetching, workers and evaluations in between therefore change nothing.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import xxhash

_TORCH_DEFAULT = 67280421310721  # what torch begins with until it is given a seed
_MAX_SEED = 2**63


def derive_seed(seed: int, purpose: str, *place: int) -> int:
    """Mix a seed for one purpose at one place of the run.

    Args:
        seed: The run's seed.
        purpose: What the randomness is for, such as "order" or "fetch".
        place: Whole numbers that name the place: epoch, position, process.

    Returns:
        A seed from 0 to 2**63 - 1.
    """
    packed = struct.pack(f"<{len(place) + 2}Q", seed % 2**64, zlib.crc32(purpose.encode()), *place)
    return xxhash.xxh3_64_intdigest(packed) % _MAX_SEED


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed torch, numpy and random, and the generator of `device` where it has one of its own.

    About 10 microseconds: `torch.manual_seed` would visit every backend and cost ten times that.
    """
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 - users' datasets draw from the global generator
    random.seed(seed)
    if device is not None and device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    elif device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


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
    """Leave the global generators as they were, whatever is drawn and seeded inside."""
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Let code draw from the global generators under a seed, and leave them as they were."""
    with preserve_generators():
        seed_generators(seed)
        yield


def draw_seed() -> int:
    """Return the seed that torch was given, as by `set_seed`; else one from the operating system."""
    given = torch.initial_seed()
    return random.SystemRandom().randrange(2**31) if given == _TORCH_DEFAULT else given % 2**31


class BatchIndices(list[int]):
    """Indices of one batch, with the seed under which it is fetched; both travel to loader workers.

    Args:
        indices: The indices.
        seed: Seed of the fetch.
    """

    def __init__(self, indices: Iterable[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> tuple[type[BatchIndices], tuple[list[int], int]]:
        return type(self), (list(self), self.seed)
