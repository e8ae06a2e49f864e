"""Replacing files as one step, and asking early whether a folder can be written at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from accmt.errors import SavingError, explain
from accmt.files.folders import find_free_name
from accmt.messages import warn


def fsync_file(path: Path) -> None:
    """Make the content of `path` durable: a rename after this never shows an empty file, not even after a power cut."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: a rename survives a power cut only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def follow_umask(path: Path) -> None:
    """Give a file the permissions that a new one has here; some libraries write theirs for the user alone."""
    probe = path.with_name(f".tmp-mode-{os.getpid()}")
    probe.touch()
    try:
        path.chmod(probe.stat().st_mode & 0o777)
    finally:
        probe.unlink()


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name beside `path`, make it durable and rename it to `path`.

    A folder that has this name is set aside: a file of ours that cannot be written would stop every run there.

    Raises:
        OSError: The disk is full or the folder cannot be written; `path` is as it was.
    """
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        write(temporary)
        fsync_file(temporary)
        try:
            temporary.replace(path)
        except IsADirectoryError:
            set_folder_aside(path)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


def set_folder_aside(path: Path) -> None:
    """Rename a folder that is where one of our files belongs; without one nothing happens."""
    if path.is_dir():
        aside = find_free_name(path.with_name(f"{path.name}.set-aside"))
        path.rename(aside)
        warn(f"{path} is a folder where a file belongs: it is renamed to {aside.name}")


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` by `text` as one step."""
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def require_writable_folder(folder: Path, argument: str) -> None:
    """Check that `folder` exists or could be made, and that files can be put there; nothing is left behind.

    `argument` is the Trainer argument that names it, for the message.
    """
    parent = folder.absolute()
    while not parent.exists() and parent != parent.parent:
        if parent.is_symlink():
            got = f"{parent} is a link to {parent.readlink()}, which does not exist"
            do = f"create what the link leads to, or remove the link: rm {parent}"
            raise SavingError(explain(f"Trainer({argument}={str(folder)!r})", got, "a folder, or a free name", do))
        parent = parent.parent
    try:
        with tempfile.TemporaryFile(dir=parent):
            return
    except OSError as error:
        reason = "it is a file" if parent.is_file() else (error.strerror or str(error))
        message = explain(
            f"Trainer({argument}={str(folder)!r})",
            f"{parent} cannot be written: {reason}",
            "a folder that exists or can be created",
            f"pass another {argument}, or make {parent} writable",
        )
        raise SavingError(message) from None  # tempfile's frames say no more
