"""Digests of a user's values and objects, to see whether two runs have the same."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from accmt.sharded_tensors import bytes_of

_OF_RUN = {
    "trainer", "state", "model", "teacher", "accelerator", "optimizer", "scheduler", "tracker", "device", "module",
}  # fmt: skip


def digest(value: Any) -> str:
    """Return a digest of a value's bits, or the name of its type if it has none."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {xxhash.xxh3_64_hexdigest(bytes_of(value))}"
    if isinstance(value, Mapping):
        return digest([(str(key), digest(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return xxhash.xxh3_64_hexdigest("".join(map(digest, value)).encode())
    try:
        return xxhash.xxh3_64_hexdigest(pickle.dumps(value))
    except Exception:  # noqa: BLE001 - whatever pickling does
        return type(value).__name__


def digest_attributes(owner: Any) -> dict[str, str]:
    """Return digests of an object's own attributes, without those that a run sets."""
    mine = getattr(owner, "__dict__", {})
    return {name: digest(value) for name, value in mine.items() if name not in _OF_RUN and not inspect.isroutine(value)}


def changed_attributes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the names of attributes that differ."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]
