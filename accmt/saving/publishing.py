"""Making the files of a save visible, all renames, in the order in which a reader misses nothing."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path, PurePath

from accmt.files import follow_umask, fsync_file, fsync_folder
from accmt.saving.layout import ADAPTER_NAMES, ENTRY_NAMES


def publish(staged: Path, folder: Path, entry: str) -> None:
    """Move the files of a complete save from `staged` into `folder`, and remove what another loader would start from.

    Args:
        entry: The file that a loader starts from; it is moved last, so that one rename changes what is read.
    """
    files = list_files(staged)
    for name in files:
        follow_umask(staged / name)
        fsync_file(staged / name)
    for name in files:
        if name != entry:
            _move(staged / name, folder / name)
    for parent in {(folder / name).parent for name in files}:
        fsync_folder(parent)
    _move(staged / entry, folder / entry)
    fsync_folder(folder)
    _remove_other_entries(folder, keep={entry, *files})


def _remove_other_entries(folder: Path, keep: Collection[str]) -> None:
    # From the last that a loader looks for to the first: so the one it reads changes once, from the old to the new.
    for name in (*reversed(ENTRY_NAMES), *reversed(ADAPTER_NAMES)):
        if name not in keep:
            (folder / name).unlink(missing_ok=True)
    fsync_folder(folder)


def list_files(folder: Path) -> list[str]:
    """Return the paths of all files in `folder` and its folders, relative to it, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def remove_leftovers(folder: Path, before: Collection[str], written: Collection[str]) -> None:
    """Delete what the save before wrote and this one did not, such as the `config.json` of another kind of model.

    Args:
        before: Files of the save before, relative to the folder; what leads out of it is skipped.
    """
    for name in set(before) - set(written):
        path = PurePath(name)
        if not path.is_absolute() and ".." not in path.parts:
            (folder / path).unlink(missing_ok=True)


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)
