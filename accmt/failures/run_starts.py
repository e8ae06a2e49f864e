"""Records each start of a run in a file beside its checkpoints, to find crash loops: starts that fail at one place.

A start whose end is not recorded was killed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from accmt.errors import explain
from accmt.files import dumps, loads, write_text

FILE_NAME = "starts.json"
ENOUGH = 3
"""Failures in a row at one place that make a crash loop."""

_MAX_KEPT = 20
_FOR_SAMPLES = 'on_bad_sample="skip" skips samples that cannot be read'
_FOR_LOSSES = 'failures={"on_nonfinite": "rollback"} skips the steps that spoil the loss'
_FOR_MEMORY = "if memory runs out, auto_micro_batch=True or a smaller max_micro_batch_size needs less"


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        process: Identifies the process that started.
        step: Optimizer steps done when it started.
        failed_after: Optimizer steps done when it failed; None if no end was recorded.
        error: What it failed with.
    """

    process: str
    step: int
    failed_after: int | None = None
    error: str | None = None


def note_start(folder: Path, step: int) -> list[Start]:
    """Record that a run starts, and return the failed starts before it, oldest first.

    Args:
        folder: The folder of the run's checkpoints.
        step: Optimizer steps that are done.
    """
    own = Start(_name_process(), step)
    before = [start for start in _read(folder) if not _is_running(start, own.process)]
    _write(folder, [*before, own])
    return before


def note_failure(folder: Path, step: int, error: str) -> None:
    """Record that the run of this process failed."""
    process = _name_process()
    starts = _read(folder)
    if starts and _is_running(starts[-1], process):
        _write(folder, [*starts[:-1], replace(starts[-1], failed_after=step, error=error)])


def forget_starts(folder: Path) -> None:
    """Forget all starts: the last one did not fail, or another run begins."""
    (folder / FILE_NAME).unlink(missing_ok=True)


def describe_crash_loop(before: Sequence[Start], step: int, folder: Path) -> str | None:
    """Return the warning about a crash loop; None if there is none.

    Args:
        before: The starts that failed, as `note_start` returns them.
        step: Optimizer steps that are done now.
        folder: The folder of the run's checkpoints.
    """
    if not before:
        return None
    # A start that was killed counts as far as the checkpoint from which the next one resumed.
    reached = [*(start.step for start in before[1:]), step]
    ends = [_End(start, following) for start, following in zip(before, reached, strict=True)]
    alike = list(takewhile(lambda end: end.is_like(ends[-1]), reversed(ends)))
    if len(alike) < ENOUGH:
        return None
    known = next((end.start for end in alike if end.start.failed_after is not None), None)
    if known is None:
        where = f"somewhere after step {step}, before the next checkpoint; they were killed without an error message"
        do = f"look at the system's log for what killed them; {_FOR_MEMORY}; set a shorter checkpoint_every"
    else:
        where = f"after step {known.failed_after}, the last time with {known.error}"
        do = f"look at the batch after it; {_FOR_SAMPLES}, {_FOR_LOSSES}, {_FOR_MEMORY}"
    got = f"a crash loop: its last {len(alike)} starts all ended {where}"
    return explain(f"the run that resumes at step {step} ({folder})", got, "a start that gets further", do)


class _End(NamedTuple):
    start: Start
    reached: int  # optimizer steps done at its last checkpoint

    def is_like(self, other: _End) -> bool:
        """Return whether both ended at the same place, as far as that is known."""
        places = self.start.failed_after, other.start.failed_after
        return self.reached == other.reached if None in places else places[0] == places[1]


def _is_running(start: Start, process: str) -> bool:
    """Return whether it is this process's own start: a run that restarts itself has not failed."""
    return start.process == process and start.failed_after is None


def _name_process() -> str:
    import psutil

    return f"{os.getpid()}-{psutil.Process().create_time()}"  # in containers, process ids repeat


def _read(folder: Path) -> list[Start]:
    try:
        return [Start(**entry) for entry in loads((folder / FILE_NAME).read_text(encoding="utf-8"))["starts"]]
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError):  # edited by hand
        return []


def _write(folder: Path, starts: Sequence[Start]) -> None:
    kept = [asdict(start) for start in starts[-_MAX_KEPT:]]
    write_text(folder / FILE_NAME, dumps({"starts": kept}, indent=2) + "\n")
