"""The schema of hyper-parameters, and one report of everything that violates it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias

from accmt.errors import describe_value
from accmt.options.checks import (
    NOTHING,
    Expected,
    KeyFault,
    KeyPath,
    Range,
    find_faults,
    hints_of,
    is_off,
    shape_of,
    whole,
)
from accmt.options.optimizer_and_scheduler_arguments import ArgumentsAndFaults, check_optimizer, check_scheduler
from accmt.options.optimizer_and_scheduler_names import find_optimizer, find_scheduler
from accmt.options.yaml_reader import SECTIONS, Document, suggest
from accmt.registry import HPS_SECTIONS, addon, find, is_built_in

_MAPPINGS = ("optim", "optimizer", "scheduler", *SECTIONS)
_LIMITS = ("max_samples", "max_target_tokens", "max_tokens", "max_micro_batch_size")
_COUNTS = ("epochs", "max_steps", "batch_size", *_LIMITS)

Count: TypeAlias = Annotated[int, Range(ge=1)]
"""A whole number of at least 1."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The keys below `hps`, with the values that are valid."""

    epochs: Annotated[
        Count | Literal[-1], Expected("a whole number of at least 1, or -1 with max_steps", "epochs: 3")
    ] = -1
    batch_size: Annotated[
        Count | tuple[Count] | tuple[Count, Count] | tuple[Count, Count, Count],
        Expected("a whole number of at least 1, or a list of up to three: train, validation, test", "batch_size: 16"),
    ]
    optim: Annotated[Any, Expected("an optimizer", "optim: {type: AdamW, lr: 1e-4}")] = None
    scheduler: Annotated[Any, Expected("a scheduler", "scheduler: {type: LinearWithWarmup, warmup_ratio: 0.1}")] = None
    max_steps: Annotated[
        Count | Literal[-1], Expected("a whole number of steps from 1, or -1 for no limit", "max_steps: 1000")
    ] = -1
    max_samples: Annotated[Count | None, Expected("a whole number of samples from 1", "max_samples: 1_000_000")] = None
    max_target_tokens: Annotated[
        Count | None, Expected("a whole number of target tokens from 1", "max_target_tokens: 2e9")
    ] = None
    step_scheduler_per_epoch: Annotated[bool, Expected("true or false", "step_scheduler_per_epoch: true")] = False
    max_micro_batch_size: Annotated[
        Count | Literal["auto"] | None,
        Expected('a whole number of at least 1, or "auto"', "max_micro_batch_size: 8"),
    ] = None
    max_tokens: Annotated[Count | None, Expected("a whole number of at least 1", "max_tokens: 4096")] = None
    packing: Annotated[bool, Expected("true or false", "packing: true")] = False
    model: Annotated[Any, Expected("a path, or a mapping with `path`", "model: out/base")] = None
    sft: Annotated[Any, Expected("a path, or a mapping with `data`", "sft: train.jsonl")] = None
    prefer: Annotated[Any, Expected("a path, or a mapping with `data`", "prefer: train.jsonl")] = None
    data: Annotated[Any, Expected("a mapping with `mix`", "data: {mix: {news: 0.5, code: rest}}")] = None
    evaluation: Annotated[
        Any, Expected("a mapping with `generate`", "evaluation: {generate: {max_new_tokens: 64}}")
    ] = None


@dataclass(frozen=True)
class Component:
    """An optimizer or scheduler: the user's value, its factory, and arguments in the types of its signature."""

    user_value: Any = None
    factory: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checked:
    """Hyper-parameters that passed all checks; `document` uses `optim`, not its alias `optimizer`.

    Attributes:
        sections: What add-ons read from their sections, by key; the core does not use it.
    """

    document: Document
    schema: Schema
    optim: Component
    scheduler: Component
    sections: Mapping[str, Any]


