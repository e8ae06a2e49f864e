"""A folder that one run at a time writes to."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from accmt.errors import CheckpointError, explain

LOCK_NAME = ".lock"


class FolderLock:
    """Holds a lock on a folder; the system gives it up when this process ends, however it ends.

    A POSIX record lock: forked loader workers do not inherit it, and it works over NFS. This process itself can take it
    again.

    Args:
        file: The open lock file.
        path: Where it is.
    """

    def __init__(self, file: int, path: Path) -> None:
        self._file = file
        self._path = path

    @classmethod
    def take(cls, folder: Path) -> FolderLock | None:
        """Lock a folder.

        Returns:
            The lock; None on a file system without locks.

        Raises:
            CheckpointError: Another process holds it; the message says which.
            OSError: The folder cannot be written.
        """
        path = folder / LOCK_NAME
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = os.read(file, 200).decode(errors="replace")
                os.close(file)
                raise CheckpointError(_explain(folder, holder)) from None
            except OSError:
                os.close(file)
                return None
            if _is_same(file, path):  # and not one that its holder has just removed
                break
            os.close(file)
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        return cls(file, path)

    def release(self) -> None:
        """Give the folder up."""
        self._path.unlink(missing_ok=True)
        os.close(self._file)


def _is_same(file: int, path: Path) -> bool:
    try:
        return os.fstat(file).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _explain(folder: Path, holder: str) -> str:
    expected = "a folder that no other run writes to: each would move and delete the other's checkpoints"
    do = "wait for that run, stop it, or pass another `checkpoint` folder"
    return explain(f"checkpoint folder {folder}", f"a run is writing there ({holder})", expected, do)
