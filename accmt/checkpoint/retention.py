"""The folders of checkpoints: which are kept, how the others go, and where those of an earlier run go."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from accmt.checkpoint.folder_names import SET_ASIDE, STEP, make_unfinished_name, step_name
from accmt.checkpoint.manifest import MANIFEST_NAME, Damage, Manifest, read_manifest
from accmt.errors import CheckpointError
from accmt.files import find_free_name, fsync_folder
from accmt.messages import warn

PIN_NAME = "PINNED"
"""A file of this name in a checkpoint keeps it forever."""


def list_published(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if STEP.fullmatch(path.name) and path.is_dir())


def list_by_age(folder: Path) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints whose manifest can be read, oldest first."""
    read = [(path, _read_ours(path)) for path in list_published(folder)]
    ours = [(path, manifest) for path, manifest in read if manifest is not None]
    return sorted(ours, key=lambda item: item[1].sequence)


def prune(folder: Path, *, newest: Path, num_kept: int) -> None:
    """Delete the checkpoints that are too many, and damaged ones that the newest has overtaken.

    Pinned folders stay and do not count; nor does anything without a manifest of ours, which somebody else may have
    written. What cannot be deleted is a warning.

    Processes: main only.
    """
    ours = [path for path, _ in list_by_age(folder) if path != newest and is_deletable(path)]
    surplus = ours[: max(len(ours) - (num_kept - 1), 0)]
    for path in (*surplus, *_find_overtaken(folder, newest)):
        delete(path, step=_step_in(path))


def is_deletable(path: Path) -> bool:
    """Return whether we wrote `path` and nobody pinned it."""
    is_ours = path.is_dir() and not path.is_symlink() and (path / MANIFEST_NAME).is_file()
    return is_ours and not (path / PIN_NAME).exists()


def delete(path: Path, *, step: int) -> None:
    """Delete a checkpoint: first its name, so that a kill leaves no half of one; a failure is a warning."""
    try:
        shutil.rmtree(path.rename(path.with_name(make_unfinished_name("tmp", step))))
    except OSError as error:
        warn(f"the old checkpoint {path} could not be deleted: {error}")


def dispose(replaced: Path, *, step: int) -> None:
    """Delete a checkpoint that was replaced, or give it a visible name where it must stay; a failure is a warning."""
    if is_deletable(replaced):
        delete(replaced, step=step)
        return
    try:
        replaced.rename(find_free_name(replaced.with_name(f"replaced-{step_name(step)}")))
    except OSError as error:
        warn(f"the replaced checkpoint {replaced} could not be renamed: {error}")


def move(paths: Sequence[Path], target: Path, *, otherwise: Path) -> Path:
    """Move folders into `target`, or into `otherwise` where they are on a disk of their own; return which it was."""
    try:
        target.mkdir()
        paths[0].rename(target / paths[0].name)
    except OSError:
        with suppress(OSError):
            target.rmdir()
        target = otherwise
        target.mkdir()
        paths[0].rename(target / paths[0].name)
    for path in paths[1:]:
        path.rename(target / path.name)
    return target


def move_back(source: Path, folder: Path) -> None:
    """Move what `move` put into `source` back to `folder`; wherever that ends, each is whole in one of the two."""
    for path in sorted(source.iterdir(), reverse=True):  # the newest first: it is what a resume looks for
        path.rename(folder / path.name)
    source.rmdir()


def remove(folder: Path) -> None:
    """Delete a folder; what cannot be deleted is said."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        warn(f"the rest of an unfinished checkpoint could not be removed: {error}")


def make_durable(folder: Path) -> None:
    """Make a folder so that a power cut does not take it away again."""
    if folder.is_dir():
        return
    make_durable(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_folder(folder.parent)


def _read_ours(path: Path) -> Manifest | None:
    try:
        manifest = read_manifest(path)
    except CheckpointError:  # of a newer accmt, which may want it back
        return None
    return None if isinstance(manifest, Damage) else manifest


def _find_overtaken(folder: Path, newest: Path) -> Iterator[Path]:
    for path in sorted(folder.glob("damaged-*")):
        if SET_ASIDE.fullmatch(path.name) and is_deletable(path) and _step_in(path) <= _step_in(newest):
            yield path


def _step_in(path: Path) -> int:
    match = STEP.fullmatch(path.name) or SET_ASIDE.fullmatch(path.name)
    return int(match[1]) if match else 0