def check(document: Document) -> Checked:
    """Check everything in `document`.

    Raises:
        HyperParameterError: Anything is invalid; the message lists every error.
    """
    values = {}
    for key, value in document.values.items():
        # `scheduler: none` and `max_samples: -1` are ways to write that a key is not set.
        is_unset = (key in _MAPPINGS and is_off(value)) or (key in _LIMITS and (is_off(value) or value == -1))
        if not is_unset:
            values[key] = whole(value) if key in _COUNTS else value
    sizes = values.get("batch_size")
    # `[16, null]` of a template sets the first size alone; `[null, 16]` must not set it to the second.
    if isinstance(sizes, list | tuple):
        later = [size for size in sizes[1:] if size is not None]
        values["batch_size"] = tuple(map(whole, [*sizes[:1], *later]))
    document, faults = _with_primary_spelling(replace(document, values=values))
    optim, optim_faults = _check_component(document, "optim", find_optimizer, check_optimizer)
    scheduler, scheduler_faults = _check_component(document, "scheduler", find_scheduler, check_scheduler)

    def suggest_key(key: str) -> str:
        names = [*hints_of(Schema), "optimizer"]
        return addon("hint_for_key")(key, document.values) or suggest(key, names, f"remove `{key}`")

    faults += document.faults
    faults += find_faults(shape_of(Schema), document.values, lambda key, example: f"write `{example}`", suggest_key)
    has_budget = document.values.get("max_samples") is not None or document.values.get("max_target_tokens") is not None
    # Without any limit, the run would never end.
    if document.values.get("epochs", -1) == document.values.get("max_steps", -1) == -1 and not has_budget:
        got = "-1 without max_steps" if "epochs" in document.values else NOTHING
        expected = "a whole number of at least 1, or max_steps"
        faults.append(KeyFault(("epochs",), got, expected, "write `epochs: 3`, or `max_steps: 1000`"))
    # A row has max_tokens tokens: without it, its length is unknown.
    if document.values.get("packing") is True and document.values.get("max_tokens") is None:
        expected = "packing together with max_tokens, the length of a row"
        do = "add for example `max_tokens: 4096`"
        faults.append(KeyFault(("packing",), "true, without max_tokens", expected, do))
    faults += [*optim_faults, *scheduler_faults]

    sections: dict[str, Any] = {}
    for name, value in document.values.items():
        # Sections belong to add-ons, which check them.
        if is_built_in(HPS_SECTIONS, name):
            sections[name], section_faults = find(HPS_SECTIONS, name)(value)
            faults += section_faults
    if faults:
        raise document.reject(_without_misspelt(faults))
    return Checked(document, Schema(**document.values), optim, scheduler, sections)


def _without_misspelt(faults: Sequence[KeyFault]) -> list[KeyFault]:
    """Leave out missing keys that another error tells to write."""
    advice = " ".join(fault.do for fault in faults if fault.got != NOTHING)
    remaining = []
    for fault in faults:
        name = f"`{fault.path[0]}"
        is_key = fault.got == NOTHING and len(fault.path) == 1
        # `batch_sise: 16` is one mistake: a second error about the missing `batch_size` would hide it.
        if not is_key or (f"{name}`" not in advice and f"{name}:" not in advice):
            remaining.append(fault)
    return remaining


def _with_primary_spelling(document: Document) -> tuple[Document, list[KeyFault]]:
    """Return the document with `optim` in place of its alias `optimizer`."""
    if "optimizer" not in document.values:
        return document, []
    values = dict(document.values)
    optimizer = values.pop("optimizer")
    if "optim" in values:
        got = "both `optim` and its alias `optimizer`"
        return replace(document, values=values), [KeyFault(("optimizer",), got, "one of them", "remove `optimizer`")]
    lines: dict[KeyPath, int] = {}
    for path, line in document.lines.items():
        if path[:1] == ("optimizer",):
            lines["optim", *path[1:]] = line
        else:
            lines[path] = line
    return replace(document, values={**values, "optim": optimizer}, lines=lines), []


def _check_component(
    document: Document,
    key: str,
    find: Callable[[Any], Any],
    check_arguments: Callable[[Any, dict[str, Any]], ArgumentsAndFaults],
) -> tuple[Component, list[KeyFault]]:
    """Return an optimizer or scheduler and its errors.

    Args:
        document: The hyper-parameters.
        key: "optim" or "scheduler".
        find: Returns the class for a name, or the error.
        check_arguments: Returns the arguments in the types of the class's signature, and their errors.
    """
    value = document.values.get(key)
    # The module may define its optimizer, and a run needs no scheduler.
    if value is None:
        return Component(), []
    arguments = value
    if _may_be_class(value):
        arguments = {"type": value}
    expected: Expected = hints_of(Schema)[key].__metadata__[0]
    do = f"write `{expected.example}`"
    if not isinstance(arguments, dict):
        return Component(), [KeyFault((key,), describe_value(value), expected.text, do)]
    arguments = {str(name): argument for name, argument in arguments.items()}
    kind = arguments.pop("type", NOTHING)
    if not _may_be_class(kind) or kind is NOTHING:
        got = NOTHING if kind is NOTHING else describe_value(kind)
        return Component(), [KeyFault((key, "type"), got, f"{expected.text}, with its `type`", do)]
    factory = find(kind)
    # The arguments of a class that does not exist cannot be checked.
    if isinstance(factory, KeyFault):
        return Component(kind), [factory]
    arguments, faults = check_arguments(factory, arguments)
    return Component(kind, factory, arguments), faults


def _may_be_class(value: object) -> bool:
    """Return whether a value is a class, a function, or the name of one."""
    return isinstance(value, str) or callable(value)
