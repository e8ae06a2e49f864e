"""Numbers as a person means them: YAML 1.1 takes `1e-3` for a string, and quotes make a string of any number."""

from __future__ import annotations

import math
import re
from typing import Any

_DIGITS = r"\d+(?:_\d+)*"
_WHOLE = re.compile(rf"[+-]?{_DIGITS}")
_DECIMAL = re.compile(rf"[+-]?(?:{_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][+-]?\d+)?")


def number_in(text: str) -> int | float | None:
    """Return the number that `text` spells, or None: "1e-3", ".001", "1_000" and "100" are numbers, "nan" is not."""
    text = text.strip()
    if _WHOLE.fullmatch(text):
        try:
            return int(text)
        except ValueError:  # Python reads at most some thousands of digits
            return None
    return float(text) if _DECIMAL.fullmatch(text) else None


def read_numbers(value: Any) -> Any:
    """Return a copy of `value` with the numbers in its strings read, at any depth."""
    if isinstance(value, str):
        number = number_in(value)
        return value if number is None else number
    if isinstance(value, float):
        return float(value)  # a numpy.float64 is a float that YAML cannot write
    if isinstance(value, dict):
        return {key: read_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(read_numbers, value))
    return value


def is_number(value: Any) -> bool:
    """Return whether a value is a number, which True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_float(value: Any) -> float:
    """Return a number as a float: an integer that is too large for one is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def whole(value: Any) -> Any:
    """Return a float without a fraction as the int it means (`1e5` steps), anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
