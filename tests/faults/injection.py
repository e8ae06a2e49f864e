"""Failures at chosen operations of the file system, one after the other, as SQLite's tests inject them.

Everything that changes the disk is counted: making, renaming and deleting files and folders, opening a file for
writing, each write to it, and each fsync.
"""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHANGES = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")


class SimulatedKill(BaseException):
    """Ends a save as SIGKILL would: nothing that comes after it touches the disk."""


class Operations:
    """Counts what changes the disk, and lets `fail` decide about each operation before it is done.

    Attributes:
        trace: What was done: the operation and the names of what it was done to.
    """

    def __init__(self, fail: Callable[[int], None] = lambda number: None) -> None:
        self.fail = fail
        self.trace: list[tuple[str, ...]] = []

    def count(self, operation: str, *subjects: Any) -> None:
        self.trace.append((operation, *map(name_of, subjects)))
        self.fail(len(self.trace) - 1)

    def guard(self, operation: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.count(operation, *(args[:2] if operation in ("rename", "replace") else args[:1]))
            # A real fsync takes long on a busy disk, and what it does shows after a power cut only.
            return None if operation == "fsync" else original(*args, **kwargs)

        return guarded

    def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wax+"):
            return ORIGINAL_OPEN(path, mode, *args, **kwargs)
        self.count("open", path)
        return _CountedFile(self, path, ORIGINAL_OPEN(path, mode, *args, **kwargs))


ORIGINAL_OPEN = io.open


class _CountedFile:
    """A file of which half a text is on the disk when its write fails."""

    def __init__(self, operations: Operations, path: Any, file: Any) -> None:
        self.operations, self.path, self.file = operations, path, file

    def write(self, content: Any) -> Any:
        half = len(content) // 2
        self.file.write(content[:half])
        self.file.flush()
        self.operations.count("write", self.path)
        return half + self.file.write(content[half:])

    def __enter__(self) -> _CountedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def name_of(subject: Any) -> str:
    """Return the path behind a path or an open file."""
    return str(Path(f"/proc/self/fd/{subject}").readlink()) if isinstance(subject, int) else os.fspath(subject)


@contextmanager
def injected(fail: Callable[[int], None] = lambda number: None) -> Iterator[Operations]:
    """Count the operations of a block; `fail(number)` is asked before each, counted from 0, and may raise or kill."""
    operations = Operations(fail)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in CHANGES:
            monkeypatch.setattr(os, name, operations.guard(name, getattr(os, name)))
        monkeypatch.setattr(io, "open", operations.open)
        yield operations


def error_at(point: int, number: int) -> Callable[[int], None]:
    """Fail one operation with an error number of the system."""

    def fail(count: int) -> None:
        if count == point:
            raise OSError(number, os.strerror(number))

    return fail


def error_from(point: int, number: int) -> Callable[[int], None]:
    """Fail this operation and every later one: a disk that went away."""

    def fail(count: int) -> None:
        if count >= point:
            raise OSError(number, os.strerror(number))

    return fail


def exception_at(point: int) -> Callable[[int], None]:
    """Fail one operation with an error that is none of the system's."""

    def fail(count: int) -> None:
        if count == point:
            raise ValueError("injected")

    return fail


def simulated_kill_at(point: int) -> Callable[[int], None]:
    """End the save, and let nothing touch the disk from there on."""

    def fail(count: int) -> None:
        if count >= point:
            raise SimulatedKill

    return fail


def kill_at(point: int) -> Callable[[int], None]:
    """End the process with SIGKILL."""

    def fail(count: int) -> None:
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return fail
