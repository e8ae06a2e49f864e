"""What `optim` says of groups of parameters: `groups`, `no_decay` and `layer_decay`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from accmt.options.yaml_reader import Fault, KeyPath, describe, suggest

GROUPING = ("groups", "no_decay", "layer_decay")
"""The keys of `optim` that are no arguments of the optimizer."""

KINDS = ("adapter", "bias", "embedding", "matrix", "norm")
"""Kinds of parameters that a group can be of."""

SELECTORS = ("match", "kind", "type")
"""The keys of a group that are no arguments of its optimizer."""

_GROUP = "a mapping with `match` or `kind`, and arguments or a `type`"
_EXAMPLE = "groups: [{kind: norm, weight_decay: 0}]"


@dataclass(frozen=True)
class Group:
    """Parameters that have arguments, or an optimizer, of their own.

    Attributes:
        match: Regular expressions; a parameter is in the group if one of them is found in its name. Empty: any name.
        kinds: Kinds of parameters; one of them has to be the parameter's. Empty: any kind.
        optimizer_class: The optimizer of the group; None is that of all parameters that are in no group.
        arguments: Arguments that are the group's own.
    """

    match: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    optimizer_class: type[Optimizer] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Grouping:
    """How parameters are put into groups; of several groups that fit a parameter, the first one has it.

    Attributes:
        groups: The groups, in order.
        no_decay: Kinds of parameters whose `weight_decay` is 0, in whatever group they are.
        layer_decay: What the learning rate is multiplied by with each layer towards the input. 1 changes nothing.
    """

    groups: tuple[Group, ...] = ()
    no_decay: tuple[str, ...] = ()
    layer_decay: float = 1.0

    def __bool__(self) -> bool:
        return self != Grouping()


def split_grouping(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of an optimizer, and what stands beside them about groups."""
    arguments = {name: value for name, value in values.items() if name not in GROUPING}
    return arguments, {name: values[name] for name in GROUPING if values.get(name) is not None}


def read_kinds(path: KeyPath, value: Any, faults: list[Fault]) -> tuple[str, ...]:
    """Return one kind or several, each once."""
    kinds = _words(value)
    for kind in kinds if kinds is not None else [value]:
        if kind not in KINDS:
            do = suggest(str(kind), KINDS, "name one of them, or write a regular expression as `match`")
            faults.append(Fault(path, describe(kind), f"one of {', '.join(KINDS)}, or a list of them", do))
    return tuple(kinds or ())


def read_patterns(path: KeyPath, value: Any, faults: list[Fault]) -> tuple[str, ...]:
    """Return one regular expression or several."""
    patterns = _words(value)
    if patterns is None:
        expected = "a regular expression that is looked for in the names of parameters, or a list of them"
        faults.append(Fault(path, describe(value), expected, rf"write `{path[-1]}: classifier\.`"))
    for pattern in patterns or ():
        try:
            re.compile(pattern)
        except re.error as error:
            expected = "a regular expression"
            faults.append(Fault(path, f"{pattern!r}: {error}", expected, r"put a backslash before . ( ) [ ] * + ?"))
    return tuple(patterns or ())


def read_layer_decay(path: KeyPath, value: Any, faults: list[Fault]) -> float:
    """Return the factor between the learning rates of two layers."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        faults.append(Fault(path, describe(value), "a number above 0, up to 1", "write `layer_decay: 0.9`"))
        return 1.0
    return float(value)


def group_entries(path: KeyPath, value: Any, faults: list[Fault]) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Give each entry of `groups` that is one, with its path; the others are faults."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        faults.append(Fault(path, describe(value), "a list of groups", f"write `{_EXAMPLE}`"))
        return
    for number, entry in enumerate(value):
        at = (*path, number)
        if not isinstance(entry, Mapping) or not {"match", "kind"} & entry.keys():
            faults.append(Fault(at, describe(entry), _GROUP, f"write `{_EXAMPLE}`"))
        elif not entry.keys() - {"match", "kind"}:
            expected = "an argument that is the group's own, or a `type`"
            faults.append(Fault(at, describe(dict(entry)), expected, "add one, such as `lr`, or remove the group"))
        else:
            yield at, {str(key): item for key, item in entry.items()}


def own_arguments(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the optimizer in an entry of `groups`."""
    return {name: value for name, value in entry.items() if name not in SELECTORS}


def _words(value: Any) -> list[str] | None:
    items = [value] if isinstance(value, str) else value
    is_list = isinstance(items, list | tuple) and len(items) > 0 and all(isinstance(item, str) for item in items)
    return list(items) if is_list else None
