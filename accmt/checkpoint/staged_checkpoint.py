"""A checkpoint while it is written: out of sight, by all processes, each with files of its own."""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accmt.checkpoint.manifest import MANIFEST_NAME, FileEntry
from accmt.errors import CheckpointError
from accmt.files import fsync_file
from accmt.processes import process_index

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNWRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}


@dataclass(frozen=True)
class Failure:
    """Why a process could not write its part, in a form that can travel."""

    cause: str
    advice: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return cls(f"on process {process_index()}: {reason}", _advise(error))


@dataclass(frozen=True)
class Part:
    files: dict[str, FileEntry] = field(default_factory=dict)
    failure: Failure | None = None


class Staging:
    """A checkpoint that is being written.

    Nothing here communicates, so files can be written by another thread than the one that begins and publishes.
    """

    def __init__(self, step: int, folder: Path) -> None:
        self.step = step
        self.folder = folder
        self.error: Exception | None = None
        self._files: dict[str, FileEntry] = {}

    def write(self, write: Callable[[Path], None]) -> None:
        """Let `write` put files, and folders of them, into a folder of this process; make them durable, measure them.

        An error is kept rather than raised: `CheckpointStore.publish` raises it on every process, so that none waits
        for the others. May be called more than once; after an error nothing more is written.

        Args:
            write: Called with an empty folder. No two processes may write a file of the same name.
        """
        if self.error is not None:
            return
        own = self.folder / f".part-{process_index()}"
        try:
            own.mkdir()
            write(own)
            self._take_over(own)
        except Exception as error:  # noqa: BLE001 - raised by publish, on every process
            self.error = error

    def part(self) -> Part:
        return Part(self._files) if self.error is None else Part(failure=Failure.of(self.error))

    def _take_over(self, own: Path) -> None:
        for path in sorted(path for path in own.rglob("*") if not path.is_dir()):
            name = path.relative_to(own)
            fsync_file(path)
            self._files[name.as_posix()] = FileEntry.of(path)
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        shutil.rmtree(own)


def merge(parts: Sequence[Part]) -> Part:
    """Put the parts of all processes together: their files, or one failure that names every cause."""
    failures = [part.failure for part in parts if part.failure is not None]
    if failures:
        return Part(failure=Failure("; ".join(failure.cause for failure in failures), failures[0].advice))
    names = Counter([MANIFEST_NAME, *(name for part in parts for name in part.files)])
    taken = sorted(name for name, number in names.items() if number > 1)
    if taken:
        return Part(failure=Failure(f"more than one file called {', '.join(taken)}", "name them by process"))
    return Part({name: entry for part in parts for name, entry in part.files.items()})


def _advise(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL:
        return "free space there, lower `max_checkpoints`, or pass another `checkpoint` folder"
    if number in _UNWRITABLE:
        return "make the folder writable, or pass another `checkpoint` folder"
    if number == errno.ENOENT:
        return "do not touch the folder during a run; with several machines, put it on storage that all of them share"
    return "see the cause above"
