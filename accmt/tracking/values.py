"""Converts values for trackers: plain floats, flat configurations, and names that each tracker accepts.

None means "no value" and is omitted from a row. NaN and infinities are passed on, so that a diverging run is visible:
`history.jsonl` stores them as the strings "NaN", "Infinity" and "-Infinity", TensorBoard and MLflow keep NaN, and
MLflow's database stores an infinity as the largest float.
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
"""Values of `metrics.<name>` in the configuration of a run."""

Scalar: TypeAlias = str | int | float | bool


def to_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Convert one row to plain Python floats; entries that are None are omitted."""
    numbers = {name: _item(value) for name, value in values.items() if value is not None}
    for name, number in numbers.items():
        if not isinstance(number, int | float):
            got = f"{values[name]!r:.200} ({type(values[name]).__name__})"
            expected = "a number: int, float, bool, or a NumPy or torch scalar"
            do = f"log {name!r} as a number, for example its mean"
            raise MetricError(explain(f"the logged value {name!r}", got, expected, do))
    return {name: as_float(number) for name, number in numbers.items()}


def to_plain(value: Any) -> Any:
    """Convert a configuration to JSON-serializable values: dicts with string keys, lists, scalars and None.

    Classes and functions become their dotted names; all other objects (paths, enums, dtypes) become their `str`.
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
    """Flatten a nested configuration: `{"optim": {"lr": 1}}` becomes `{"optim.lr": 1}`.

    Lists and empty dicts become JSON strings, None becomes "None", because trackers accept scalars only.
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
    """Maps our names to names that one tracker accepts, consistently and without collisions.

    Args:
        clean: Makes a name that the tracker accepts. If two names have the same result, a digest of the original is
            appended to the later one.
        known: Names assigned before, such as by an earlier process; new names are added to it.
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
    """Convert a name to a normalized relative path that cannot leave its folder."""
    return posixpath.normpath(posixpath.join("/", name)).strip("/") or "_"


def clean_file_name(name: str) -> str:
    """Convert the name of a file or folder to a valid artifact name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:128]


def _item(value: Any) -> Any:
    """Return the element of a NumPy or torch scalar; return anything else unchanged."""
    if isinstance(value, float) or getattr(value, "size", None) is None:
        return value
    is_single = (value.numel() if hasattr(value, "numel") else value.size) == 1
    return value.item() if is_single else value
