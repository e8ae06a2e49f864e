"""Digests of states, and of what a quick look sees of a value that a checkpoint cannot contain."""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from itertools import chain, count, islice
from typing import Any

import numpy as np
import xxhash
from torch import Tensor

from accmt.checkpoint.frozen import checksum
from accmt.checkpoint.state_dicts import encode, is_namedtuple, split_tensors

_NUM_SEEN = 100_000
_LONGEST_TEXT = 1_000
_UNIQUE = count()
_DEEPEST = 3


def digest_glance(value: Any) -> str:
    """Return a digest of the first values in an object or collection: types, items, attributes.

    Objects within objects are not opened: a logger, for example, refers to all other loggers.
    """
    try:
        return digest_text(repr(list(islice(_look(value, _DEEPEST, opens_objects=True), _NUM_SEEN))))
    except Exception:  # noqa: BLE001 - whatever an object does when it is looked at
        return type(value).__qualname__


class _NotPlainError(Exception):
    pass


class _PlainPickler(pickle.Pickler):
    """Writes plain data in a hundredth of the time of JSON, only to compare or copy them in this process."""

    def reducer_override(self, value: Any) -> Any:
        kind = value if isinstance(value, type) else type(value)  # the class of a named tuple is written, too
        if kind in _PLAIN_KINDS or is_namedtuple(kind):
            return NotImplemented
        raise _NotPlainError


_PLAIN_KINDS = (complex, deque, OrderedDict, Counter)


def pickle_plain(value: Any) -> bytes | None:
    """Return the bytes of numbers, strings and collections of them; None if there is anything else."""
    buffer = io.BytesIO()
    try:
        _PlainPickler(buffer, protocol=4).dump(value)
    except (_NotPlainError, pickle.PicklingError, RecursionError, AttributeError):
        return None
    return buffer.getvalue()


def digest_state(state: Any) -> str:
    """Return a digest of what a checkpoint contains of a state."""
    tensors, structure = split_tensors(state)
    return digest_text(f"{encode(structure)} {[checksum(tensor) for tensor in tensors.values()]}")


def digest_text(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes, also those in slots, without caches."""
    names = list(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        names += [name for name in getattr(kind, "__slots__", ()) if hasattr(value, name)]
    return {name: getattr(value, name) for name in names if not (name.startswith("__") or "cache" in name)}


def _look(value: Any, depth: int, *, opens_objects: bool) -> Iterator[object]:
    yield type(value).__qualname__
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield xxhash.xxh3_64_hexdigest(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, list | tuple | deque | set | frozenset | Mapping):
        parts = chain.from_iterable(value.items()) if isinstance(value, Mapping) else value
        for part in parts if depth else ():  # a list may contain itself
            yield from _look(part, depth - 1, opens_objects=opens_objects)
    elif hasattr(value, "__next__"):  # it cannot be seen where it is
        yield next(_UNIQUE)
    # A tokenizer notes which warnings it has given. What has `save_pretrained` is saved with the model.
    elif not (isinstance(value, type) or hasattr(value, "save_pretrained")):
        attributes = attributes_of(value) if opens_objects and not isinstance(value, Tensor | np.ndarray) else {}
        if not attributes:
            yield repr(value)[:_LONGEST_TEXT]
        for name, part in attributes.items():
            yield name
            yield from _look(part, _DEEPEST, opens_objects=False)
