"""JSON that preserves the exact type and bits of every value, and never executes anything when read.

Values that JSON cannot represent are written as an object with one key that starts with `$`:

| value | written as |
|---|---|
| `(1, 2)` | `{"$tuple": [1, 2]}` |
| `{0: "a"}`, or a dict with a key that starts with `$` | `{"$dict": [[0, "a"]]}` |
| `Counter({3: 1})`, as `MultiStepLR` keeps | `{"$counter": [[3, 1]]}` |
| `inf`, `-inf`, `nan` | `{"$float": "inf"}` |
| an int of more than 53 bits, which other readers would round | `{"$int": "0x20000000000001"}` |
| a tensor, stored elsewhere under a name | `{"$tensor": "model.weight"}` |
| a tensor subclass that wraps other tensors | `{"$wrapped": {"kind": "torchao...", "parts": ...}}` |
| `torch.Size([2])`, `torch.float32` | `{"$size": [2]}`, `{"$dtype": "float32"}` |

None, booleans, strings, lists, other floats (in their shortest exact form) and ints are written as plain JSON.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from accmt.errors import CheckpointCorruptError, CheckpointError, explain

_EXACT_BITS = 53


@dataclass(frozen=True)
class TensorReference:
    """Placeholder in a state for a tensor that is stored elsewhere."""

    name: str


@dataclass(frozen=True)
class WrappedTensor:
    """Placeholder in a state for a tensor subclass that wraps other tensors, such as a quantized tensor.

    Attributes:
        kind: The subclass: its module and name.
        context: Everything but the inner tensors, as returned by `__tensor_flatten__`.
    """

    kind: str
    parts: dict[str, Any]
    context: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def encode(value: Any, where: str = "state") -> str:
    """Encode a value as typed JSON; `where` names it in error messages. An `OrderedDict` is read back as a dict."""
    return json.dumps(_to_json(value, where), allow_nan=False)


def decode(text: str) -> Any:
    """Decode the output of `encode`.

    Raises:
        CheckpointCorruptError: `text` is not valid JSON.
        CheckpointError: `text` contains a mark unknown to this version.
    """
    try:
        return json.loads(text, object_hook=_unmark)
    except json.JSONDecodeError as error:
        got, do = f"invalid JSON: {error}", "resume from another checkpoint"
        raise CheckpointCorruptError(explain("a checkpoint's state", got, "typed JSON", do)) from error


def _to_json(value: Any, where: str) -> Any:
    if isinstance(value, np.generic):  # a scheduler that computes with numpy leaves such values
        value = value.item()
    write = _WRITERS.get(type(value))
    if write is None:
        raise _cannot_store(where, value)
    return write(value, where)


def _cannot_store(where: str, value: Any) -> CheckpointError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return CheckpointError(
        explain(
            where,
            f"a {kind}, which cannot be stored",
            "None, bool, int, float, str, tensors, and lists, tuples and dicts of them (no subclasses)",
            "convert it in `state_dict` (float(x), list(x), torch.as_tensor(x)) and back in `load_state_dict`",
        )
    )


def _write_list(value: Sequence[Any], where: str) -> list[Any]:
    return [_to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]


def _write_dict(value: dict[Any, Any], where: str) -> Any:
    for key in value:
        if type(key) not in (str, int):
            raise _cannot_store(f"a key of {where}: {key!r}", key)
    items = {key: _to_json(item, f"{where}.{key}") for key, item in value.items()}
    if all(type(key) is str and not key.startswith("$") for key in items):
        return items
    return {"$dict": [[_to_json(key, where), item] for key, item in items.items()]}


# Keyed by exact type: a value of a subclass would be read back as its base class.
_WRITERS: dict[type, Callable[[Any, str], Any]] = {
    type(None): lambda value, where: value,
    bool: lambda value, where: value,
    str: lambda value, where: value,
    int: lambda value, where: value if value.bit_length() <= _EXACT_BITS else {"$int": hex(value)},
    float: lambda value, where: value if math.isfinite(value) else {"$float": repr(value)},
    list: _write_list,
    tuple: lambda value, where: {"$tuple": _write_list(value, where)},
    dict: _write_dict,
    OrderedDict: _write_dict,
    Counter: lambda value, where: {"$counter": [[_to_json(key, where), count] for key, count in value.items()]},
    TensorReference: lambda value, where: {"$tensor": value.name},
    WrappedTensor: lambda value, where: {"$wrapped": _write_dict(vars(value), where)},
    torch.Size: lambda value, where: {"$size": list(value)},
    torch.dtype: lambda value, where: {"$dtype": str(value).removeprefix("torch.")},
}

_READERS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda text: int(text, 16),
    "$float": float,
    "$tuple": tuple,
    "$dict": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$tensor": TensorReference,
    "$wrapped": lambda fields: WrappedTensor(**fields),
    "$size": torch.Size,
    "$dtype": lambda name: getattr(torch, name),
}


def _unmark(value: dict[str, Any]) -> Any:
    mark = next(iter(value), "")
    if not mark.startswith("$"):
        return value
    if mark not in _READERS:
        got = f"the mark {mark!r}, which this version of accmt does not know"
        do = "load it with the version of accmt that wrote it (see manifest.json)"
        raise CheckpointError(explain("a checkpoint's state", got, f"one of {', '.join(_READERS)}", do))
    return _READERS[mark](value[mark])
