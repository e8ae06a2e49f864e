"""The Trainer's arguments and the hyper-parameters from outside the program: flags of a command line, or a file."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

from accmt.errors import ArgumentError, MissingArgumentError, explain
from accmt.options.checks import Options, number_in, read_numbers
from accmt.options.hyperparameters import HyperParameters
from accmt.options.settings import Settings
from accmt.options.yaml_reader import split_flags

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
    kinds = (
        get_origin(member) or (Mapping if isinstance(member, type) and issubclass(member, Options) else member)
        for member in members
    )
    named = tuple(Mapping if kind is dict else kind for kind in kinds)
    return (*named, NoneType) if isinstance(hint, type) and issubclass(hint, Options) else named


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


_ENTRY = re.compile(r"^    (\w+|\*\*\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def read_meanings(documented: type) -> dict[str, str]:
    """Return what the `Args:` section of a class says of each argument, in one line each.

    Args:
        documented: A class with a docstring in Google's style; one without has no meanings, as under `python -OO`.
    """
    section = inspect.cleandoc(documented.__doc__ or "").partition("Args:\n")[2].split("\n\n")[0]
    return {name: " ".join(text.split()) for name, text in _ENTRY.findall(section)}


Config: TypeAlias = str | PathLike[str] | Mapping[str, Any]


_REQUIRED = ("hps_config", "model_path")
_EXPECTED = "hyper-parameters, and a folder for the model"
HPS_FLAGS = "hps_flags"
"""Where parsed arguments have the hyper-parameters that were typed, by dotted key."""


def add_flags(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """Give a parser a flag for every argument of the Trainer that text can hold, in a group of their own.

    Args:
        parser: The parser.
        without: Arguments that get no flag, because the program has them in another way.

    Raises:
        ArgumentError: It has a flag or an argument of the same name; nothing was added.
    """
    flags = [flag for flag in list_flags() if flag.name not in without]
    _require_no_clashes(parser, [flag.name for flag in flags])
    read_hps_flags(parser)
    about_hps = "every hyper-parameter is a flag, too: --hps.epochs 3 --hps.optim.lr=3e-4"
    group = parser.add_argument_group("Trainer", f"arguments of accmt.Trainer; {about_hps}")
    for flag in flags:
        group.add_argument(
            f"--{flag.name}",
            type=flag.read,
            default=argparse.SUPPRESS,  # only what is typed appears in the parsed arguments, so defaults hide nothing
            metavar=flag.expected,
            help=flag.meaning.replace("%", "%%"),
        )


def read_hps_flags(parser: argparse.ArgumentParser) -> None:
    """Let a parser read `--hps.<key>`; argparse has no flags whose names are not known before."""
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        try:
            typed, others = split_flags(sys.argv[1:] if args is None else list(args))
            values = {key: read_value(text) for key, text in typed.items()}
        except (ValueError, argparse.ArgumentTypeError) as error:
            parser.error(str(error))
        parsed, unknown = parse(others, namespace)
        if values:
            setattr(parsed, HPS_FLAGS, values)
        return parsed, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def take_typed(args: argparse.Namespace, config: Config | None, others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Trainer's arguments of a file or dict, replaced by those typed, replaced by others.

    Raises:
        MissingArgumentError: `hps_config` or `model_path` is missing.
        FileNotFoundError: There is no such file.
    """
    names = {flag.name for flag in list_flags()}
    typed = {name: value for name, value in vars(args).items() if name in names}
    arguments = {**({} if config is None else read_config(config)), **typed, **others}
    hps_flags = getattr(args, HPS_FLAGS, None)
    if hps_flags:
        arguments["hps_config"] = HyperParameters.from_config(arguments.get("hps_config", {}), hps_flags)
    missing = [f"--{name}" for name in _REQUIRED if name not in arguments]
    if missing:
        got, do = f"no {' and no '.join(missing)}", "--hps_config hps.yaml --model_path out/model"
        raise MissingArgumentError(explain("Trainer.from_argparse_args", got, _EXPECTED, do))
    return arguments


def read_config(config: Config) -> Mapping[str, Any]:
    """Return the arguments that a YAML or JSON file, or a dict, holds.

    Raises:
        ArgumentError: The file holds no mapping.
        FileNotFoundError: There is no such file.
    """
    arguments: Any = config
    if not isinstance(config, Mapping):
        import yaml

        from accmt.options.checks import read_numbers

        if not Path(config).is_file():
            expected, do = "a YAML or JSON file of the Trainer's arguments", "correct the path"
            got = f"no such file, seen from {Path.cwd()}"
            raise FileNotFoundError(explain(f"Trainer.from_config({str(config)!r})", got, expected, do))
        arguments = read_numbers(yaml.safe_load(Path(config).read_text(encoding="utf-8")))
    if isinstance(arguments, Mapping):
        return {**arguments, **_read_table(arguments)}
    got = type(arguments).__name__
    raise ArgumentError(explain(f"Trainer.from_config({config!r})", got, "arguments by name", "model_path: out/x"))


def _read_table(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the one argument with numbers as keys, which JSON has as text, if it is such a table."""
    name = "grad_accumulation_steps"
    table = arguments.get(name)
    if not isinstance(table, Mapping):
        return {}
    return {name: {int(key) if str(key).isdecimal() else key: value for key, value in table.items()}}


def _require_no_clashes(parser: argparse.ArgumentParser, names: list[str]) -> None:
    actions = parser._actions  # argparse has no other way to list flags, and none at all to find a shared `dest`
    taken = {
        name for action in actions for name in (action.dest, *(text.lstrip("-") for text in action.option_strings))
    }
    clashes = [f"--{name}" for name in names if name in taken]
    if clashes:
        expected = "a parser without flags of these names, which are arguments of the Trainer"
        do = "leave yours out, and read the Trainer's: getattr(args, name, default); or rename it"
        raise ArgumentError(explain("Trainer.add_argparse_args", ", ".join(clashes), expected, do))
