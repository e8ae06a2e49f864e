"""Finds run folders, and whether a process is writing to one."""

from __future__ import annotations

import fcntl
import os
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
