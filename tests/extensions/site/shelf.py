"""A checkpoint store: a folder for each step on a shelf, which `SHELF` in the environment names."""

import os
import shutil
from pathlib import Path

from accelerate import PartialState


class Shelf:
    """Called on every process; each writes its own files into one folder."""

    def __init__(self) -> None:
        self._folder = Path(os.environ["SHELF"])

    def save(self, write, step: int, *, force: bool) -> None:
        folder = self._folder / f"{step:06}"
        if PartialState().is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        PartialState().wait_for_everyone()
        write(folder)
        PartialState().wait_for_everyone()

    def load(self) -> Path | None:
        return max(self._folder.glob("*"), default=None)
