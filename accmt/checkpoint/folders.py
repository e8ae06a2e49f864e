"""Making, moving and removing whole folders."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from accmt.files import fsync_folder
from accmt.messages import warn


def move(paths: Sequence[Path], target: Path, *, otherwise: Path) -> Path:
    """Move folders into `target`, or into `otherwise` where they are on a disk of their own; return which it was."""
    try:
        target.mkdir()
        paths[0].rename(target / paths[0].name)
    except OSError:
        with suppress(OSError):
            target.rmdir()
        target = otherwise
        target.mkdir()
        paths[0].rename(target / paths[0].name)
    for path in paths[1:]:
        path.rename(target / path.name)
    return target


def move_back(source: Path, folder: Path) -> None:
    """Move what `move` put into `source` back to `folder`; wherever that ends, each is whole in one of the two.

    Raises:
        OSError: One cannot be moved.
    """
    for path in sorted(source.iterdir(), reverse=True):  # the newest first: it is what a resume looks for
        path.rename(folder / path.name)
    source.rmdir()


def remove(folder: Path) -> None:
    """Delete a folder; what cannot be deleted is said."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        warn(f"what is left of an unfinished checkpoint could not be removed: {error}")


def make_durable(folder: Path) -> None:
    """Make a folder so that a power cut does not take it away again."""
    if folder.is_dir():
        return
    make_durable(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_folder(folder.parent)
