"""What trackers are handed: plain floats, flat configurations, and names that each of them accepts.

None stands for "no value" and is left out of a row. NaN and the infinities go through, for a run that diverges must
look like one: `history.jsonl` writes them as the strings "NaN", "Infinity" and "-Infinity", TensorBoard and MLflow keep
NaN, and MLflow's database keeps an infinity as the largest float.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from zlib import crc32

from accmt.errors import MetricError, explain
from accmt.files import dumps
from accmt.options.checks import as_float

HIGHER_IS_BETTER = "higher is better"
LOWER_IS_BETTER = "lower is better"
"""What the configuration of a run says of a metric, as `metrics.<name>`."""

Scalar: TypeAlias = str | int | float | bool


def to_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Turn one row into plain Python floats; entries that are None are left out."""
    return {name: _to_float(name, value) for name, value in values.items() if value is not None}


def to_plain(value: Any) -> Any:
    """Turn a configuration into what JSON can hold: dicts with string keys, lists, scalars and None.

    Classes and functions become their dotted names, all other objects (paths, enums, dtypes) their `str`.
    """
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, type) or callable(value):
        return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else str(value)
    number = _item(value)
    return number if type(number) in (int, float, bool) else str(value)


def flatten(config: Mapping[str, Any]) -> dict[str, Scalar]:
    """Turn a nested configuration into one level: `{"optim": {"lr": 1}}` becomes `{"optim.lr": 1}`.

    Lists and empty dicts become JSON text, None becomes "None": trackers take scalars only.
    """
    flat: dict[str, Scalar] = {}
    for key, value in to_plain(config).items():
        if isinstance(value, dict) and value:
            flat |= {f"{key}.{inner}": item for inner, item in flatten(value).items()}
        elif isinstance(value, dict | list):
            flat[key] = dumps(value)
        else:
            flat[key] = "None" if value is None else value
    return flat


class CleanNames:
    """The names under which one tracker knows ours: the same name in, the same name out, and never one for two.

    Args:
        clean: Makes a name that the tracker accepts. Where it gives two names the same result, the later one gets a
            digest of its original appended.
        known: Names given before, such as by an earlier process; new ones are added to it.
    """

    def __init__(self, clean: Callable[[str], str], known: dict[str, str] | None = None) -> None:
        self._clean = clean
        self._cleaned = {} if known is None else known
        self._taken = set(self._cleaned.values())

    def rename(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {self._cleaned.get(name) or self._add(name): value for name, value in values.items()}

    def _add(self, name: str) -> str:
        cleaned = self._clean(name)
        if cleaned in self._taken:
            cleaned = f"{cleaned}_{crc32(name.encode()):08x}"
        self._taken.add(cleaned)
        self._cleaned[name] = cleaned
        return cleaned


def clean_path(name: str) -> str:
    """Turn a name into a relative path in its shortest form, which leads out of no folder."""
    return posixpath.normpath(posixpath.join("/", name)).strip("/") or "_"


def clean_file_name(name: str) -> str:
    """Turn the name of a file or folder into one that services take for an artifact."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:128]


def _to_float(name: str, value: Any) -> float:
    number = _item(value)
    if isinstance(number, int | float):
        return as_float(number)
    expected = "one number: int, float, bool, or a NumPy or torch scalar"
    do = f"log {name!r} as a number, for example its mean"
    raise MetricError(explain(f"the logged value {name!r}", f"{value!r:.200} ({type(value).__name__})", expected, do))


def _item(value: Any) -> Any:
    """Return the one element of a NumPy or torch value, and anything else as it is."""
    if isinstance(value, float) or getattr(value, "size", None) is None:
        return value
    is_single = (value.numel() if hasattr(value, "numel") else value.size) == 1
    return value.item() if is_single else value
