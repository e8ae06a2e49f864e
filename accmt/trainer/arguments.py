"""The Trainer's arguments outside the program: as a dict, in a file, on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from accmt.errors import ArgumentError, explain

if TYPE_CHECKING:
    from accmt.settings import Settings

_REQUIRED = ("hps_config", "model_path")


class TrainerArguments:
    """Makes a Trainer of arguments that come from elsewhere, and gives its own away."""

    settings: Settings

    def config(self) -> dict[str, Any]:
        """Return the arguments that make an equal Trainer, those at their default left out."""
        return self.settings.to_arguments()

    @classmethod
    def from_config(cls, config: str | PathLike[str] | Mapping[str, Any], **kwargs: Any) -> Self:
        """Make a Trainer of a YAML or JSON file, or a dict, of its arguments.

        Args:
            config: The arguments; `hps_config` may be a path or the hyper-parameters themselves.
            **kwargs: Arguments that no file can hold, such as `log_with`, `sampler` and `collate_fn`; they win.

        Raises:
            ArgumentError: The file holds no mapping.
            FileNotFoundError: There is no such file.
        """
        make: Callable[..., Self] = cls
        return make(**{**_read_config(config), **kwargs})

    @classmethod
    def add_argparse_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Give a parser a flag for every argument of the Trainer that text can hold, in a group of their own.

        Only what is typed appears in the parsed arguments, so that defaults hide nothing.

        Args:
            parser: A parser, perhaps with flags of its own.

        Returns:
            The same parser.

        Raises:
            ArgumentError: It has a flag or an argument of the same name; nothing was added.
        """
        from accmt.settings.command_line import list_flags

        flags = list_flags()
        _refuse_clashes(parser, [flag.name for flag in flags])
        group = parser.add_argument_group("Trainer", "arguments of accmt.Trainer")
        for flag in flags:
            group.add_argument(
                f"--{flag.name}",
                type=flag.read,
                default=argparse.SUPPRESS,
                metavar=flag.expected,
                help=flag.meaning.replace("%", "%%"),
            )
        return parser

    @classmethod
    def from_argparse_args(
        cls,
        args: argparse.Namespace,
        config: str | PathLike[str] | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Make a Trainer of parsed arguments; those that are none of the Trainer's are let be.

        Args:
            args: What a parser with the flags of `add_argparse_args` returned.
            config: A file or dict of arguments, as for `from_config`, which what was typed replaces one by one.
            **kwargs: Arguments from the program; they win over what was typed.

        Raises:
            ArgumentError: `hps_config` or `model_path` is given nowhere, or a value cannot be.
            FileNotFoundError: There is no such file.
        """
        from accmt.settings.command_line import list_flags

        names = {flag.name for flag in list_flags()}
        typed = {name: value for name, value in vars(args).items() if name in names}
        given = {**({} if config is None else _read_config(config)), **typed, **kwargs}
        missing = [f"--{name}" for name in _REQUIRED if name not in given]
        if missing:
            got, expected = f"no {' and no '.join(missing)}", "hyper-parameters, and a folder for the model"
            do = "--hps_config hps.yaml --model_path out/model"
            raise ArgumentError(explain("Trainer.from_argparse_args", got, expected, do))
        return cls.from_config(given)


def _read_config(config: str | PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
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
    """Return the one argument with numbers as keys, which JSON has as text, if it is given so."""
    name = "grad_accumulation_steps"
    table = arguments.get(name)
    if not isinstance(table, Mapping):
        return {}
    return {name: {int(key) if str(key).isdecimal() else key: value for key, value in table.items()}}


def _refuse_clashes(parser: argparse.ArgumentParser, names: list[str]) -> None:
    actions = parser._actions  # argparse tells of flags in no other way, and of a shared `dest` not at all
    taken = {
        name for action in actions for name in (action.dest, *(text.lstrip("-") for text in action.option_strings))
    }
    clashes = [f"--{name}" for name in names if name in taken]
    if clashes:
        expected = "a parser without flags of these names, which are arguments of the Trainer"
        do = "leave yours out, and read the Trainer's: getattr(args, name, default); or rename it"
        raise ArgumentError(explain("Trainer.add_argparse_args", ", ".join(clashes), expected, do))
