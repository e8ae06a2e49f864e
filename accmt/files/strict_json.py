"""JSON, and files of JSON lines, that every parser can read.

Python writes `NaN` and `Infinity`, which are not valid JSON. Here they are written as the strings "NaN", "Infinity" and
"-Infinity", and these three strings are always read back as floats.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Format `value` as strict JSON, with non-finite floats as strings."""
    encoder = _ENCODER if indent is None else json.JSONEncoder(allow_nan=False, indent=indent, ensure_ascii=False)
    return encoder.encode(_encode(value))


def loads(text: str) -> Any:
    """Parse the output of `dumps`, including non-finite floats."""
    return _decode(json.loads(text))


def read_json_line(line: bytes) -> Any:
    """Parse one line of JSON; None if it is invalid, such as a block of zeros after a power failure."""
    try:
        return loads(line.decode("utf-8"))
    except (ValueError, RecursionError):  # invalid UTF-8 or JSON, a number with thousands of digits; nested too deeply
        return None


def read_json_lines(path: Path) -> Iterator[Any]:
    """Yield the values of a file of JSON lines, None for invalid lines; a truncated last line is skipped."""
    # In bytes: a crash can truncate the last line inside a character, which a text reader cannot skip.
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield read_json_line(line)


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value
