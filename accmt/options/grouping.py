"""Parameter groups in `optim`: `groups`, `no_decay` and `layer_decay`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from accmt.options.checks import is_off
from accmt.options.yaml_reader import Fault, KeyPath, describe, suggest

GROUPING = ("groups", "no_decay", "layer_decay")
"""The keys of `optim` that are not optimizer arguments."""

KINDS = ("adapter", "bias", "embedding", "matrix", "norm")
"""Kinds of parameters that a group can select."""

SELECTORS = ("match", "kind", "type")
"""The keys of a group that are not arguments of its optimizer."""

_GROUP = "a mapping with `match` or `kind`, and arguments or a `type`"
_EXAMPLE = "groups: [{kind: norm, weight_decay: 0}]"


@dataclass(frozen=True)
class Group:
    """Parameters with separate optimizer arguments, or a separate optimizer.

    Attributes:
        match: Regular expressions; a parameter is in the group if one of them matches in its name. Empty: any name.
        kinds: Kinds of parameters in the group. Empty: any kind.
        optimizer_class: The optimizer of the group; None uses that of the ungrouped parameters.
        arguments: Optimizer arguments that the group sets.
    """

    match: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    optimizer_class: type[Optimizer] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Grouping:
    """How parameters are split into groups; a parameter belongs to the first group that matches it.

    Attributes:
        groups: The groups, in order.
        no_decay: Kinds of parameters with a `weight_decay` of 0, in any group.
        layer_decay: Factor on the learning rate for each layer towards the input. 1 has no effect.
    """

    groups: tuple[Group, ...] = ()
    no_decay: tuple[str, ...] = ()
    layer_decay: float = 1.0

    def __bool__(self) -> bool:
        return self != Grouping()


def split_grouping(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the optimizer arguments and the grouping keys of `optim`."""
    arguments = {name: value for name, value in values.items() if name not in GROUPING}
    return arguments, {name: values[name] for name in GROUPING if not is_off(values.get(name))}


def read_kinds(path: KeyPath, value: Any, faults: list[Fault]) -> tuple[str, ...]:
    """Return the kinds in a string or list."""
    kinds = _words(value)
    for kind in kinds if kinds is not None else [value]:
        if kind not in KINDS:
            do = suggest(str(kind), KINDS, "name one of them, or write a regular expression as `match`")
            faults.append(Fault(path, describe(kind), f"one of {', '.join(KINDS)}, or a list of them", do))
    return tuple(kinds or ())


def read_patterns(path: KeyPath, value: Any, faults: list[Fault]) -> tuple[str, ...]:
    """Return the regular expressions in a string or list."""
    patterns = _words(value)
    if patterns is None:
        expected = "a regular expression that is searched in parameter names, or a list of them"
        faults.append(Fault(path, describe(value), expected, rf"write `{path[-1]}: classifier\.`"))
    for pattern in patterns or ():
        try:
            re.compile(pattern)
        except re.error as error:
            expected = "a regular expression"
            faults.append(Fault(path, f"{pattern!r}: {error}", expected, r"put a backslash before . ( ) [ ] * + ?"))
    return tuple(patterns or ())


def read_layer_decay(path: KeyPath, value: Any, faults: list[Fault]) -> float:
    """Return the factor between the learning rates of adjacent layers."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        faults.append(Fault(path, describe(value), "a number above 0, up to 1", "write `layer_decay: 0.9`"))
        return 1.0
    return float(value)


def group_entries(path: KeyPath, value: Any, faults: list[Fault]) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Yield each valid entry of `groups` with its path; invalid ones are added to `faults`."""
    if isinstance(value, Mapping):  # a single group
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str):
        faults.append(Fault(path, describe(value), "a list of groups", f"write `{_EXAMPLE}`"))
        return
    for number, entry in enumerate(value):
        at = (*path, number)
        if not isinstance(entry, Mapping) or not {"match", "kind"} & entry.keys():
            faults.append(Fault(at, describe(entry), _GROUP, f"write `{_EXAMPLE}`"))
        elif not entry.keys() - {"match", "kind"}:
            expected = "an optimizer argument, or a `type`"
            faults.append(Fault(at, describe(dict(entry)), expected, "add one, such as `lr`, or remove the group"))
        else:
            yield at, {str(key): item for key, item in entry.items()}


def own_arguments(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer arguments in an entry of `groups`."""
    return {name: value for name, value in entry.items() if name not in SELECTORS}


def _words(value: Any) -> list[str] | None:
    items = [value] if isinstance(value, str) else value
    is_list = isinstance(items, list | tuple) and len(items) > 0 and all(isinstance(item, str) for item in items)
    return list(items) if is_list else None
