"""A place to put new files together before any of them becomes visible."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staging_folder(folder: Path, purpose: str) -> Iterator[Path]:
    """Give an empty folder inside `folder`, on the same disk, so that moving a file out of it is one rename.

    What a killed process left in it is removed first; it is removed again at the end, also after an error.

    Args:
        folder: The folder that will hold the files; must exist.
        purpose: Part of the name `.tmp-<purpose>`; one writer at a time may use it.

    Raises:
        OSError: The folder cannot be written.

    Processes:
        Main only.
    """
    staged = folder / f".tmp-{purpose}"
    if staged.exists():
        shutil.rmtree(staged)
    staged.mkdir()
    try:
        yield staged
    finally:
        shutil.rmtree(staged)


def find_free_name(path: Path) -> Path:
    """Return `path`, or with the first of `-2`, `-3` ... behind it that nothing bears yet."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
