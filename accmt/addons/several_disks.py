"""A checkpoint whose files are on several disks.

Every disk has the same manifest, but only the files that its own processes have written. The checkpoint is complete if
each file is intact on one of the disks.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed import ProcessGroup, new_group
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

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
from accmt.errors import CheckpointCorruptError, CheckpointError, fail
from accmt.files import fsync_folder
from accmt.processes import (
    broadcast_buffer,
    broadcast_object,
    disk_managers,
    gather_objects,
    manages_disk,
    names_of_threads,
    process_index,
    run_on_each_disk,
    run_on_every_process,
)

_CHUNK = 1 << 26
"""At most this many bytes are sent at a time."""

# ---- Which processes are on the same disk.


def shares_disk_with(process: int) -> bool:
    """Return whether another process sees the files that this one writes."""
    managers = disk_managers()
    return not managers or managers[process] == managers[process_index()]


def new_disk_group() -> ProcessGroup | None:
    """Return a new group of the processes that manage a disk, for another thread; None if there is one disk.

    Processes: collective; other processes get a group that they cannot use.
    """
    managers = sorted(set(disk_managers()))
    if not managers:
        return None
    group: ProcessGroup = new_group(managers, backend="gloo", timeout=timedelta(days=1))
    if manages_disk():
        names_of_threads.add(group.group_name)
    return group


# ---- Finding it, and copying to each disk the small files that it lacks.


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

    def prepare() -> None:
        """Make the folder of the checkpoint with only the files that are intact on this disk."""
        if own is None:
            return
        if path.exists() and read_manifest(path) != manifest:
            set_aside(path, "another disk has a newer one of this step")
        make_durable(path)
        if not (path / MANIFEST_NAME).exists():
            write_manifest(path, manifest)
        for name in manifest.files.keys() - own:
            (path / name).unlink(missing_ok=True)
        for name in lacking:
            (path / name).parent.mkdir(parents=True, exist_ok=True)

    run_on_every_process(prepare)
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
            raise fail(
                CheckpointError, where, got=f"after copying, {reason}", expected="intact files", do="check this disk"
            )

    run_on_every_process(verify)
    return []


def _set_aside(path: Path, manifest: Manifest, reason: str) -> None:
    if (path / MANIFEST_NAME).is_file() and read_manifest(path) == manifest:
        set_aside(path, reason)


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


# ---- Reading tensors where they are.
#
# Each process reads what it needs from the files on its disk. What it needs from other files is read by a process that
# has them, and sent. With sharded weights and the processes of the save, these are only the replicated tensors, such as
# step counts; otherwise, they are parts of shards. Nothing is written to any disk.


class SpreadReader(HuggingFaceStorageReader):
    """Reads a checkpoint whose files are on several disks.

    Processes: collective, as are all methods.

    Args:
        folder: The folder of the checkpoint on each disk, in which all files are intact.
        files: The names of all files of tensors.

    Raises:
        CheckpointCorruptError: No disk has one of the files.
    """

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        super().__init__(str(folder))
        self._folder = folder
        of_processes = gather_objects({path.name for path in folder.glob("*.safetensors")})
        self._here = of_processes[process_index()]
        self._owners: dict[str, int] = {}
        self._metadata = Metadata({})
        for number, file in enumerate(sorted(files)):
            holders = [index for index, names in enumerate(of_processes) if file in names]
            if not holders:
                do = "resume from another checkpoint"
                raise fail(
                    CheckpointCorruptError,
                    str(folder),
                    got=f"no disk has {file}",
                    expected="a complete checkpoint",
                    do=do,
                )
            self._owners[file] = holders[number % len(holders)]

    def read_metadata(self) -> Metadata:
        """Return where each part of each tensor is stored, in all files on all disks."""
        read, here = super().read_metadata, dict[MetadataIndex, Any]()

        def read_own() -> dict[MetadataIndex, Any]:
            """Return where parts are stored in the files that this process describes to the others."""
            here.update(read().storage_data or {})
            return {index: one for index, one in here.items() if self._owners[_name(one)] == process_index()}

        stored = {index: one for own in run_on_every_process(read_own) for index, one in own.items()} | here
        described: dict[str, Any] = {}  # the shape, the dtype and the parts of each tensor
        for index, one in stored.items():
            offset = torch.Size(index.offset or ())
            end = [start + length for start, length in zip(offset, one.shape, strict=True)]
            known = described.setdefault(
                index.fqn, TensorStorageMetadata(TensorProperties(dtype=one.dtype), torch.Size(end), [])
            )
            known.size = torch.Size(map(max, known.size, end))
            known.chunks.append(ChunkStorageMetadata(offset, torch.Size(one.shape)))
        self._metadata = Metadata(described, storage_data=stored)
        return self._metadata

    def read_into(self, targets: dict[str, Tensor]) -> None:
        """Read tensors; of a sharded one, the part of this process."""
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        missing: dict[MetadataIndex, list[ReadItem]] = defaultdict(list)

        def read_here() -> list[MetadataIndex]:
            """Read what is on this disk, and return the stored parts that are needed from others."""
            planner.set_up_planner(targets, self._metadata, is_coordinator=False)
            self.set_up_storage_reader(self._metadata, is_coordinator=False)
            items = planner.create_local_plan().items
            self.read_data(LoadPlan([item for item in items if self._file_of(item) in self._here]), planner).wait()
            for item in items:
                if self._file_of(item) not in self._here:
                    missing[item.storage_index].append(item)
            return list(missing)

        needed = {index for indices in run_on_every_process(read_here) for index in indices}
        for index in sorted(needed, key=lambda index: (index.fqn, tuple(index.offset or ()))):
            part = self._send(index)
            for item in missing.get(index, ()):
                ends = map(sum, zip(item.storage_offsets, item.lengths, strict=True))
                planner.resolve_tensor(item).detach().copy_(part[tuple(map(slice, item.storage_offsets, ends))])

    def _file_of(self, item: ReadItem) -> str:
        return _name(self._metadata.storage_data[item.storage_index])

    def _send(self, index: MetadataIndex) -> Tensor:
        """Let the process that has a stored part read it, and return it on every process."""
        stored = self._metadata.storage_data[index]
        owner = self._owners[_name(stored)]
        part = torch.empty(stored.shape, dtype=stored.dtype)
        failure = None
        if owner == process_index():
            try:
                with safe_open(self._folder / _name(stored), framework="pt") as file:
                    part = file.get_tensor(index.fqn)
            except (OSError, SafetensorError) as error:
                failure = error
        failure = broadcast_object(failure, source=owner)
        if failure is not None:
            raise failure
        for chunk in torch.split(part.reshape(-1).view(torch.uint8), _CHUNK):
            broadcast_buffer(chunk, source=owner)
        return part


def _name(stored: Any) -> str:
    """Return the name of the file that something is stored in; its folder is that of the process that found it.

    Source: `HuggingFaceStorageReader.read_metadata` in torch/distributed/checkpoint/hf_storage.py.
    """
    return Path(stored.relative_path).name
