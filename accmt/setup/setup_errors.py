"""Reports to the other processes that one failed while a run was set up; later its watch does that."""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accmt.errors import ProcessFailedError, explain
from accmt.failures import Board, is_consequence, record_for_launcher

_ANSWER_S = 2.0
_POLL_S = 0.1
_numbers = itertools.count()


@contextmanager
def reporting_failed_setup() -> Iterator[None]:
    """Say on every process which one failed, and how, where a run cannot be set up."""
    number = next(_numbers)
    try:
        yield
    except Exception as error:
        try:
            note = _exchange(error, number)
        except (RuntimeError, OSError):  # the process that held the store is gone
            raise error from None
        if note is None:
            raise
        index, text = note
        do = "fix that error; the other processes were waiting for it"
        message = explain(f"process {index}", f"it failed while the run was set up:\n{text}", "no error", do)
        raise ProcessFailedError(message) from None


def _exchange(error: Exception, number: int) -> tuple[int, str] | None:
    """Leave a note of an error; of one that is the consequence of another, return whose that is."""
    board = Board.of_setup(number)
    if is_consequence(error) is not True:
        record_for_launcher(error)
        if board is not None:
            board.post("failed", "".join(traceback.format_exception(error)))
        return None
    return None if board is None else _wait_for_note(board)


def _wait_for_note(board: Board) -> tuple[int, str] | None:
    deadline = time.monotonic() + _ANSWER_S
    notes: dict[int, Any] = board.read("failed")
    while not notes and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        notes = board.read("failed")
    return next(iter(notes.items()), None)
