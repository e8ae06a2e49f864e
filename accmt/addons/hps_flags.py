"""Hyper-parameters as command-line flags, `--hps.optim.lr=3e-4`, which override those of a file."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from accmt.errors import describe_value
from accmt.options.checks import KeyFault, KeyPath
from accmt.options.yaml_reader import KEYS, SECTIONS, Document

PREFIX = "--hps."
_SHORT = {
    "optim": "type",
    "optimizer": "type",
    "scheduler": "type",
    **SECTIONS,
}
"""The key that a plain value in place of a mapping sets."""


def split_flags(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split hyper-parameter flags from a command line.

    Returns:
        The strings of the flags by dotted key, and the other arguments. Arguments after `--` are unchanged.

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
    """Override values of a document with flags; messages name the flag.

    None removes a value of the document.
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
    """Return the part of a path that a flag adds to a document: up to the first new key, or all of it."""
    for position, part in enumerate(path):
        if not isinstance(values, dict) or part not in values:
            return path[: position + 1] if isinstance(values, dict) else path
        values = values[part]
    return path


def _path(key: str, values: Mapping[str, Any]) -> KeyPath:
    """Return the keys in a dotted key, with `optim` spelled as in the document."""
    first, *others = key.split(".")
    other_name = {"optim": "optimizer", "optimizer": "optim"}.get(first, first)
    first = other_name if first not in values and other_name in values else first
    return (first, *(int(part) if part.isdecimal() else part for part in others))


def _set(values: dict[str, Any], path: KeyPath, value: Any) -> KeyFault | None:
    """Set a value at a path through mappings and lists; create missing mappings on the way."""
    current: Any = values  # a dict or a list
    for position, part in enumerate(path):
        is_index = isinstance(current, list) and isinstance(part, int) and part < len(current)
        if not (is_index or isinstance(current, dict)):
            inside = ".".join(map(str, path[:position]))
            got = f"{inside} = {describe_value(current)}"
            if not isinstance(current, list):
                do = f"write {PREFIX}{inside} with a value, or correct the flag"
                return KeyFault(path, got, f"a mapping at {inside}", do)
            last = len(current) - 1
            expected = f"an index of the list {inside}, from 0 to {last}" if current else "a list with entries"
            do = f"to add entries, write {PREFIX}{inside} with the whole list in brackets"
            return KeyFault(path, got, expected, do)
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
