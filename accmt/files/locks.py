"""Folders that one run at a time writes to, or that processes use in turn."""

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
    """Another process holds a folder; the text says which."""


class FolderLock:
    """Holds a lock on a folder; the system gives it up when this process ends, however it ends.

    An flock of the open file: it does not end when something else in this process opens and closes the same file (such
    as to copy the folder), as a POSIX record lock does. Linux makes one of the other over NFS. Forked processes, like
    loader workers, let go of it at once: the lock ends with this process, not with the last of them. This process
    itself can take it again.
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
            FolderTakenError: Another process holds it.
        """
        path = folder.absolute() / LOCK_NAME  # the program may go elsewhere before the end
        own = _find_own(path)
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
            if _is_same(file, path):  # and not one that its holder has just removed
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
        """Whether this process has taken it more than once."""
        return self._times > 1

    def release(self) -> None:
        """Give the folder up, when it was released as often as it was taken; a fork has nothing to give up."""
        self._times -= 1
        if self._times == 0 and _held.pop(self._key, None) is self:
            try:
                self._path.unlink(missing_ok=True)
            finally:
                os.close(self._file)


@contextmanager
def taking_turns(folder: Path) -> Iterator[None]:
    """Wait until no other process uses a folder; on a file system without locks, all may at once.

    The folder itself is locked, so nothing is left behind, and the lock ends with a process that is killed.
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
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor, too
        os.close(descriptor)


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Close what a forked process inherited: else the lock would outlive the run, as long as a worker does."""
    for lock in _held.values():
        os.close(lock._file)
    _held.clear()


def _find_own(path: Path) -> FolderLock | None:
    try:
        return _held.get(_identify(path.stat()))
    except FileNotFoundError:
        return None


def _identify(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _is_same(file: int, path: Path) -> bool:
    try:
        return _identify(os.fstat(file)) == _identify(path.stat())
    except FileNotFoundError:
        return False
