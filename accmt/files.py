"""Folders and files that are replaced atomically, locks, and JSON that every parser can read."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from accmt.errors import SavingError, fail
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
    """Return the current folder; if it was deleted while a run trains, the root: its paths are absolute then."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path(os.sep)


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
    sibling = re.compile(rf"{re.escape(folder.name)}\.{_NUMBERED}")
    places = [path for path in folder.parent.iterdir() if sibling.fullmatch(path.name)]
    if folder.is_dir():  # a mount point has them inside
        places += [path for path in folder.iterdir() if re.fullmatch(_NUMBERED, path.name)]
    ages = {path: age(path) for path in places if path.is_dir() and not path.is_symlink()}
    by_age = sorted((filled, path) for path, filled in ages.items() if filled is not None)
    return [path for _, path in by_age[: max(0, len(by_age) - keep)]]


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
        # `mkdir` would fail with "File exists", hours later.
        if parent.is_symlink():
            got = f"{parent} is a link to {parent.readlink()}, which does not exist"
            do = f"create the target of the link, or remove the link: rm {parent}"
            where, expected = f"Trainer({argument}={str(folder)!r})", "an existing folder, or a new path"
            raise fail(SavingError, where, got=got, expected=expected, do=do)
        parent = parent.parent
    try:
        with tempfile.TemporaryFile(dir=parent):
            return
    except OSError as error:
        reason = "it is a file" if parent.is_file() else (error.strerror or str(error))
        raise fail(
            SavingError,
            f"Trainer({argument}={str(folder)!r})",
            got=f"{parent} is not writable: {reason}",
            expected="a folder that exists or can be created",
            do=f"pass another {argument}, or make {parent} writable",
        ) from None


# ---- Locks for folders that one run at a time writes to, or that processes use in turn.


LOCK_NAME = ".lock"

_held: dict[tuple[int, int], dict[str, FolderLock]] = {}
"""This process's locks, by file and use."""


class FolderTakenError(Exception):
    """Another process, or another run in this one, holds the lock; the message names it."""


class FolderLock:
    """A lock on a folder, which the system releases when this process ends for any reason.

    An flock of the open file: unlike a POSIX record lock, it is not released when other code in this process opens and
    closes the same file (such as to copy the folder). Over NFS, Linux converts one into the other. Forked processes,
    such as loader workers, close it immediately: the lock ends with this process, not with the last of them. A run may
    use one folder for several things, such as its model and its logs, but for each use there is one run: a `fit` that
    a callback of another calls is another.
    """

    def __init__(self, file: int, path: Path, use: str) -> None:
        self._file = file
        self._path = path
        self._use = use
        self._key = _identify(os.fstat(file))
        _held.setdefault(self._key, {})[use] = self

    @classmethod
    def take(cls, folder: Path, use: str = "") -> FolderLock | None:
        """Lock a folder for a use, such as "model"; None on a file system without locks.

        Raises:
            FolderTakenError: Another process holds the lock, or this one for the same use.
        """
        path = folder.absolute() / LOCK_NAME  # the program may change its working directory
        with suppress(FileNotFoundError):
            locks = _held.get(_identify(path.stat()), {})
            if use in locks:  # below, the lock file would name this very process
                raise FolderTakenError("another run in this process")
            for lock in locks.values():
                return cls(lock._file, path, use)
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = os.read(file, 200).decode(errors="replace")
                os.close(file)
                raise FolderTakenError(holder) from None
            except OSError:  # a file system without locks: better no lock than no run
                os.close(file)
                return None
            if _is_same(file, path):  # and not a file that its holder has just removed
                break
            os.close(file)
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        _watch_forks()
        return cls(file, path, use)

    @property
    def is_shared(self) -> bool:
        """Whether this process has taken the lock for several uses."""
        return len(_held.get(self._key, {})) > 1

    def release(self) -> None:
        """Release the lock once it was released for each use; a forked process has nothing to release."""
        locks = _held.get(self._key, {})
        if locks.get(self._use) is not self:  # released before, or inherited by a fork
            return
        del locks[self._use]
        if not locks:
            del _held[self._key]
            try:
                self._path.unlink(missing_ok=True)
            finally:
                os.close(self._file)


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Close the inherited descriptors in a forked process: otherwise a worker could keep the lock after the run."""
    for locks in _held.values():
        os.close(next(iter(locks.values()))._file)
    _held.clear()


def _identify(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _is_same(file: int, path: Path) -> bool:
    try:
        return _identify(os.fstat(file)) == _identify(path.stat())
    except FileNotFoundError:
        return False


# ---- JSON, and files of JSON lines, that every parser can read.
#
# Python writes `NaN` and `Infinity`, which are not valid JSON. Here they are written as the strings "NaN", "Infinity"
# and "-Infinity", and these three strings are always read back as floats.


_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Format `value` as strict JSON, with non-finite floats as strings."""
    encoder = _ENCODER if indent is None else json.JSONEncoder(allow_nan=False, indent=indent, ensure_ascii=False)
    return encoder.encode(_encode(value))


def loads(text: str) -> Any:
    """Parse the output of `dumps`, including non-finite floats."""
    return _decode(json.loads(text))


def read_json_line(line: bytes) -> Any:
    """Parse one line of JSON; None if it is invalid, such as a block of zeros after a power failure."""
    try:
        return loads(line.decode("utf-8"))
    except (ValueError, RecursionError):  # invalid UTF-8 or JSON, a number with thousands of digits; nested too deeply
        return None


def read_json_lines(path: Path) -> Iterator[Any]:
    """Yield the values of a file of JSON lines, None for invalid lines; a truncated last line is skipped."""
    # In bytes: a crash can truncate the last line inside a character, which a text reader cannot skip.
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield read_json_line(line)


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value
