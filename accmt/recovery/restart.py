"""Restarts after a failure within one call of `fit`.

A run that recovers ends at a checkpoint, and `Trainer.fit` builds a new run that continues from there, as a restarted
program would. Nothing has to be undone in memory, and everything that holds for a resumed run holds here.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from accmt.checkpoint.manifest import STEP, Manifest, read_manifest
from accmt.messages import say
from accmt.options import Settings
from accmt.processes import gather_objects, is_main_process, run_on_main_process
from accmt.recovery.resume import find_newest
from accmt.run import Run


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
    """

    lessons: dict[str, dict[str, Any]] = field(default_factory=dict)
    rollbacks: int = 0
    rolled_back_to: int | None = None
    checkpoint: Path | None = None
    is_temporary: bool = False

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
            run_on_main_process(lambda: shutil.rmtree(checkpoint))
        self.is_temporary = False


def restart(run: Run, checkpoint: Path) -> NoReturn:
    """End the run, so that a new one continues from a checkpoint.

    Processes: collective.
    """
    run.recovery.checkpoint = checkpoint
    raise Restart


def current_micro_batch_size(run: Run) -> int:
    """Return the number of samples in a micro-batch."""
    return run.settings.hps.train_batch_size // run.train_loader.source.micro_batches_per_batch


def free_memory(run: Run) -> None:
    """Free the device memory used by gradients and unfinished steps."""
    from accelerate.utils.memory import clear_device_cache

    run.stepper.optimizer.zero_grad(set_to_none=True)
    clear_device_cache(garbage_collection=True)


def free_finished(run: Run) -> None:
    """Free the device memory of a finished run, above all the optimizer's state.

    The objects of a run form reference cycles, and the module keeps its optimizer, so all of it would still exist while
    the next run loads the same again.
    """
    run.stepper.optimizer.state.clear()
    free_memory(run)


# ---- Restarts of one run by its launcher: torchrun restarts processes after a failure, or with other machines.
#
# Such a restart is not a new run, whatever `resume` is: it continues from the newest checkpoint that was written under
# the same launcher. A checkpoint records the launchers of its processes, one per machine; one common launcher is
# enough.


def find_relaunched(settings: Settings) -> Path | None:
    """Return the newest checkpoint if this launcher has started the run before, otherwise None.

    Processes: collective.
    """
    if not (_may_start_again() and settings.checkpoints.writes_to_folder):
        return None
    own = describe_launch()
    folder = settings.checkpoint_folder
    if not run_on_main_process(lambda: any(_is_of(path, own) for path in folder.glob("step-*"))):
        return None
    return find_newest(settings)


def describe_launch() -> dict[str, Any] | None:
    """Return what identifies a launch: the main process, and the launchers; None without such a launcher.

    Processes: collective.
    """
    if not _may_start_again():
        return None
    every = gather_objects((_name_process(os.getpid()), _name_process(os.getppid())))
    return {"process": every[0][0], "launchers": sorted({launcher for _, launcher in every})}


def _may_start_again() -> bool:
    return "TORCHELASTIC_MAX_RESTARTS" in os.environ  # set by torchrun, also for `accelerate launch`


def _is_of(folder: Path, launch: dict[str, Any] | None) -> bool:
    """Return whether an earlier process of the launch wrote the checkpoint."""
    manifest = read_manifest(folder) if STEP.fullmatch(folder.name) else None
    before = manifest.info.get("launch") if isinstance(manifest, Manifest) else None
    if before is None or launch is None or before["process"] == launch["process"]:
        return False
    return not set(launch["launchers"]).isdisjoint(before["launchers"])


@cache
def _name_process(number: int) -> str:
    import psutil

    return f"{socket.gethostname()}-{number}-{psutil.Process(number).create_time()}"  # containers reuse process ids


# ---- The resume hint at the end of an unfinished run.


@contextmanager
def printing_resume_hint(run: Run) -> Iterator[None]:
    """Print the resume hint last, and add it as a note to the error that ends the run.

    Python prints a traceback below all messages, and the notes of an error below its traceback.
    """
    try:
        yield
    except BaseException as error:
        line = describe_resume(run)
        if line is not None and is_main_process():
            say(line)
            error.add_note(line)
        raise
    is_at_its_end = not run.interruption.ends_training or run.cadence.is_finished(run.state)
    line = None if is_at_its_end else describe_resume(run)
    if line is not None:
        say(line)


def describe_resume(run: Run) -> str | None:
    """Return the resume hint; None if there is nothing worth resuming.

    Call it after checkpoints are closed, because one that is being written may fail, and on the main process, which
    saves alone if the others have exited.
    """
    place = _find_place(run)
    if place is not None:
        return f"resume: run the same program{_with_changes(run)} to continue from {place}"
    if run.state.global_step == 0 or run.settings.running.fast_dev_run:
        return None
    why = (
        "checkpoints are off (checkpoint_every=None)"
        if run.settings.checkpoints.every is None
        else "no checkpoint was written"
    )
    return f"resume: {why}, so the same program starts from the beginning"


def _find_place(run: Run) -> str | None:
    checkpoints, checkpointer = run.checkpoints, run.settings.checkpoints.checkpointer
    if checkpointer is not None:
        return f"the state of {type(checkpointer).__name__}" if checkpoints.has_saved or run.is_resumed else None
    newest = checkpoints.find_newest_known()
    if newest is not None and newest.parent == checkpoints.folder:
        return str(run.settings.checkpoint_folder / newest.name)  # as the user wrote it, possibly relative
    return None if newest is None else str(newest)


def _with_changes(run: Run) -> str:
    """Return what has to change in the program so that it resumes from there."""
    resume = run.settings.checkpoints.resume
    begins_there = resume in (True, None, "auto") or (resume is not False and not run.checkpoints.has_saved)
    changes = [] if begins_there else ["Trainer(resume=True)"]
    if resume is False and run.checkpoints.began_elsewhere:
        changes.append("no load_checkpoint")
    if run.interruption.ended_by == "max_time":  # counts the time before interruptions too
        changes.append("a longer max_time")
    return f" with {' and '.join(changes)}" if changes else ""
