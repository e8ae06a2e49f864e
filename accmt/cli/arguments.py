"""What several commands have in common: flags that only slow imports know, and how people name run folders."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accmt.errors import ArgumentError, explain
from accmt.tracking.history import HISTORY_FILE

# ---- Flags of a command that only libraries know which are slow to import.


def add_when_parsed(parser: argparse.ArgumentParser, add: Callable[[argparse.ArgumentParser], None]) -> None:
    """Let a parser of a command have further flags, which `add` adds where that command is called."""
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        parser.parse_known_args = parse  # type: ignore[method-assign]
        add(parser)
        return parser.parse_known_args(args, namespace)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


_SHOWN = 10


def require_run(folder: Path, command: str) -> None:
    """Reject a folder that is no run folder; where it holds runs, the message lists them."""
    if (folder / HISTORY_FILE).is_file():
        return
    expected, do = "the folder of a run", "name a run folder: <logging_dir>/<track_name>/<run_name>"
    runs = _find_runs(folder)
    got = f"no {HISTORY_FILE} in it" if folder.is_dir() else "a file" if folder.exists() else "no such folder"
    if runs:
        shown = [f"    accmt {command} {shlex.quote(str(run))}" for run in runs[:_SHOWN]]
        got, do = f"a folder of {len(runs)} run(s)", "\n".join(["take one of them, the newest first:", *shown])
    raise ArgumentError(explain(f"accmt {command} {folder}", got, expected, do))


def _find_runs(folder: Path) -> list[Path]:
    """Return the run folders in a logging folder, or in the folder of a track, the newest first."""
    histories = [*folder.glob(f"*/{HISTORY_FILE}"), *folder.glob(f"*/*/{HISTORY_FILE}")]
    return [path.parent for path in sorted(histories, key=lambda path: path.stat().st_mtime, reverse=True)]
