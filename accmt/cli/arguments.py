"""Shared code of commands: flags that need slow imports, and checks of run folders."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accmt.errors import ArgumentError, fail
from accmt.tracking.history import HISTORY_FILE


def add_when_parsed(parser: argparse.ArgumentParser, add: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add flags to a command's parser with `add`, but only when that command is called."""
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        parser.parse_known_args = parse  # type: ignore[method-assign]
        add(parser)
        return parser.parse_known_args(args, namespace)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def read_number(at_least: int) -> Callable[[str], int]:
    """Return the `type` of a flag that is a whole number of at least this."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < at_least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number from {at_least}")
        return int(text)

    return read


_SHOWN = 10


def require_run(folder: Path, command: str) -> None:
    """Raise an error for a folder that is not a run folder; if it contains runs, the message lists them."""
    from accmt.addons.run_folders import find_run_folders

    if (folder / HISTORY_FILE).is_file():
        return
    expected, do = "the folder of a run", "name a run folder: <logging_dir>/<track_name>/<run_name>"
    runs = sorted(find_run_folders(folder), key=lambda run: (run / HISTORY_FILE).stat().st_mtime, reverse=True)
    got = f"no {HISTORY_FILE} in it" if folder.is_dir() else "a file" if folder.exists() else "no such folder"
    if runs:
        shown = [f"    accmt {command} {shlex.quote(str(run))}" for run in runs[:_SHOWN]]
        got, do = f"a folder with {len(runs)} run(s)", "\n".join(["choose one of them (newest first):", *shown])
    raise fail(ArgumentError, f"accmt {command} {folder}", got=got, expected=expected, do=do)
