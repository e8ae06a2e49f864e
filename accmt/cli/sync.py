"""Deliver the missing rows to the trackers of a run, and end the run there with its true status.

For a run that is over: its server was down, it was set to stay offline, or it was killed (then it is closed as KILLED).
Exit code: 0 every tracker has everything, 1 something is left, 2 there is no run, or it is still running.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accmt.tracking import Synced

LEFT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, help="the folder with history.jsonl: logs/<track>/<run>")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="for each tracker (default 600)"
    )
    parser.add_argument("--server", metavar="URL", help="a tracker's URL with its password, which is in no file")


def run(options: argparse.Namespace) -> int:
    from accelerate.state import PartialState

    from accmt.cli.arguments import require_run
    from accmt.tracking import sync_run

    require_run(options.run_folder, "sync")
    PartialState(cpu=True)  # Accelerate's trackers ask it which process this is
    trackers = sync_run(options.run_folder, timeout_s=options.timeout, server=options.server)
    print("\n".join(_describe(one) for one in trackers) or "the run has no tracker: history.jsonl has every row")
    return LEFT if any(one.problem for one in trackers) else 0


def _describe(one: Synced) -> str:
    line = f"{one.tracker}: {one.num_delivered} rows delivered, {one.num_left} left"
    return line if one.problem is None else f"{line} ({one.problem})"
