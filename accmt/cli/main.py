"""`accmt <command> ...`: finds the command, reads its arguments and runs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from accmt.errors import AccmtError, explain
from accmt.version import __version__

COMMANDS = {
    "check": "verify checkpoints and say what is in them",
    "example": "print or write a script to start with",
    "get": "write the weights in a checkpoint as a model folder",
    "launch": "start a training script on one process or several",
    "merge": "merge an adapter into its model",
    "params": "print the parameter groups of hyper-parameters",
    "report": "write one HTML page about a run or several",
    "sft": "fine-tune a causal model on conversations, from one YAML",
    "strats": "list what `accmt launch --strat` takes",
    "sync": "deliver the missing rows to the trackers of a run",
}
"""What each command does. Its module `accmt.cli.<command>` has `add_arguments(parser)` and `run(options) -> int`."""

WRONG_USE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0 for success, 2 for wrong use, and what else the command documents.
    """
    options = _build_parser().parse_args(arguments)
    try:
        exit_code: int = options.run(options)
    except AccmtError as error:
        print(error, file=sys.stderr)
        return WRONG_USE
    except OSError as error:
        is_explained = error.errno is None  # raised with a message of four parts, not by the system
        expected, do = "files and folders that can be read and written", "check the path and its permissions"
        message = str(error) if is_explained else explain(f"accmt {options.called}", str(error), expected, do)
        print(message, file=sys.stderr)
        return WRONG_USE
    return exit_code


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="accmt", description="Train on Accelerate, and inspect what runs wrote.")
    parser.add_argument("--version", action="version", version=f"accmt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, purpose in COMMANDS.items():
        module = import_module(f"accmt.cli.{name}")
        command = commands.add_parser(name, help=purpose, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
        command.set_defaults(run=module.run, called=name)
    return parser


if __name__ == "__main__":  # as `accmt launch` starts commands
    sys.exit(main())
