"""The `sft` section of the hyper-parameters, and what it shares with other sections for rows of data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from accmt.errors import describe_value
from accmt.options.checks import KeyFault, is_off
from accmt.options.yaml_reader import suggest


class Key(NamedTuple):
    """A key of a section.

    Attributes:
        example: What to write.
        expected: Its valid values.
        is_right: Returns whether a value is valid.
    """

    example: str
    expected: str
    is_right: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_paths(value: Any) -> bool:
    every = list(value.values()) if isinstance(value, Mapping) else [value]
    return bool(value) and all(one and all(isinstance(path, str) for path in as_tuple(one)) for one in every)


def is_flag(value: Any) -> bool:
    """Return whether a value is true or false."""
    return isinstance(value, bool)


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 2


def path_key(example: str) -> Key:
    """Return a key whose value is one path."""
    return Key(example, "a path", _is_text)


def flag_key(name: str) -> Key:
    """Return a key whose value is true or false."""
    return Key(f"{name}: true", "true or false", is_flag)


_PATHS = "a path, a list of paths, or a mapping from the names of several sources to these"

DATA_KEYS: Mapping[str, Key] = {
    "data": Key("data: train.jsonl", _PATHS, _are_paths),
    "validation": Key("validation: validation.jsonl", _PATHS, _are_paths),
    "chat_template": path_key("chat_template: template.jinja"),
    "max_length": Key(
        "max_length: 2048",
        "a whole number of at least 2: each token is predicted from the previous ones",
        _is_length,
    ),
}
"""The keys of every section for rows of data."""


Paths = tuple[str, ...] | Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class DataSection:
    """Rows of data, and how to tokenize them.

    Attributes:
        data: Files or folders with training rows; by name for several sources, which the section `data` mixes.
        validation: Files or folders with validation rows; by name for several sets.
        chat_template: A template file; None uses the tokenizer's template.
        max_length: Number of tokens to keep of each row; None keeps all.
        merge: Whether to merge the adapter into its model at the end.
    """

    data: Paths = ()
    validation: Paths = ()
    chat_template: str | None = None
    max_length: int | None = None
    merge: bool = False


@dataclass(frozen=True)
class SFTSection(DataSection):
    """Data and options for supervised fine-tuning.

    Attributes:
        per_turn: Whether each assistant turn is a separate sample.
    """

    per_turn: bool = False


_KEYS = {**DATA_KEYS, "per_turn": flag_key("per_turn"), "merge": flag_key("merge")}


def read_sft_section(value: Any) -> tuple[SFTSection | None, list[KeyFault]]:
    """Return the section and its errors; a plain path is the path of the data."""
    values, faults = read_keys("sft", value, _KEYS)
    return None if faults else SFTSection(**values), faults


def read_keys(section: str, value: Any, keys: Mapping[str, Key]) -> tuple[dict[str, Any], list[KeyFault]]:
    """Return the values of a section, paths of data as tuples, and its errors.

    Args:
        section: Its name.
        value: The section as written: a mapping, or only the path of the data.
        keys: Its keys by name.
    """
    values = {"data": value} if isinstance(value, str | list) else value
    if not isinstance(values, Mapping):
        expected, do = "a path, or a mapping with `data`", f"write `{section}: {{{keys['data'].example}}}`"
        return {}, [KeyFault((section,), describe_value(value), expected, do)]
    values = {str(name): entry for name, entry in values.items() if not is_off(entry)}  # as unset: each default is off
    faults = []
    for name, entry in values.items():
        if name not in keys:
            do = suggest(name, keys, f"remove `{name}`")
            faults.append(
                KeyFault((section, name), f"{name} = {describe_value(entry)}", f"one of {', '.join(keys)}", do)
            )
        elif not keys[name].is_right(entry):
            do = f"write `{keys[name].example}`"
            faults.append(KeyFault((section, name), describe_value(entry), keys[name].expected, do))
    paths = ("data", "validation")
    return {name: _read_paths(entry) if name in paths else entry for name, entry in values.items()}, faults


def _read_paths(value: Any) -> Paths:
    return {str(name): as_tuple(one) for name, one in value.items()} if isinstance(value, Mapping) else as_tuple(value)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a list or a single value as a tuple."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)
