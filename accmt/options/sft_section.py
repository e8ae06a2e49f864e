"""The section `sft` of hyper-parameters: the data of supervised fine-tuning, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accmt.options.yaml_reader import Fault, describe, suggest

_PATHS, _FLAGS = ("data", "validation"), ("per_turn", "merge")
_EXAMPLES = {
    "data": "data: train.jsonl",
    "validation": "validation: validation.jsonl",
    "chat_template": "chat_template: template.jinja",
    "max_length": "max_length: 2048",
    "per_turn": "per_turn: true",
    "merge": "merge: true",
}


@dataclass(frozen=True)
class SFTSection:
    """What is read, and how it is trained on.

    Attributes:
        data: Files or folders of the rows to train on.
        validation: Those to evaluate on.
        chat_template: A file in the place of the tokenizer's own; None is that.
        max_length: How many tokens of a row are kept; None is all.
        per_turn: Whether each turn of the assistant is a sample of its own.
        merge: Whether the adapter is merged into its model in the end.
    """

    data: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    chat_template: str | None = None
    max_length: int | None = None
    per_turn: bool = False
    merge: bool = False


def read_sft_section(value: Any) -> tuple[SFTSection | None, list[Fault]]:
    """Return the section, and all that is wrong with its form; a path alone is that of the data."""
    values = {"data": value} if isinstance(value, str | list) else value
    if not isinstance(values, Mapping):
        expected, do = "a path, or a mapping with `data`", f"write `sft: {{{_EXAMPLES['data']}}}`"
        return None, [Fault(("sft",), describe(value), expected, do)]
    values = {str(name): entry for name, entry in values.items() if entry is not None}
    faults = [fault for name, entry in values.items() if (fault := _fault(name, entry)) is not None]
    if faults:
        return None, faults
    arguments: dict[str, Any] = {n: _as_list(entry) if n in _PATHS else entry for n, entry in values.items()}
    return SFTSection(**arguments), []


def _fault(name: str, value: Any) -> Fault | None:
    if name not in _EXAMPLES:
        do = suggest(name, _EXAMPLES, f"remove `{name}`")
        return Fault(("sft", name), f"{name} = {describe(value)}", f"one of {', '.join(_EXAMPLES)}", do)
    is_right, expected = isinstance(value, str), "a path"
    if name in _PATHS:
        is_right, expected = bool(value) and all(isinstance(one, str) for one in _as_list(value)), "a path, or a list"
    elif name in _FLAGS:
        is_right, expected = isinstance(value, bool), "true or false"
    elif name == "max_length":
        is_right = isinstance(value, int) and not isinstance(value, bool) and value >= 2
        expected = "a whole number from 2: a token is predicted from those before it"
    return None if is_right else Fault(("sft", name), describe(value), expected, f"write `{_EXAMPLES[name]}`")


def _as_list(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
