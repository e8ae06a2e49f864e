"""Room on the disk."""

from __future__ import annotations

import shutil
from pathlib import Path

_UNITS = ("B", "KB", "MB", "GB", "TB")


def free_space(folder: Path) -> int:
    """Return the free bytes on the disk where a folder is, or would be."""
    existing = folder.absolute()
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    return shutil.disk_usage(existing).free


def format_bytes(number: int) -> str:
    """Write a size as people read it: 1234567 is "1.23 MB"."""
    value, unit = float(number), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"
