"""Whether the disk will hold the checkpoints of a run."""

from __future__ import annotations

import shutil
from pathlib import Path

from accmt.checkpoint.retention import list_published

_UNITS = ("B", "KB", "MB", "GB", "TB")


def find_shortage(bytes_needed: int, folder: Path) -> str | None:
    """Say what to change when the checkpoints of a run will not fit; None when they will.

    What the folder's checkpoints occupy now counts as room: they are replaced by those of the run.

    Args:
        bytes_needed: Size of a checkpoint times those kept and one more, which is written before the oldest goes.
        folder: The checkpoint folder, which need not exist yet.
    """
    existing = folder.absolute()
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    occupied = sum(_size_of(path) for path in list_published(folder))
    room = shutil.disk_usage(existing).free + occupied
    if bytes_needed <= room:
        return None
    return (
        f"checkpoints will need {_write_bytes(bytes_needed)} in {folder}, and there is room for {_write_bytes(room)}: "
        "free space there, lower `max_checkpoints`, or pass another `checkpoint` folder"
    )


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _write_bytes(number: int) -> str:
    value, unit = float(number), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"
