"""Restarts after a failure within one call of `fit`.

A run that recovers ends at a checkpoint, and `Trainer.fit` builds a new run that continues from there, as a restarted
program would. Nothing has to be undone in memory, and everything that holds for a resumed run holds here.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from torch.optim import Optimizer

from accmt.checkpoint.manifest import STEP, Manifest, read_manifest
from accmt.options import Settings
from accmt.processes import gather_objects, manages_disk, run_on_each_disk, run_on_every_process


class Restart(Exception):  # noqa: N818 - not an error: the run continues
    """Ends a run so that a new one continues; it never leaves `fit`."""


@dataclass
class Recovery:
    """Information passed between the runs of one call of `fit`.

    Attributes:
        lessons: What features have learned, by name: JSON values, stored in checkpoints.
        rollbacks: How often in a row the run rolled back to the same checkpoint.
        rolled_back_to: The step of that checkpoint.
        checkpoint: The checkpoint that the next run continues from; None if there is no next run.
        is_temporary: Whether that checkpoint only serves the next run.
        next_settings: The settings of a later run, if they differ from those of this one.
    """

    lessons: dict[str, dict[str, Any]] = field(default_factory=dict)
    rollbacks: int = 0
    rolled_back_to: int | None = None
    checkpoint: Path | None = None
    is_temporary: bool = False
    next_settings: Settings | None = None

    def learn(self, lessons: Mapping[str, dict[str, Any]]) -> None:
        """Take over what the checkpoint's run had learned, unless this run has learned more since."""
        self.lessons = {**lessons, **self.lessons}

    def take_checkpoint(self) -> Path | None:
        """Return the checkpoint to continue from, once."""
        checkpoint, self.checkpoint = self.checkpoint, None
        return checkpoint

    def clear_up(self, checkpoint: Path) -> None:
        """Delete the checkpoint that the run continued from if checkpoints were not requested.

        Processes: collective.
        """
        if self.is_temporary:
            run_on_each_disk(lambda: shutil.rmtree(checkpoint))
        self.is_temporary = False

    def restart(self, checkpoint: Path) -> NoReturn:
        """End the run, so that a new one continues from a checkpoint.

        Processes: collective.
        """
        self.checkpoint = checkpoint
        raise Restart


def free_memory(optimizer: Optimizer) -> None:
    """Free the device memory used by gradients and unfinished steps."""
    from accelerate.utils.memory import clear_device_cache

    optimizer.zero_grad(set_to_none=True)
    clear_device_cache(garbage_collection=True)


def free_finished(optimizer: Optimizer) -> None:
    """Free the device memory of a finished run, above all the optimizer's state.

    The objects of a run form reference cycles, and the module keeps its optimizer, so all of it would still exist while
    the next run loads the same again.
    """
    optimizer.state.clear()
    free_memory(optimizer)


# ---- Restarts of one run by its launcher: torchrun restarts processes after a failure, or with other machines.
#
# Such a restart is not a new run, whatever `resume` is: it continues from the newest checkpoint that was written under
# the same launcher. A checkpoint records the launchers of its processes, one per machine; one common launcher is
# enough.


def is_relaunched(settings: Settings) -> bool:
    """Return whether this launcher has started the run before, and it has written a checkpoint.

    Processes: collective.
    """
    if not (_may_start_again() and settings.checkpoints.writes_to_folder):
        return False
    launch = describe_launch()
    folder = settings.checkpoint_folder

    def has_checkpoint() -> bool:
        return manages_disk() and any(_is_of(path, launch) for path in folder.glob("step-*"))

    return any(run_on_every_process(has_checkpoint))


def describe_launch() -> dict[str, Any] | None:
    """Return what identifies a launch: the main process, and the launchers; None without such a launcher.

    Processes: collective.
    """
    if not _may_start_again():
        return None
    pairs = gather_objects((_name_process(os.getpid()), _name_process(os.getppid())))
    return {"process": pairs[0][0], "launchers": sorted({launcher for _, launcher in pairs})}


def _may_start_again() -> bool:
    return "TORCHELASTIC_MAX_RESTARTS" in os.environ  # set by torchrun, also for `accelerate launch`


def _is_of(folder: Path, launch: dict[str, Any] | None) -> bool:
    """Return whether an earlier process of the launch wrote the checkpoint."""
    before = None
    if STEP.fullmatch(folder.name):
        manifest = read_manifest(folder)
        if isinstance(manifest, Manifest):
            before = manifest.info.get("launch")
    # The same process: a second `fit` of one program is a new run.
    if before is None or launch is None or before["process"] == launch["process"]:
        return False
    return not set(launch["launchers"]).isdisjoint(before["launchers"])


@cache
def _name_process(number: int) -> str:
    import psutil

    return f"{socket.gethostname()}-{number}-{psutil.Process(number).create_time()}"  # containers reuse process ids
