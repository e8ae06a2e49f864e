"""Warns of a crash loop: a run that fails again and again at one place. Nothing here stops a run."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from accmt.errors import Preempted
from accmt.failures.run_starts import describe_crash_loop, forget_starts, note_failure, note_start
from accmt.messages import warn
from accmt.processes import is_main_process

if TYPE_CHECKING:
    from accmt.run import Run

_MAX_TEXT = 500


def warn_of_crash_loop(run: Run) -> None:
    """Note that the run starts, and warn if it has failed here too often; one that does not resume never has."""
    if not _is_noted(run):
        return
    folder, step = run.checkpoints.folder, run.state.global_step
    try:
        if run.settings.checkpoints.resume is False:
            forget_starts(folder)
        message = describe_crash_loop(note_start(folder, step), step, folder)
    except OSError as error:
        warn(f"this start is not noted in {folder}: {error}")
        return
    if message is not None:
        warn(message)


def note_end(run: Run, error: BaseException | None) -> None:
    """Note how the run ended."""
    if not _is_noted(run):
        return
    folder = run.checkpoints.folder
    try:
        if error is None or isinstance(error, KeyboardInterrupt | Preempted):
            forget_starts(folder)
        else:
            note_failure(folder, run.state.global_step, _describe(error))
    except OSError as own:
        warn(f"this end is not noted in {folder}: {own}")


def _is_noted(run: Run) -> bool:
    settings = run.settings.checkpoints
    return settings.every is not None and settings.checkpointer is None and is_main_process()


def _describe(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()[:_MAX_TEXT]
