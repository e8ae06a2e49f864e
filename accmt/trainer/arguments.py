"""The Trainer's arguments from outside the program: from a file, or from the command line."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from torch import nn

from accmt.config import HyperParameters
from accmt.config.flags import split_flags
from accmt.errors import AccmtError, ArgumentError, MissingArgumentError, UnknownArgumentError, explain
from accmt.settings import Settings
from accmt.settings.command_line import list_flags, read_value

ALIASES = {
    "model_saving_aboce": "model_saving_above",
    "callback": "callbacks",
}
"""Other spellings that the original accmt had."""

MISSPELT = ("model_saving_aboce",)

Config: TypeAlias = str | PathLike[str] | Mapping[str, Any]

Init = TypeVar("Init", bound=Callable[..., None])

_STAND_INS: Mapping[str, Any] = {"hps_config": {"epochs": 1, "batch_size": 1, "optim": "SGD"}, "model_path": "model"}
_REQUIRED = tuple(_STAND_INS)
_OF_TRANSFORMERS = ("model", "args", "data_collator", "train_dataset", "eval_dataset")
_EXPECTED = "hyper-parameters, and a folder for the model"
HPS_FLAGS = "hps_flags"
"""Where parsed arguments have the hyper-parameters that were typed, by dotted key."""


def reports_at_call(init: Init) -> Init:
    """Let the Trainer's constructor report its faults where it is called, and also what it was called without.

    An error says where the fault is; the frames of the checks, on each process, would bury that. Without the two
    arguments that it needs, Python would report these alone, and hide what is said of another trainer's arguments.
    """

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], nn.Module):  # by position as transformers has them
            args, kwargs = (), {**dict(zip(_OF_TRANSFORMERS, args, strict=False)), **kwargs}
        if args and is_dataclass(args[0]) and hasattr(args[0], "output_dir"):  # TrainingArguments, or theirs who derive
            args, kwargs = (), {**dict(zip(("args", "model_path"), args, strict=False)), **kwargs}
        missing = [name for name in _REQUIRED[len(args) :] if name not in kwargs]
        try:
            if missing:
                raise _report_missing(missing, lambda stand_ins: init(self, *args, **kwargs, **stand_ins))
            init(self, *args, **kwargs)
        except AccmtError as error:
            raise error.with_traceback(None) from error.__cause__

    return cast(Init, checked)


def _report_missing(missing: list[str], call: Callable[[Mapping[str, Any]], None]) -> MissingArgumentError:
    """Return the error about missing arguments, with all that is wrong beside them."""
    do = 'Trainer({"epochs": 3, "batch_size": 16, "optim": {"type": "AdamW", "lr": 1e-4}}, "out/model"), or the path of'
    do += " a YAML file instead of the dict"
    faults = [explain("Trainer", f"no {' and no '.join(missing)}", _EXPECTED, do)]
    try:
        call({name: _STAND_INS[name] for name in missing})
    except AccmtError as error:
        faults.append(str(error))
    return MissingArgumentError("\n\n".join(faults))


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

        from accmt.config.numbers import read_numbers

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


def resolve_aliases(arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Move arguments under other spellings from `extra` to their own names."""
    resolved = dict(arguments)
    for alias in [name for name in extra if name in ALIASES]:
        name = ALIASES[alias]
        if resolved[name] != Settings.defaults()[name]:
            raise UnknownArgumentError(
                explain(f"Trainer({alias}=..., {name}=...)", "both", "one of them", f"drop {alias}")
            )
        resolved[name] = extra.pop(alias)
        if alias in MISSPELT:
            warnings.warn(f"{alias} is a misspelling; write {name}", DeprecationWarning, stacklevel=3)
    return resolved
