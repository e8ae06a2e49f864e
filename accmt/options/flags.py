"""Hyper-parameters as flags of a command line: `--hps.optim.lr=3e-4`, over those of a file."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from accmt.options.document import KEYS, Document, Fault, KeyPath, describe

PREFIX = "--hps."
_SHORT = {"optim": "type", "optimizer": "type", "scheduler": "type", "model": "path", "sft": "data"}
"""What a name alone in the place of a mapping stands for."""


def split_flags(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Take the flags of hyper-parameters out of a command line.

    Returns:
        The texts of the flags by dotted key, and the other arguments. What stands behind `--` is left alone.

    Raises:
        ValueError: A flag has no value.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags: dict[str, str] = {}
    rest: list[str] = []
    tokens = iter(arguments[:end])
    for token in tokens:
        if not token.startswith(PREFIX):
            rest.append(token)
            continue
        key, has_value, text = token.removeprefix(PREFIX).partition("=")
        value = text if has_value else next(tokens, "--")
        if not has_value and value.startswith("--"):
            message = f"argument {PREFIX}{key}: expected one argument"
            raise ValueError(message)
        flags[key] = value
    return flags, [*rest, *arguments[end:]]


def overlay(document: Document, flags: Mapping[str, Any]) -> Document:
    """Put values of flags in the place of those of a document; messages name the flag.

    None takes away what the document has.
    """
    values = copy.deepcopy(dict(document.values))
    faults = list(document.faults)
    paths: set[KeyPath] = set()
    for key, value in flags.items():
        path = _path(key, values)
        paths.add(_made(values, path))
        fault = _set(values, path, value)
        faults += [] if fault is None else [fault]
    values = {name: value for name, value in values.items() if value is not None or name not in KEYS}
    return replace(document, values=values, faults=tuple(faults), flags=frozenset(paths))


def _made(values: Any, path: KeyPath) -> KeyPath:
    """Return the part of a path that a flag adds to a document: all of it, or the first key that is not there."""
    for position, part in enumerate(path):
        if not isinstance(values, dict) or part not in values:
            return path[: position + 1] if isinstance(values, dict) else path
        values = values[part]
    return path


def _path(key: str, values: Mapping[str, Any]) -> KeyPath:
    """Return the keys that a dotted one is made of, `optim` under the name that the document has for it."""
    first, *others = key.split(".")
    other_name = {"optim": "optimizer", "optimizer": "optim"}.get(first, first)
    first = other_name if first not in values and other_name in values else first
    return (first, *(int(part) if part.isdecimal() else part for part in others))


def _set(values: dict[str, Any], path: KeyPath, value: Any) -> Fault | None:
    """Set a value at a path, through mappings and lists; what is missing on the way is made."""
    current: Any = values  # a dict or a list
    for position, part in enumerate(path):
        if not _has_place(current, part):
            return _no_place(path, path[:position], current)
        if position == len(path) - 1:
            _put(current, part, value)
            return None
        inner: Any = None if isinstance(current, dict) and part not in current else current[part]
        if inner is None or (part in _SHORT and not isinstance(inner, dict)):
            inner = current[part] = {} if inner is None else {_SHORT[str(part)]: inner}
        current = inner
    return None


def _put(values: Any, key: str | int, value: Any) -> None:
    if value is None and isinstance(values, dict) and key in values:
        del values[key]
    else:
        values[key] = value


def _no_place(path: KeyPath, inside: KeyPath, values: Any) -> Fault:
    name = ".".join(map(str, inside))
    got = f"{name} = {describe(values)}"
    if not isinstance(values, list):
        return Fault(path, got, f"a mapping at {name}", f"write {PREFIX}{name} with a value, or correct the flag")
    expected = (
        f"a number from 0 to {len(values) - 1}, the place in the list {name}" if values else "a list with entries"
    )
    do = f"write {PREFIX}{name} with the whole list in brackets, to add to it"
    return Fault(path, got, expected, do)


def _has_place(values: Any, part: str | int) -> bool:
    if isinstance(values, list):
        return isinstance(part, int) and part < len(values)
    return isinstance(values, dict)
