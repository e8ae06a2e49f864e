"""Warns about a crash loop: a run that fails repeatedly at one place. It never stops a run.

Each start is recorded in a file in the checkpoint folder. A start without a recorded end was killed.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from accmt.errors import Preempted, explain
from accmt.files import dumps, loads, write_text
from accmt.messages import warn
from accmt.processes import is_main_process
from accmt.run import EvaluationRun, Run
from accmt.run.features import Feature
from accmt.secrets import hide_text

FILE_NAME = "starts.json"
ENOUGH = 3
"""Consecutive failures at one place that count as a crash loop."""

_MAX_KEPT = 20
_MAX_TEXT = 500
_FOR_SAMPLES = 'failures={"on_bad_sample": "skip"} skips unreadable samples'
_FOR_LOSSES = 'failures={"on_nonfinite": "rollback"} skips steps that break the loss'
_FOR_MEMORY = "if memory runs out, `max_micro_batch_size: auto` or a smaller one needs less"


class CrashLoop(Feature):
    """Records on the main process how runs with checkpoints start and end, and warns about crash loops."""

    name = "crash_loop"

    def __init__(self, run: Run) -> None:
        self._run = run

    @classmethod
    def for_run(cls, run: EvaluationRun) -> CrashLoop | None:
        is_recorded = run.settings.checkpoints.writes_to_folder and is_main_process()
        return cls(run) if is_recorded and isinstance(run, Run) else None

    def on_start(self) -> None:
        """Record the start, and warn if a resumed run has failed here too often."""
        run = self._run
        folder, step = run.checkpoints.folder, run.state.global_step
        try:
            if not run.is_resumed and run.settings.checkpoints.resume is False:
                forget_starts(folder)
            message = describe_crash_loop(record_start(folder, step), step, folder)
        except OSError as error:
            warn(f"cannot record the start of the run in {folder}: {error}")
            return
        if message is not None:
            warn(message)

    def on_end(self, error: BaseException | None) -> None:
        """Record how the run ended."""
        folder = self._run.checkpoints.folder
        try:
            if error is None or isinstance(error, KeyboardInterrupt | Preempted):
                forget_starts(folder)
            else:
                text = hide_text("".join(traceback.format_exception_only(error)).strip())[:_MAX_TEXT]
                record_failure(folder, self._run.state.global_step, text)
        except OSError as own:
            warn(f"cannot record the end of the run in {folder}: {own}")


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        process: Identifies the process that started.
        step: Optimizer steps at the start.
        failed_after: Optimizer steps at the failure; None if no end was recorded.
        error: The error.
    """

    process: str
    step: int
    failed_after: int | None = None
    error: str | None = None

    @property
    def is_valid(self) -> bool:
        """Whether its entries have the right types: the file may be damaged."""
        is_counted = type(self.step) is int and type(self.failed_after) in (int, type(None))
        return is_counted and isinstance(self.process, str) and isinstance(self.error, str | None)


def record_start(folder: Path, step: int) -> list[Start]:
    """Record that a run starts after `step` optimizer steps, and return the failed starts before it, oldest first."""
    own = Start(_name_process(), step)
    before = [start for start in _read(folder) if not _is_running(start, own.process)]
    _write(folder, [*before, own])
    return before


def record_failure(folder: Path, step: int, error: str) -> None:
    """Record that the run of this process failed."""
    starts = _read(folder)
    if starts and _is_running(starts[-1], _name_process()):
        _write(folder, [*starts[:-1], replace(starts[-1], failed_after=step, error=error)])


def forget_starts(folder: Path) -> None:
    """Delete all records: the last start did not fail, or a new run begins."""
    (folder / FILE_NAME).unlink(missing_ok=True)


def describe_crash_loop(before: Sequence[Start], step: int, folder: Path) -> str | None:
    """Return the warning about a crash loop; None if there is none.

    Args:
        before: The failed starts from `record_start`.
        step: The current optimizer step.
        folder: The folder of the run's checkpoints.
    """
    if not before:
        return None
    # A killed start reached the checkpoint from which the next one resumed.
    reached = [*(start.step for start in before[1:]), step]
    ends = [_End(start, following) for start, following in zip(before, reached, strict=True)]
    alike = list(takewhile(lambda end: end.is_like(ends[-1]), reversed(ends)))
    if len(alike) < ENOUGH:
        return None
    known = next((end.start for end in alike if end.start.failed_after is not None), None)
    if known is None:
        where = f"somewhere after step {step}, before the next checkpoint; they were killed without an error message"
        do = f"check the system log for the reason; {_FOR_MEMORY}; set a shorter checkpoint_every"
    else:
        where = f"after step {known.failed_after}, most recently with {known.error}"
        do = f"check the next batch; {_FOR_SAMPLES}, {_FOR_LOSSES}, {_FOR_MEMORY}"
    got = f"a crash loop: the last {len(alike)} starts all ended {where}"
    return explain(f"the run that resumes at step {step} ({folder})", got, "a start that makes progress", do)


class _End(NamedTuple):
    start: Start
    reached: int  # optimizer steps done at its last checkpoint

    def is_like(self, other: _End) -> bool:
        """Return whether both ended at the same place, as far as known."""
        places = self.start.failed_after, other.start.failed_after
        return self.reached == other.reached if None in places else places[0] == places[1]


def _is_running(start: Start, process: str) -> bool:
    """Return whether the start is that of this process: a run that restarts itself has not failed."""
    return start.process == process and start.failed_after is None


def _name_process() -> str:
    import psutil

    return f"{os.getpid()}-{psutil.Process().create_time()}"  # in containers, process ids repeat


def _read(folder: Path) -> list[Start]:
    path = folder / FILE_NAME
    try:
        starts = [Start(**entry) for entry in loads(path.read_text(encoding="utf-8"))["starts"]]
        if not all(start.is_valid for start in starts):
            raise TypeError("entries of another type")
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, RecursionError, IsADirectoryError) as error:
        warn(f"{path} cannot be read and is replaced: {type(error).__name__}: {str(error)[:_MAX_TEXT]}")
        return []
    return starts


def _write(folder: Path, starts: Sequence[Start]) -> None:
    kept = [asdict(start) for start in starts[-_MAX_KEPT:]]
    write_text(folder / FILE_NAME, dumps({"starts": kept}, indent=2) + "\n")
