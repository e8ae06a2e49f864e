"""Starts of one run by one launcher: torchrun starts its processes again after a failure, or with other machines.

Such a start is no new run, whatever `resume` says: it continues from the newest checkpoint that was written under the
same launcher. A checkpoint names the launchers of its processes, one for each machine; it is enough that one of them is
still the same.
"""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path
from typing import Any

from accmt.checkpoint.folder_names import STEP
from accmt.checkpoint.manifest import Manifest, read_manifest
from accmt.checkpoint.store import CheckpointStore
from accmt.options import Settings
from accmt.processes import gather_objects, run_on_main_process


def find_relaunched(settings: Settings) -> Path | None:
    """Return the newest checkpoint, where this launcher has started the run before; None where it has not.

    Processes: collective.
    """
    options = settings.checkpoints
    if not _may_start_again() or options.every is None or options.checkpointer is not None:
        return None
    own = describe_launch()
    folder = settings.checkpoint_folder
    if not run_on_main_process(lambda: any(_is_of(path, own) for path in folder.glob("step-*"))):
        return None
    newest = CheckpointStore(folder).newest()
    return None if newest is None else newest.folder


def describe_launch() -> dict[str, Any] | None:
    """Return what tells a launch from others: the main process, and the launchers; None without such a launcher.

    Processes: collective.
    """
    if not _may_start_again():
        return None
    every = gather_objects((_name_process(os.getpid()), _name_process(os.getppid())))
    return {"process": every[0][0], "launchers": sorted({launcher for _, launcher in every})}


def _may_start_again() -> bool:
    return "TORCHELASTIC_MAX_RESTARTS" in os.environ  # which torchrun sets, also for `accelerate launch`


def _is_of(folder: Path, launch: dict[str, Any] | None) -> bool:
    """Return whether an earlier process of a launch wrote a checkpoint."""
    manifest = read_manifest(folder) if STEP.fullmatch(folder.name) else None
    before = manifest.info.get("launch") if isinstance(manifest, Manifest) else None
    if before is None or launch is None or before["process"] == launch["process"]:
        return False
    return not set(launch["launchers"]).isdisjoint(before["launchers"])


@cache
def _name_process(number: int) -> str:
    import psutil

    return f"{socket.gethostname()}-{number}-{psutil.Process(number).create_time()}"  # in containers, ids repeat
