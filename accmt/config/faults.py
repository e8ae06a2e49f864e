"""What is wrong in a source of hyper-parameters, and how it is said."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

KeyPath = tuple[str | int, ...]

_SHOWN = 5


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, at one key.

    Attributes:
        path: The keys that lead to it, `("optim", "lr")`.
        got: What stands there.
        expected: What could stand there.
        do: What to write instead.
        line: Its line, where that is not the line of `path`.
    """

    path: KeyPath
    got: str
    expected: str
    do: str
    line: int | None = None


def describe(value: Any) -> str:
    """Return a value and its type as messages show them."""
    return f"{value!r} ({type(value).__name__})"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that was probably meant by `name`, upper and lower case aside, or None."""
    spelling = {candidate.lower(): candidate for candidate in names}
    matches = difflib.get_close_matches(name.lower(), spelling, n=1, cutoff=0.6)
    return spelling[matches[0]] if matches else None


def suggest(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return what to do about an unknown `name`: write the nearest one, or `otherwise`."""
    near = nearest(name, names)
    return f"write `{near}`" if near else otherwise


def names_like(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the dotted names that are most like a pattern, or the first ones."""
    parts = {part for name in names for part in (name, *name.split("."))}
    near = difflib.get_close_matches(pattern.replace("\\", ""), sorted(parts), n=1, cutoff=0.6)
    found = [name for name in names if near and near[0] in name]
    return (found or list(names))[:_SHOWN]
