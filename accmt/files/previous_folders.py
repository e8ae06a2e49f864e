"""The folders where earlier runs' files are put when a run starts anew: `<folder>.previous`, `.previous-2` ..."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from accmt.files.staging import find_free_name

_NUMBERED = r"previous(-\d+)?"


def place_beside(folder: Path) -> Path:
    """Return a free name beside a folder for what was in it."""
    return find_free_name(folder.with_name(f"{folder.name}.previous"))


def place_inside(folder: Path) -> Path:
    """Return a free name in a folder, for one that is a disk of its own."""
    return find_free_name(folder / "previous")


def find_surplus(folder: Path, keep: int | None, age: Callable[[Path], int | None]) -> list[Path]:
    """Return the places of earlier runs beyond the newest `keep`, the oldest first.

    Args:
        folder: The folder to which they belonged, without links.
        keep: How many are kept; None is all.
        age: Returns when a place was filled, in any unit; None where nothing in it is accmt's.
    """
    if keep is None:
        return []
    beside = re.compile(rf"{re.escape(folder.name)}\.{_NUMBERED}")
    places = [path for path in folder.parent.iterdir() if beside.fullmatch(path.name)]
    places += [path for path in folder.iterdir() if re.fullmatch(_NUMBERED, path.name)] if folder.is_dir() else []
    ages = {path: age(path) for path in places if path.is_dir() and not path.is_symlink()}
    known = sorted((filled, path) for path, filled in ages.items() if filled is not None)
    return [path for _, path in known[: max(0, len(known) - keep)]]
