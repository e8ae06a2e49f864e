"""Digests of states, and of what a quick look sees of a value that a checkpoint cannot contain."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

import numpy as np
import xxhash
from torch import Tensor

from accmt.checkpoint.frozen import checksum
from accmt.checkpoint.state_dicts import SIMPLE, encode, split_tensors

_NUM_SEEN = 10_000
_DEEPEST = 3


def digest_glance(value: Any) -> str:
    """Return a digest of the first values in an object or collection: types, items, public attributes.

    Objects within objects are not opened: a logger, for example, refers to all other loggers.
    """
    return digest_text(repr(list(islice(_look(value, _DEEPEST, opens_objects=True), _NUM_SEEN))))


def digest_state(state: Any) -> str:
    """Return a digest of what a checkpoint contains of a state."""
    tensors, rest = split_tensors(state)
    return digest_text(f"{encode(rest)} {[checksum(tensor) for tensor in tensors.values()]}")


def digest_text(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


def public_attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes without those that belong to its implementation."""
    attributes = getattr(value, "__dict__", {})
    return {name: attribute for name, attribute in attributes.items() if not name.startswith("_")}


def _look(value: Any, depth: int, *, opens_objects: bool) -> Iterator[object]:
    yield type(value).__qualname__
    if type(value) in SIMPLE:
        yield value
    elif isinstance(value, Tensor | np.ndarray):
        yield repr(value)
    elif isinstance(value, list | tuple | deque | set | frozenset | Mapping):
        parts = chain.from_iterable(value.items()) if isinstance(value, Mapping) else value
        for part in parts if depth else ():
            yield from _look(part, depth - 1, opens_objects=opens_objects)
    # A tokenizer notes which warnings it has given. What has `save_pretrained` is saved with the model.
    elif opens_objects and not isinstance(value, type) and not hasattr(value, "save_pretrained"):
        for name, part in public_attributes(value).items():
            yield name
            yield from _look(part, _DEEPEST, opens_objects=False)
