"""The last line of a run that ends before its time: what it is resumed from, and how."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from accmt.messages import say
from accmt.processes import is_main_process
from accmt.registry import PROGRAM_VARIABLE
from accmt.run import Run


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
        program = os.environ.get(PROGRAM_VARIABLE, "the same program")
        return f"resume: run {program}{_with_changes(run)} to continue from {place}"
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
