"""Keeps the model that is in a folder when another run saves there for the first time."""

from __future__ import annotations

import os
import shutil
from itertools import count
from pathlib import Path, PurePath
from typing import Any

from accmt.files import dumps, fsync_folder, loads, staging_folder, write_text
from accmt.saving.layout import find_entry
from accmt.saving.status import STATUS_NAME

RUN_KEY = "run_id"
"""What names a run in the `status.json` of the models that it saved, through all its interruptions."""

MARK_NAME = "replaced_by.json"
"""Names the run that a model gave way to. A folder with this file was made here, and gives way to the next one."""


def keep_previous(folder: Path, run_id: str) -> Path | None:
    """Keep the model in `folder` beside it, as `<folder>.previous`, unless the run has saved it itself.

    The folder is not changed, so that a loader finds a model in it at every moment. Files are linked, which takes no
    room as long as both are the same. What was kept before is deleted. Where nothing can be put beside the folder,
    `previous` in it is the place.

    Args:
        folder: The model folder.
        run_id: Names the run that is about to save there.

    Returns:
        Where the model is now, too; None where there is none, or the run's own.

    Raises:
        OSError: The folder cannot be written.

    Processes:
        Main only.
    """
    status = _read(folder / STATUS_NAME)
    if find_entry(folder) is None or status.get(RUN_KEY) == run_id:
        return None
    folder = folder.resolve()  # a link may lead to another disk
    beside, inside = folder.with_name(f"{folder.name}.previous"), folder / "previous"
    with staging_folder(folder, "previous") as staged:
        if any(_read(place / MARK_NAME).get(RUN_KEY) == run_id for place in (beside, inside)):
            return None  # the run was killed after this, and before the status of its own model was written
        kept = staged / "kept"
        for name in _list_files(folder, status):
            _link(folder / name, kept / name)
        write_text(kept / MARK_NAME, dumps({RUN_KEY: run_id}) + "\n")
        try:
            return _put(kept, beside)
        except OSError:
            return _put(kept, inside)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _list_files(folder: Path, status: dict[str, Any]) -> set[str]:
    """Return the files of the model: folders in it are other models, unless its status lists what is in them."""
    files = status.get("files")
    listed = [PurePath(name) for name in files if isinstance(name, str)] if isinstance(files, list) else []
    inner = {str(path) for path in listed if not path.is_absolute() and ".." not in path.parts}
    own = {path.name for path in folder.iterdir() if not path.name.startswith(".tmp-")}
    return {name for name in own | inner if (folder / name).is_file()}


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def _put(kept: Path, place: Path) -> Path:
    """Rename a folder to `place`, or beside what somebody else put there; what was kept there before goes."""
    names = (place if number == 1 else place.with_name(f"{place.name}-{number}") for number in count(1))
    place = next(path for path in names if not path.exists() or (path / MARK_NAME).is_file())
    if place.exists():
        place.rename(kept.with_name("replaced"))  # deleted with the staging folder
    kept.rename(place)
    fsync_folder(place.parent)
    return place
