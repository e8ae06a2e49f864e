"""Replaces files atomically, and checks early whether a folder is writable."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from accmt.errors import SavingError, explain
from accmt.messages import warn

# ---- Folders: for staging, for the files of earlier runs, and their free disk space.


_NUMBERED = r"previous(-\d+)?"
_UNITS = ("B", "KB", "MB", "GB", "TB")


@contextmanager
def staging_folder(folder: Path, purpose: str) -> Iterator[Path]:
    """Yield an empty folder inside `folder`, on the same disk, so that a file can be moved out of it by one rename.

    Leftovers of a killed process are removed first; the folder is removed at the end, also after an error. Each purpose
    allows one writer at a time. Processes: main only.
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
    """Return the current folder; if it was deleted, its former path."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        try:
            place = str(Path("/proc/self/cwd").readlink()).removesuffix(" (deleted)")
        except OSError:  # not Linux
            place = os.environ.get("PWD", os.sep)
        return Path(place)


def is_current(folder: Path) -> bool:
    """Return whether a folder is the current working directory."""
    try:
        return Path.cwd() == folder
    except FileNotFoundError:  # deleted: relative paths no longer work
        return False


def find_free_name(path: Path) -> Path:
    """Return `path`, or the first of `path-2`, `path-3` ... that does not exist."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def place_beside(folder: Path) -> Path:
    """Return a free name next to a folder for its previous content."""
    return find_free_name(folder.with_name(f"{folder.name}.previous"))


def place_inside(folder: Path) -> Path:
    """Return a free name inside a folder, for a folder that is a mount point."""
    return find_free_name(folder / "previous")


def find_surplus(folder: Path, keep: int | None, age: Callable[[Path], int | None]) -> list[Path]:
    """Return the folders of earlier runs beyond the newest `keep`, oldest first.

    `age` returns when a folder was filled, in any unit; None if nothing in it is accmt's.
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
    """Return the free bytes on the disk of a folder that may not exist yet."""
    existing = folder.absolute()
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    return shutil.disk_usage(existing).free


def format_bytes(number: int) -> str:
    """Format a size for people: 1234567 is "1.23 MB"."""
    value, unit = float(number), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"


def fsync_file(path: Path) -> None:
    """Make the content of `path` durable: a later rename never exposes an empty file, even after a power failure."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: a rename survives a power failure only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def follow_umask(path: Path) -> None:
    """Set a file's permissions according to the umask; some libraries make their files private."""
    probe = path.with_name(f".tmp-mode-{os.getpid()}")
    probe.touch()
    try:
        path.chmod(probe.stat().st_mode & 0o777)
    finally:
        probe.unlink()


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name next to `path`, make it durable and rename it to `path`.

    A folder with this name is moved aside: otherwise every run there would fail.

    Raises:
        OSError: The disk is full or the folder is not writable; `path` is unchanged.
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
    """Rename a folder that is in the place of one of our files, if there is one."""
    if path.is_dir():
        aside = find_free_name(path.with_name(f"{path.name}.set-aside"))
        path.rename(aside)
        warn(f"{path} is a folder but should be a file: it is renamed to {aside.name}")


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` with `text` atomically."""
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def require_writable_folder(folder: Path, argument: str) -> None:
    """Check that `folder` exists or can be created and is writable; leaves nothing behind.

    `argument` is the Trainer argument, for the error message.
    """
    parent = folder.absolute()
    while not parent.exists() and parent != parent.parent:
        if parent.is_symlink():
            got = f"{parent} is a link to {parent.readlink()}, which does not exist"
            do = f"create the target of the link, or remove the link: rm {parent}"
            raise SavingError(
                explain(f"Trainer({argument}={str(folder)!r})", got, "an existing folder, or a new path", do)
            )
        parent = parent.parent
    try:
        with tempfile.TemporaryFile(dir=parent):
            return
    except OSError as error:
        reason = "it is a file" if parent.is_file() else (error.strerror or str(error))
        message = explain(
            f"Trainer({argument}={str(folder)!r})",
            f"{parent} is not writable: {reason}",
            "a folder that exists or can be created",
            f"pass another {argument}, or make {parent} writable",
        )
        raise SavingError(message) from None  # tempfile's frames add no information


def find_moved(before: str, now: Path) -> Callable[[str], str]:
    """Return a function that maps paths to where they are now, from where one of them was and is.

    The last parts of both are the same; what precedes them has changed, for everything below it.
    """
    old, new = list(Path(before).parts), list(now.absolute().parts)
    while old and new and old[-1] == new[-1]:
        old.pop()
        new.pop()
    if not old or not new:
        return lambda path: path
    moved_from, moved_to = Path(*old), Path(*new)

    def find(path: str) -> str:
        is_below = Path(path).is_relative_to(moved_from)
        return str(moved_to / Path(path).relative_to(moved_from)) if is_below else path

    return find
