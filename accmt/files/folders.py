"""Folders: for files before they become visible, for the files of earlier runs, and the room on their disk."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_NUMBERED = r"previous(-\d+)?"
_UNITS = ("B", "KB", "MB", "GB", "TB")


@contextmanager
def staging_folder(folder: Path, purpose: str) -> Iterator[Path]:
    """Give an empty folder inside `folder`, on the same disk, so that moving a file out of it is one rename.

    What a killed process left in it is removed first; it is removed again at the end, also after an error. One writer
    at a time may use a purpose. Processes: main only.
    """
    staged = folder / f".tmp-{purpose}"
    if staged.exists():
        shutil.rmtree(staged)
    staged.mkdir()
    try:
        yield staged
    finally:
        shutil.rmtree(staged)


def current_folder() -> Path:
    """Return the current folder; where it was deleted, the place that it had."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        try:
            place = str(Path("/proc/self/cwd").readlink()).removesuffix(" (deleted)")
        except OSError:  # not Linux
            place = os.environ.get("PWD", os.sep)
        return Path(place)


def is_current(folder: Path) -> bool:
    """Return whether the program is in a folder."""
    try:
        return Path.cwd() == folder
    except FileNotFoundError:  # deleted: nothing relative can be found any more
        return False


def find_free_name(path: Path) -> Path:
    """Return `path`, or with the first of `-2`, `-3` ... behind it that nothing bears yet."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def place_beside(folder: Path) -> Path:
    """Return a free name beside a folder for what was in it."""
    return find_free_name(folder.with_name(f"{folder.name}.previous"))


def place_inside(folder: Path) -> Path:
    """Return a free name in a folder, for one that is a disk of its own."""
    return find_free_name(folder / "previous")


def find_surplus(folder: Path, keep: int | None, age: Callable[[Path], int | None]) -> list[Path]:
    """Return the places of earlier runs beyond the newest `keep`, the oldest first.

    `age` returns when a place was filled, in any unit; None where nothing in it is accmt's.
    """
    if keep is None or not folder.parent.is_dir():
        return []
    beside = re.compile(rf"{re.escape(folder.name)}\.{_NUMBERED}")
    places = [path for path in folder.parent.iterdir() if beside.fullmatch(path.name)]
    places += [path for path in folder.iterdir() if re.fullmatch(_NUMBERED, path.name)] if folder.is_dir() else []
    ages = {path: age(path) for path in places if path.is_dir() and not path.is_symlink()}
    known = sorted((filled, path) for path, filled in ages.items() if filled is not None)
    return [path for _, path in known[: max(0, len(known) - keep)]]


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
