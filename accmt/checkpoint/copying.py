"""A checkpoint whose files are on several disks: finding it, and copying to each disk the small files that it lacks.

Every disk has the same manifest, but only the files that its own processes have written. The checkpoint is complete if
each file is intact on one of the disks. Files of tensors are read where they are: see `accmt.checkpoint.reading`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from accmt.checkpoint.manifest import (
    MANIFEST_NAME,
    Checkpoint,
    Damage,
    Manifest,
    find_faults,
    holds_tensors,
    read_manifest,
    step_name,
    write_manifest,
)
from accmt.checkpoint.retention import list_published, make_durable, set_aside
from accmt.errors import CheckpointError, explain
from accmt.files import fsync_folder
from accmt.processes import broadcast_object, manages_disk, process_index, run_on_each_disk, run_on_every_process

_CHUNK = 1 << 26


def find_newest_on_disks(folder: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint in a folder that is on several disks, or None; each has its manifest then.

    Newer ones that are incomplete are renamed, as damaged ones.

    Processes: collective.
    """

    def list_here() -> list[Manifest]:
        found = []
        for path in list_published(folder) if manages_disk() else ():
            manifest = read_manifest(path)
            if isinstance(manifest, Damage):
                set_aside(path, manifest.reason)
            else:
                found.append(manifest)
        return found

    known: list[Manifest] = []
    for listed in run_on_every_process(list_here):
        known += [manifest for manifest in listed if manifest not in known]
    for manifest in sorted(known, key=lambda one: one.sequence, reverse=True):
        path = folder / step_name(manifest.step)
        missing = copy_missing(path, manifest)
        if not missing:
            return Checkpoint(path, manifest)
        reason = f"no disk has {', '.join(missing)} without damage"
        run_on_each_disk(lambda path=path, one=manifest, why=reason: _set_aside(path, one, why))  # type: ignore[misc]
    return None


def copy_missing(path: Path, manifest: Manifest) -> list[str]:
    """Copy to each disk the files without tensors that it lacks; return the files that are intact on none of them.

    If there are such files, nothing is copied. Otherwise, all files of the checkpoint on each disk are intact.

    Processes: collective.

    Raises:
        CheckpointError: A copied file is damaged.
        OSError: A file could not be read or written.
    """

    def find_intact() -> set[str] | None:
        if not manages_disk():
            return None
        if not (path / MANIFEST_NAME).is_file() or read_manifest(path) != manifest:
            return set()
        return {name for name in manifest.files if next(find_faults(path, manifest.only([name])), None) is None}

    intact = run_on_every_process(find_intact)
    disks = {index: names for index, names in enumerate(intact) if names is not None}
    sources = {name: index for index in reversed(disks) for name in disks[index]}
    missing = sorted(manifest.files.keys() - sources.keys())
    if missing:
        return missing
    common = [name for name in sorted(sources) if not holds_tensors(name)]
    to_copy = [name for name in common if any(name not in names for names in disks.values())]
    own = disks.get(process_index())
    lacking = [] if own is None else [name for name in to_copy if name not in own]
    run_on_every_process(lambda: None if own is None else _prepare(path, manifest, own, lacking))
    failures = [
        _copy(path / name, manifest.files[name].size, sources[name], writes=name in lacking) for name in to_copy
    ]

    def verify() -> None:
        for failure in failures:
            if failure is not None:
                raise failure
        for folder in {(path / name).parent for name in lacking}:
            fsync_folder(folder)
        if (reason := next(find_faults(path, manifest.only(lacking)), None)) is not None:
            where = f"checkpoint {path} on process {process_index()}"
            raise CheckpointError(explain(where, f"after copying, {reason}", "intact files", "check this disk"))

    run_on_every_process(verify)
    return []


def _set_aside(path: Path, manifest: Manifest, reason: str) -> None:
    if (path / MANIFEST_NAME).is_file() and read_manifest(path) == manifest:
        set_aside(path, reason)


def _prepare(path: Path, manifest: Manifest, intact: Collection[str], lacking: Sequence[str]) -> None:
    """Make the folder of a checkpoint with only the files that are intact on this disk."""
    if path.exists() and read_manifest(path) != manifest:
        set_aside(path, "another disk has a newer one of this step")
    make_durable(path)
    if not (path / MANIFEST_NAME).exists():
        write_manifest(path, manifest)
    for name in manifest.files.keys() - intact:
        (path / name).unlink(missing_ok=True)
    for name in lacking:
        (path / name).parent.mkdir(parents=True, exist_ok=True)


def _copy(file: Path, size: int, source: int, *, writes: bool) -> OSError | None:
    """Send a file from the process `source` to all others, some of which write it.

    Returns:
        The error of writing it here, which cannot be raised before the other processes have received the file.

    Raises:
        OSError: The source could not read it; raised on all processes.
    """
    failure = None
    for start in range(0, max(size, 1), _CHUNK):
        sent = broadcast_object(_read(file, start) if process_index() == source else b"", source=source)
        if isinstance(sent, OSError):
            raise sent
        if writes and failure is None:
            failure = _append(file, sent)
    return failure


def _read(file: Path, start: int) -> bytes | OSError:
    try:
        with file.open("rb") as opened:
            opened.seek(start)
            return opened.read(_CHUNK)
    except OSError as error:
        return error


def _append(file: Path, content: bytes) -> OSError | None:
    try:
        with file.open("ab") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        return error
    return None
