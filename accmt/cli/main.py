"""`accmt <command> ...`: finds the command, reads its arguments and runs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from accmt.cli.former import find_former_command
from accmt.errors import AccmtError, explain
from accmt.version import __version__

COMMANDS = {
    "check": "verify checkpoints and print their contents",
    "data": "show the data of supervised fine-tuning before anything is trained",
    "debug": "start a training script with parts of its Trainers turned off",
    "diff": "find the first step at which two runs diverge, and why",
    "evaluate": "evaluate the checkpoints of a run beside its training",
    "example": "print or write an example script",
    "fork": "start a new run that continues another one from a step, with changed settings",
    "get": "write the weights of a checkpoint as a model folder",
    "goodput": "print how a run spent its time",
    "launch": "start a training script on one or more processes",
    "merge": "merge an adapter into its model",
    "params": "print the parameter groups of hyper-parameters",
    "prefer": "tune a model on preferences, train a reward model, or distill a teacher, from one YAML file",
    "prove": "check that a script gives the same results on any number of processes",
    "replay": "replay steps of a run, and compare them with its ledger",
    "report": "write an HTML page about one or more runs",
    "runs": "list the runs in a folder, and which is a fork of which",
    "sft": "fine-tune a causal model on conversations, from one YAML file",
    "sweep": "search hyper-parameters with a training script",
    "strats": "list the strategies for `accmt launch --strat`",
    "sync": "deliver missing rows to the trackers of a run",
}
"""The commands. Each module `accmt.cli.<command>` has `add_arguments(parser)` and `run(options) -> int`."""

WRONG_USE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0 for success, 2 for wrong usage, and others that the command documents.
    """
    parser = argparse.ArgumentParser(prog="accmt", description="Train with Accelerate, and inspect runs.")
    parser.add_argument("--version", action="version", version=f"accmt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, purpose in COMMANDS.items():
        module = import_module(f"accmt.cli.{name}")
        command = commands.add_parser(name, help=purpose, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
        command.set_defaults(run=module.run, called=name)
    former = find_former_command(sys.argv[1:] if arguments is None else arguments)
    if former is not None:
        print(former, file=sys.stderr)
        return WRONG_USE
    options = parser.parse_args(arguments)
    try:
        exit_code: int = options.run(options)
    except AccmtError as error:
        print(error, file=sys.stderr)
        return WRONG_USE
    except OSError as error:
        is_explained = error.errno is None  # raised by accmt with a message, not by the operating system
        expected, do = "readable and writable files and folders", "check the path and its permissions"
        message = str(error) if is_explained else explain(f"accmt {options.called}", str(error), expected, do)
        print(message, file=sys.stderr)
        return WRONG_USE
    return exit_code


if __name__ == "__main__":  # as `accmt launch` starts commands
    sys.exit(main())
