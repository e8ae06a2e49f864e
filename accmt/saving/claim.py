"""A model folder that one run at a time saves to."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accmt.errors import SavingError, explain
from accmt.files import FolderLock, FolderTakenError


@dataclass(frozen=True)
class ModelFolderClaim:
    """A lock on a model folder, and the folders that were made for it.

    Attributes:
        lock: The lock; None on a file system without locks.
        made: The folders, the innermost first; those that are still empty at the end go again.
    """

    lock: FolderLock | None
    made: tuple[Path, ...]

    @classmethod
    def take(cls, folder: Path) -> ModelFolderClaim | None:
        """Claim a folder; None where nothing can be written there, which the first save will say.

        Processes: main only.
        """
        made = tuple(path for path in (folder, *folder.parents) if not path.exists())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return cls(FolderLock.take(folder), made)
        except FolderTakenError as error:
            got, do = f"a run is saving there ({error})", "wait for that run, stop it, or pass another `model_path`"
            expected = "a folder that no other run saves to: each would replace the other's model"
            raise SavingError(explain(f"model folder {folder}", got, expected, do)) from None
        except OSError:
            return None

    def release(self) -> None:
        if self.lock is not None:
            self.lock.release()
        with suppress(OSError):  # it holds something
            for path in self.made:
                path.rmdir()
