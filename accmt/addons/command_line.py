"""Trainer arguments and hyper-parameters from command-line flags or a file."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

from accmt.addons.hps_flags import split_flags
from accmt.errors import ArgumentError, ArgumentFileError, MissingArgumentError, fail
from accmt.options.checks import Options, number_in, read_numbers
from accmt.options.hyperparameters import HyperParameters
from accmt.options.settings import Settings

NOT_TEXT = frozenset(
    {
        "metric_options",
        "callbacks",
        "checkpointer",
        "collate_fn",
        "sampler",
        "tracker_kwargs",
    }
)
"""Arguments whose values are Python objects, which a flag cannot express."""

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
    """A Trainer argument as a command-line flag.

    Attributes:
        name: The argument's name; the flag is `--<name>`.
        meaning: Its description and default.
        kinds: The types of valid values; `Any` allows all.
    """

    name: str
    meaning: str
    kinds: tuple[Any, ...]

    @property
    def expected(self) -> str:
        """The valid types, in short form."""
        names = [name for kind, name in _NAMES.items() if kind in self.kinds]
        return "|".join([*names, *(["none"] if type(None) in self.kinds else [])]) or "value"

    def read(self, text: str) -> Any:
        """Return the value of a flag.

        `true`, `false`, `none` and numbers are read as such, and text that starts with `[` or `{` as YAML, if the
        argument accepts such a value. Anything else is a string.

        Raises:
            ArgumentTypeError: The argument does not accept this value.
        """
        value = read_value(text)
        kind = Mapping if isinstance(value, dict) else Sequence if isinstance(value, list) else type(value)
        if Any in self.kinds or kind in self.kinds or (kind is int and float in self.kinds):
            return value
        if str in self.kinds:
            return text
        raise ArgumentTypeError(f"expected {self.expected}, got {text!r}")


def list_flags() -> list[Flag]:
    """Return a flag for every Trainer argument that a string can express."""
    flags = [Flag("hps_config", "Hyper-parameters: a YAML or JSON file. Required.", (str,))]
    for group in Settings.GROUPS.values():
        hints, meanings = get_type_hints(group), read_meanings(group)
        flags += [
            Flag(
                field.name,
                f"{meanings.get(field.name, '')} "
                + ("Required." if field.default is MISSING else f"Default: {field.default!r}."),
                _kinds_of(hints[field.name]),
            )
            for field in fields(group)
            if field.name not in NOT_TEXT
        ]
    return flags


def _kinds_of(hint: Any) -> tuple[Any, ...]:
    members = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) not in (None, Mapping) else (hint,)
    kinds = (
        get_origin(member) or (Mapping if isinstance(member, type) and issubclass(member, Options) else member)
        for member in members
    )
    named = tuple(Mapping if kind is dict else kind for kind in kinds)
    return (*named, NoneType) if isinstance(hint, type) and issubclass(hint, Options) else named


def read_value(text: str) -> Any:
    """Return the value of a string: a word such as `true`, a number, YAML in brackets, or the string itself.

    Raises:
        ArgumentTypeError: It starts with a bracket, but is not valid YAML.
    """
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text.startswith(("[", "{")):
        import yaml

        try:
            return read_numbers(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise ArgumentTypeError(f"{text!r} is not valid YAML: {' '.join(str(error).split())}") from error
    number = number_in(text)
    return text if number is None else number


_ENTRY = re.compile(r"^    (\w+|\*\*\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def read_meanings(documented: type) -> dict[str, str]:
    """Return the description of each argument from a class's `Args:` section, one line each.

    Args:
        documented: A class with a Google-style docstring; without one (`python -OO`) the result is empty.
    """
    section = inspect.cleandoc(documented.__doc__ or "").partition("Args:\n")[2].split("\n\n")[0]
    return {name: " ".join(text.split()) for name, text in _ENTRY.findall(section)}


Config: TypeAlias = str | PathLike[str] | Mapping[str, Any]


_REQUIRED = ("hps_config", "model_path")
_EXPECTED = "hyper-parameters and a model folder"
HPS_FLAGS = "hps_flags"
"""The attribute of parsed arguments that holds `--hps.` flags, by dotted key."""


def add_flags(parser: argparse.ArgumentParser, without: Sequence[str] = (), *, listed_by: str | None = None) -> None:
    """Add a flag to a parser, in a separate group, for every Trainer argument that a string can express.

    Args:
        parser: The parser.
        without: Arguments without a flag, because the program sets them itself.
        listed_by: The command whose help lists the flags; None for this parser's.

    Raises:
        ArgumentError: The parser already has an argument with one of these names; nothing was added.
    """
    flags = [flag for flag in list_flags() if flag.name not in without]
    actions = parser._actions  # argparse has no public way to list flags and `dest`s
    taken = {
        name for action in actions for name in (action.dest, *(text.lstrip("-") for text in action.option_strings))
    }
    clashes = [f"--{flag.name}" for flag in flags if flag.name in taken]
    if clashes:
        expected = "a parser without flags named like Trainer arguments"
        do = "remove your flag and read the Trainer's, getattr(args, name, default), or rename yours"
        raise fail(ArgumentError, "Trainer.add_argparse_args", got=", ".join(clashes), expected=expected, do=do)
    read_hps_flags(parser)
    about_hps = "every hyper-parameter is a flag too: --hps.epochs 3 --hps.optim.lr=3e-4"
    listed = "" if listed_by is None else f", listed by `{listed_by}`"
    group = parser.add_argument_group("Trainer", f"arguments of accmt.Trainer{listed}; {about_hps}")
    for flag in flags:
        group.add_argument(
            f"--{flag.name}",
            type=flag.read,
            default=argparse.SUPPRESS,  # unset flags must not override a file's values
            metavar=flag.expected,
            help=flag.meaning.replace("%", "%%") if listed_by is None else argparse.SUPPRESS,
        )


def read_hps_flags(parser: argparse.ArgumentParser) -> None:
    """Let a parser read `--hps.<key>`; argparse itself cannot handle flags whose names are unknown in advance."""
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
    """Merge the Trainer's arguments: `others` override typed flags, which override a file or dict.

    Raises:
        MissingArgumentError: `hps_config` or `model_path` is missing.
        ArgumentFileError: There is no such file.
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
        raise fail(MissingArgumentError, "Trainer.from_argparse_args", got=got, expected=_EXPECTED, do=do)
    return arguments


def read_config(config: Config) -> Mapping[str, Any]:
    """Return the arguments in a YAML or JSON file, or in a dict.

    Raises:
        ArgumentError: The file does not contain a mapping.
        ArgumentFileError: There is no such file.
    """
    arguments: Any = config
    if not isinstance(config, Mapping):
        import yaml

        from accmt.options.checks import read_numbers

        if not Path(config).is_file():
            expected, do = "a YAML or JSON file with Trainer arguments", "correct the path"
            got = f"no such file; the working directory is {Path.cwd()}"
            raise fail(ArgumentFileError, f"Trainer.from_config({str(config)!r})", got=got, expected=expected, do=do)
        arguments = read_numbers(yaml.safe_load(Path(config).read_text(encoding="utf-8")))
    if not isinstance(arguments, Mapping):
        got = type(arguments).__name__
        raise fail(
            ArgumentError,
            f"Trainer.from_config({config!r})",
            got=got,
            expected="a mapping from argument names to values",
            do="model_path: out/x",
        )
    read, name = dict(arguments), "grad_accumulation_steps"
    if isinstance(table := read.get(name), Mapping):  # by epoch, and JSON keys are always strings
        read[name] = {int(key) if str(key).isdecimal() else key: value for key, value in table.items()}
    return read
