"""The `sft` section of the hyper-parameters: the data for supervised fine-tuning, and how to use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accmt.options.unusual import is_off
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
    """Data and options for supervised fine-tuning.

    Attributes:
        data: Files or folders with training rows.
        validation: Files or folders with validation rows.
        chat_template: A template file; None uses the tokenizer's template.
        max_length: Number of tokens to keep of each row; None keeps all.
        per_turn: Whether each assistant turn is a separate sample.
        merge: Whether to merge the adapter into its model at the end.
    """

    data: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    chat_template: str | None = None
    max_length: int | None = None
    per_turn: bool = False
    merge: bool = False


def read_sft_section(value: Any) -> tuple[SFTSection | None, list[Fault]]:
    """Return the section and its errors; a plain path is the path of the data."""
    values = {"data": value} if isinstance(value, str | list) else value
    if not isinstance(values, Mapping):
        expected, do = "a path, or a mapping with `data`", f"write `sft: {{{_EXAMPLES['data']}}}`"
        return None, [Fault(("sft",), describe(value), expected, do)]
    values = {str(name): entry for name, entry in values.items() if not is_off(entry)}  # as unset: each default is off
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
        is_right, expected = (
            bool(value) and all(isinstance(one, str) for one in _as_list(value)),
            "a path, or a list of paths",
        )
    elif name in _FLAGS:
        is_right, expected = isinstance(value, bool), "true or false"
    elif name == "max_length":
        is_right = isinstance(value, int) and not isinstance(value, bool) and value >= 2
        expected = "a whole number of at least 2: each token is predicted from the previous ones"
    return None if is_right else Fault(("sft", name), describe(value), expected, f"write `{_EXAMPLES[name]}`")


def _as_list(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
