"""Digests of a user's values and objects, to see whether two runs have the same."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from accmt.sharded_tensors import bytes_of

_OF_RUN = {
    "trainer", "state", "model", "teacher", "accelerator", "optimizer", "scheduler", "tracker", "device", "module",
    "logs",
}  # fmt: skip


_OF_LAYERS = frozenset(vars(nn.Module()))


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
    """Return digests of an object's own attributes, and of those of its model's layers, by their path.

    Attributes that a run sets are left out, and so are parameters, buffers and modes of layers.
    """
    attributes = dict(getattr(owner, "__dict__", {}))
    model = attributes.get("model")
    attributes = {name: value for name, value in attributes.items() if name not in _OF_RUN}
    for path, layer in model.named_modules() if isinstance(model, nn.Module) else ():
        names = vars(layer).keys() - _OF_LAYERS
        attributes |= {f"model.{path}.{name}".replace("..", "."): vars(layer)[name] for name in names}
    return {name: digest(value) for name, value in attributes.items() if not inspect.isroutine(value)}


def changed_attributes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the names of attributes that differ."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]
