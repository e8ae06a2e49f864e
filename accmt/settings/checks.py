"""Checks of single arguments, with one wording for all."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from accmt.errors import ArgumentError, explain


def require_int(name: str, value: Any, *, at_least: int) -> None:
    """Check a whole number.

    Raises:
        ArgumentError: `value` is not an int, or is below `at_least`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise_wrong_value(name, value, f"a whole number from {at_least}", f"{name}={at_least}")


def require_positive(name: str, value: Any) -> None:
    """Check a number above 0.

    Raises:
        ArgumentError: `value` is not a number, or not above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise_wrong_value(name, value, "a number above 0", f"a positive number, or leave {name} out")


def require_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Check one of a few values.

    Raises:
        ArgumentError: `value` is none of `choices`; the message names the nearest.
    """
    if value not in choices:
        nearest = get_close_matches(str(value), [str(choice) for choice in choices], n=1, cutoff=0.0)
        raise_wrong_value(name, value, "one of " + ", ".join(map(repr, choices)), f"{name}={nearest[0]!r}?")


def raise_wrong_value(name: str, value: Any, expected: str, do: str) -> NoReturn:
    """Raise the error of a Trainer argument with a wrong value.

    Raises:
        ArgumentError: Always.
    """
    raise ArgumentError(explain(f"Trainer({name}=...)", f"{value!r} ({type(value).__name__})", expected, do))
