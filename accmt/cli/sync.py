"""Deliver missing rows to the trackers of a run, and end the run there with its true status.

Use this after the run, if its server was down, if it ran offline, or if it was killed (it then ends as KILLED).
Of the checkpoint folder of a run with `checkpoint="s3://..."`, upload the newest checkpoint if the run could not.
Exit code: 0 all rows are delivered, 1 some are not, 2 there is no run, or it is still running.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accmt.addons.sync import Synced

LEFT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = "the folder with history.jsonl, logs/<track>/<run>; or the checkpoint or model folder"
    parser.add_argument("run_folder", type=Path, help=where)
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="time limit per tracker (default 600)"
    )
    parser.add_argument("--server", metavar="URL", help="a URL with its password, which is not saved")


def run(options: argparse.Namespace) -> int:
    from accelerate.state import PartialState

    from accmt.addons import remote_checkpoints, remote_models
    from accmt.addons.sync import sync_run
    from accmt.cli.arguments import require_run

    for remote in (remote_checkpoints, remote_models):
        if (options.run_folder / remote.ORIGIN).is_file():
            uploaded = remote.upload_rest(options.run_folder, url=options.server)
            print(f"uploaded {uploaded}" if uploaded else "nothing was left to upload")
            return 0
    require_run(options.run_folder, "sync")
    PartialState(cpu=True)  # Accelerate's trackers read the process index from it
    trackers = sync_run(options.run_folder, timeout_s=options.timeout, server=options.server)
    print("\n".join(_describe(one) for one in trackers) or "the run has no trackers: all rows are in history.jsonl")
    return LEFT if any(one.problem for one in trackers) else 0


def _describe(one: Synced) -> str:
    line = f"{one.tracker}: {one.num_delivered} rows delivered, {one.num_left} left"
    return line if one.problem is None else f"{line} ({one.problem})"
