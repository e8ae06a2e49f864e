"""Notes each start of a run in a file beside its checkpoints, to find one that fails at the same place every time.

A start whose end nobody noted was killed.
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
"""So many failures in a row at one place are no accident."""

_MAX_KEPT = 20
_FOR_SAMPLES = 'on_bad_sample="skip" leaves out samples that cannot be read'
_FOR_LOSSES = 'on_nonfinite="rollback" skips updates that spoil the loss'
_FOR_MEMORY = "where memory runs out, auto_micro_batch=True or a smaller max_micro_batch_size needs less"


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        process: Names the process that started.
        update: Updates that were done when it went on.
        failed_after: Updates that were done when it failed; None if nobody noted an end.
        error: What it failed with.
    """

    process: str
    update: int
    failed_after: int | None = None
    error: str | None = None


def note_start(folder: Path, update: int) -> list[Start]:
    """Note that a run goes on, and return the starts before it that failed, one after the other.

    Args:
        folder: The folder of the run's checkpoints.
        update: Updates that are done.

    Raises:
        OSError: The file cannot be written.
    """
    own = Start(_name_process(), update)
    before = [start for start in _read(folder) if not _is_in_work(start, own.process)]
    _write(folder, [*before, own])
    return before


def note_failure(folder: Path, update: int, error: str) -> None:
    """Note that the run of this process failed.

    Args:
        folder: The folder of the run's checkpoints.
        update: Updates that are done.
        error: What it failed with.

    Raises:
        OSError: The file cannot be written.
    """
    process = _name_process()
    starts = _read(folder)
    if starts and _is_in_work(starts[-1], process):
        _write(folder, [*starts[:-1], replace(starts[-1], failed_after=update, error=error)])


def forget_starts(folder: Path) -> None:
    """Forget all starts: one of them came to an end that was no failure, or another run begins.

    Raises:
        OSError: The file cannot be deleted.
    """
    (folder / FILE_NAME).unlink(missing_ok=True)


def describe_repetition(before: Sequence[Start], update: int, folder: Path) -> str | None:
    """Return what is to be said to a run that failed at one place too often; None if it did not.

    Args:
        before: The starts that failed, as `note_start` returns them.
        update: Updates that are done now.
        folder: The folder of the run's checkpoints.
    """
    if not before:
        return None
    # A start that was killed got as far as to the checkpoint from which the next one went on, and no further.
    reached = [*(start.update for start in before[1:]), update]
    ends = [_End(start, following) for start, following in zip(before, reached, strict=True)]
    alike = list(takewhile(lambda end: end.is_like(ends[-1]), reversed(ends)))
    if len(alike) < ENOUGH:
        return None
    known = next((end.start for end in alike if end.start.failed_after is not None), None)
    if known is None:
        where = f"somewhere after update {update}, before the next checkpoint, killed without a word"
        do = f"look at the system's log for what killed it; {_FOR_MEMORY}; checkpoint_every can be more often"
    else:
        where = f"after update {known.failed_after}, the last time with {known.error}"
        do = f"look at the batch that follows; {_FOR_SAMPLES}, {_FOR_LOSSES}, {_FOR_MEMORY}"
    got = f"its last {len(alike)} starts all ended {where}"
    return explain(f"the run that goes on from update {update} ({folder})", got, "a start that comes further", do)


class _End(NamedTuple):
    """How a start ended.

    Attributes:
        start: The start.
        reached: Updates that were done at its last checkpoint.
    """

    start: Start
    reached: int

    def is_like(self, other: _End) -> bool:
        """Return whether it was at the same place, as far as that is known."""
        places = self.start.failed_after, other.start.failed_after
        return self.reached == other.reached if None in places else places[0] == places[1]


def _is_in_work(start: Start, process: str) -> bool:
    """Return whether it is this process's start: a run that goes on by itself starts again without having failed."""
    return start.process == process and start.failed_after is None


def _name_process() -> str:
    import psutil

    return f"{os.getpid()}-{psutil.Process().create_time()}"  # in containers, numbers come again


def _read(folder: Path) -> list[Start]:
    try:
        return [Start(**entry) for entry in loads((folder / FILE_NAME).read_text(encoding="utf-8"))["starts"]]
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError):  # of a hand that edits
        return []


def _write(folder: Path, starts: Sequence[Start]) -> None:
    kept = [asdict(start) for start in starts[-_MAX_KEPT:]]
    write_text(folder / FILE_NAME, dumps({"starts": kept}, indent=2) + "\n")
