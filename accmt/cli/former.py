"""Commands and flags of the original accmt, and what to write instead."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from accmt.errors import explain

_EVALUATE = 'Trainer(evaluate_every_n_steps="never") in the script, and `accmt evaluate RUN --watch` beside it'


def find_former_command(arguments: Sequence[str]) -> str | None:
    """Return the error for a command of the original accmt, or None."""
    command = arguments[0] if arguments else ""
    if command == "debug-levels":
        do = "`accmt debug --help`, which lists the levels"
    elif command in ("alaunch", "async-launch", "adebug", "async-debug"):
        name = "debug" if command.endswith("debug") else "launch"
        do = f"`accmt {name} --gpus 0,1 train.py`, with {_EVALUATE}"
    else:
        return None
    return explain(f"accmt {command}", "a command of the original accmt", "a command", do)


class FormerFlag(argparse.Action):
    """A flag of the original accmt: its use is an error with the line to write, its `const`."""

    def __init__(self, option_strings: Sequence[str], dest: str, **others: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **others)

    def __call__(self, parser: argparse.ArgumentParser, *others: Any) -> NoReturn:
        """End with the error."""
        parser.error(f"{'/'.join(self.option_strings)} is a flag of the original accmt; write {self.const}")
