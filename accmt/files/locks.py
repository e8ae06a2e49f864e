"""Locks for folders that one run at a time writes to, or that processes use in turn."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

LOCK_NAME = ".lock"

_held: dict[tuple[int, int], FolderLock] = {}


class FolderTakenError(Exception):
    """Another process holds the lock; the message names it."""


class FolderLock:
    """A lock on a folder, which the system releases when this process ends for any reason.

    An flock of the open file: unlike a POSIX record lock, it is not released when other code in this process opens and
    closes the same file (such as to copy the folder). Over NFS, Linux converts one into the other. Forked processes,
    such as loader workers, close it immediately: the lock ends with this process, not with the last of them. This
    process itself may take it several times.
    """

    def __init__(self, file: int, path: Path) -> None:
        self._file = file
        self._path = path
        self._times = 1
        self._key = _identify(os.fstat(file))

    @classmethod
    def take(cls, folder: Path) -> FolderLock | None:
        """Lock a folder; None on a file system without locks.

        Raises:
            FolderTakenError: Another process holds the lock.
        """
        path = folder.absolute() / LOCK_NAME  # the program may change its working directory
        with suppress(FileNotFoundError):
            own = _held.get(_identify(path.stat()))
            if own is not None:
                own._times += 1
                return own
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = os.read(file, 200).decode(errors="replace")
                os.close(file)
                raise FolderTakenError(holder) from None
            except OSError:
                os.close(file)
                return None
            if _is_same(file, path):  # and not a file that its holder has just removed
                break
            os.close(file)
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        lock = cls(file, path)
        _watch_forks()
        _held[lock._key] = lock
        return lock

    @property
    def is_shared(self) -> bool:
        """Whether this process has taken the lock more than once."""
        return self._times > 1

    def release(self) -> None:
        """Release the lock once it was released as often as taken; a forked process has nothing to release."""
        self._times -= 1
        if self._times == 0 and _held.pop(self._key, None) is self:
            try:
                self._path.unlink(missing_ok=True)
            finally:
                os.close(self._file)


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


@contextmanager
def taking_turns(folder: Path) -> Iterator[None]:
    """Wait until no other process uses a folder; without effect on a file system without locks.

    Locks the folder itself, so nothing is left behind, and the lock ends when the process is killed.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked in the meantime has the descriptor too
        os.close(descriptor)


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Close the inherited descriptors in a forked process: otherwise a worker could keep the lock after the run."""
    for lock in _held.values():
        os.close(lock._file)
    _held.clear()


def _identify(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _is_same(file: int, path: Path) -> bool:
    try:
        return _identify(os.fstat(file)) == _identify(path.stat())
    except FileNotFoundError:
        return False
