"""The Trainer's arguments as flags of a command line: which there are, and how their text is read."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

from accmt.config.numbers import number_in, read_numbers
from accmt.settings.meanings import read_meanings
from accmt.settings.settings import Settings

NOT_TEXT = frozenset(
    {
        "metric_options",
        "batch_sampler",
        "callbacks",
        "checkpointer",
        "collate_fn",
        "collate_fn_train",
        "collate_fn_val",
        "sampler",
        "sampler_val",
        "tracker_kwargs",
    }
)
"""Arguments that are objects of the program, which no text can name."""

_WORDS = {"true": True, "false": False, "none": None, "null": None}
_NAMES: dict[Any, str] = {
    bool: "true|false",
    int: "int",
    float: "float",
    str: "text",
    Sequence: "list",
    Mapping: "mapping",
}


@dataclass(frozen=True)
class Flag:
    """An argument of the Trainer as a flag.

    Attributes:
        name: That of the argument; the flag is `--<name>`.
        meaning: What it means, and its default.
        kinds: The types that its value may have; `Any` is every one.
    """

    name: str
    meaning: str
    kinds: tuple[Any, ...]

    @property
    def expected(self) -> str:
        """The kinds of values, in a few characters."""
        names = [name for kind, name in _NAMES.items() if kind in self.kinds]
        return "|".join([*names, *(["none"] if type(None) in self.kinds else [])]) or "value"

    def read(self, text: str) -> Any:
        """Return the value that a text spells.

        `true`, `false`, `none` and numbers are what they say, and what begins with `[` or `{` is YAML, where the
        argument may have such a value. Anything else is a text.

        Raises:
            ArgumentTypeError: The argument has no such value.
        """
        value = read_value(text)
        if Any in self.kinds or _is_one_of(value, self.kinds):
            return value
        if str in self.kinds:
            return text
        raise ArgumentTypeError(f"expected {self.expected}, got {text!r}")


def list_flags() -> list[Flag]:
    """Return every argument of the Trainer that text can hold."""
    flags = [Flag("hps_config", "The hyper-parameters: a YAML or JSON file. Required.", (str,))]
    for group in Settings.GROUPS.values():
        hints, meanings = get_type_hints(group), read_meanings(group)
        flags += [
            Flag(field.name, f"{meanings.get(field.name, '')} {_default(field)}", _kinds_of(hints[field.name]))
            for field in fields(group)
            if field.name not in NOT_TEXT
        ]
    return flags


def _default(field: Field[Any]) -> str:
    return "Required." if field.default is MISSING else f"Default: {field.default!r}."


def _kinds_of(hint: Any) -> tuple[Any, ...]:
    members = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) not in (None, Mapping) else (hint,)
    kinds = (get_origin(member) or (Mapping if is_typeddict(member) else member) for member in members)
    return tuple(Mapping if kind is dict else kind for kind in kinds)


def _is_one_of(value: Any, kinds: tuple[Any, ...]) -> bool:
    if isinstance(value, dict):
        return Mapping in kinds
    if isinstance(value, list):
        return Sequence in kinds
    return type(value) in kinds or (type(value) is int and float in kinds)


def read_value(text: str) -> Any:
    """Return what a text spells: a word such as `true`, a number, YAML in brackets, or the text itself.

    Raises:
        ArgumentTypeError: It begins with a bracket, and is no YAML.
    """
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text.startswith(("[", "{")):
        return _read_yaml(text)
    number = number_in(text)
    return text if number is None else number


def _read_yaml(text: str) -> Any:
    import yaml

    try:
        return read_numbers(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ArgumentTypeError(f"{text!r} is not YAML: {' '.join(str(error).split())}") from error
