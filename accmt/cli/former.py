"""Commands and flags of the original accmt, and what to write instead."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from accmt.errors import explain

_EVALUATE = 'Trainer(evaluate_every_n_steps="never") in the script, and `accmt evaluate RUN --watch` beside it'
_LEVELS = {
    1: "log_with=None",
    2: "compile=False",
    3: "model_saving=None, checkpoint_every=None, resume=False",
    4: "eval_when_start=False",
    5: 'evaluate_every_n_steps="never"',
}
_DEFAULT_LEVEL = "3"


def find_former_command(arguments: Sequence[str]) -> str | None:
    """Return the error for a command of the original accmt, or None."""
    command = arguments[0] if arguments else ""
    name = command.removeprefix("async-").removeprefix("a")
    if name not in ("launch", "debug", "debug-levels") or command == "launch":
        return None
    lines = [] if name == command else [f"`accmt launch --gpus 0,1 train.py`, with {_EVALUATE}"]
    if name != "launch":
        parser = argparse.ArgumentParser(add_help=False)
        parser.add_argument("--level", "-L", "-l", default=_DEFAULT_LEVEL, choices=[str(level) for level in _LEVELS])
        level = int(parser.parse_known_args(arguments[1:])[0].level)
        settings = ", ".join(text for number, text in _LEVELS.items() if number <= level)
        lines.append(
            f"`accmt launch train.py`, with Trainer({settings}) for level {level}; or Trainer(fast_dev_run=True)"
        )
    return explain(f"accmt {command}", "a command of the original accmt", "a command", "; ".join(lines))


class FormerFlag(argparse.Action):
    """A flag of the original accmt: its use is an error with the line to write, its `const`."""

    def __init__(self, option_strings: Sequence[str], dest: str, **others: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **others)

    def __call__(self, parser: argparse.ArgumentParser, *others: Any) -> NoReturn:
        """End with the error."""
        parser.error(f"{'/'.join(self.option_strings)} is a flag of the original accmt; write {self.const}")
