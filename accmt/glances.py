"""What a quick look sees of a value that a checkpoint cannot contain, to notice that training has changed it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import numpy as np
import xxhash
from torch import Tensor

from accmt.checkpoint.state_dicts import SIMPLE

_NUM_SEEN = 10_000
_DEEPEST = 3


def digest_glance(value: Any) -> str:
    """Return a digest of the first values in an object or collection: types, public attributes, items."""
    return digest_text(repr(list(islice(_look(value, _DEEPEST), _NUM_SEEN))))


def digest_text(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


def _look(value: Any, depth: int) -> Iterator[object]:
    yield type(value).__qualname__
    if type(value) in SIMPLE:
        yield value
    elif isinstance(value, Tensor | np.ndarray):
        yield repr(value)
    elif depth and not isinstance(value, type):
        for part in _parts_of(value):
            yield from _look(part, depth - 1)


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple | deque | set | frozenset):
        return value
    if isinstance(value, Mapping):
        return chain.from_iterable(value.items())
    return chain.from_iterable(public_attributes(value).items())


def public_attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes without those that belong to its implementation."""
    attributes = getattr(value, "__dict__", {})
    return {name: attribute for name, attribute in attributes.items() if not name.startswith("_")}
