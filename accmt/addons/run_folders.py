"""Finds run folders, and locks that tell whether a process is writing to one, or let processes take turns."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accmt.files import LOCK_NAME
from accmt.tracking.history import EVALUATIONS_FOLDER, HISTORY_FILE


def find_run_folders(folder: Path) -> list[Path]:
    """Return the run folders in a logging folder, in that of a project, or the run folder itself."""
    patterns = (HISTORY_FILE, f"*/{HISTORY_FILE}", f"*/*/{HISTORY_FILE}")
    found = [path.parent for pattern in patterns for path in folder.glob(pattern)]
    return [
        place for place in found if not (place.name == EVALUATIONS_FOLDER and (place.parent / HISTORY_FILE).is_file())
    ]


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a folder; on a file system without locks, whether one has taken it."""
    try:
        file = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(file)


@contextmanager
def taking_turns(folder: Path) -> Iterator[None]:
    """Wait until no other process uses a folder; without effect on a file system without locks.

    Locks the folder itself, so nothing is left behind, and the lock ends when the process is killed.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked in the meantime has the descriptor too
        os.close(descriptor)
