"""A folder of checkpoints whose newest complete one survives a failure at any moment.

A checkpoint is written under a temporary name, made durable, and published by one rename; older ones are deleted only
afterwards. When a step is saved again, its old checkpoint is moved aside between two renames; after a kill in that
instant, whoever opens the folder next moves it back.

The folder may be on several disks that not all processes see. Each disk then has the whole manifest, but only the files
that its own processes have written. Before a resume, the missing files are copied between the disks.
"""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from accmt.checkpoint.manifest import (
    MANIFEST_NAME,
    SET_ASIDE,
    STEP,
    Checkpoint,
    Damage,
    FileEntry,
    Kind,
    Manifest,
    examine,
    is_abandoned,
    make_unfinished_name,
    parse_unfinished_name,
    read_checkpoint,
    read_manifest,
    step_name,
    write_manifest,
)
from accmt.checkpoint.retention import (
    KEEP_EVERY,
    PIN_NAME,
    dispose,
    is_kept_for_good,
    list_by_age,
    list_published,
    make_durable,
    move,
    prune,
    publish,
    remove,
    set_aside,
)
from accmt.errors import CheckpointError, fail
from accmt.files import (
    LOCK_NAME,
    FolderLock,
    FolderTakenError,
    find_surplus,
    fsync_file,
    fsync_folder,
    place_beside,
    place_inside,
)
from accmt.messages import say
from accmt.options.units import Every
from accmt.processes import (
    gather_objects,
    has_separate_disks,
    manages_disk,
    process_index,
    run_on_each_disk,
    run_on_every_process,
    run_on_main_process,
)
from accmt.registry import addon

T = TypeVar("T")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNWRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}  # the last: a file has its name


@dataclass(frozen=True)
class Failure:
    """Why a process could not write its part, in serializable form."""

    cause: str
    advice: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        reason, number = f"{type(error).__name__}: {error}", None
        match error:
            case CheckpointError():
                reason = str(error)
            case OSError():
                number = error.errno
        if number in _FULL:
            advice = "free space there, lower `max_checkpoints`, or pass another `checkpoint` folder"
        elif number in _UNWRITABLE:
            advice = "make the folder writable, or pass another `checkpoint` folder"
        elif number == errno.ENOENT:
            advice = "do not touch the folder during a run; with several machines, use shared storage"
        else:
            advice = "see the cause above"
        return cls(f"on process {process_index()}: {reason}", advice)


@dataclass(frozen=True)
class Part:
    files: dict[str, FileEntry] = field(default_factory=dict)
    failure: Failure | None = None


class Staging:
    """A checkpoint that is being written.

    Does not communicate, so a different thread than the one that begins and publishes can write the files.
    """

    def __init__(self, step: int, folder: Path) -> None:
        self.step = step
        self.folder = folder
        self.error: Exception | None = None
        self._files: dict[str, FileEntry] = {}

    def write(self, write: Callable[[Path], None]) -> None:
        """Call `write` with a folder of this process, then make its content durable and record the digests.

        An error is stored, not raised: `CheckpointStore.publish` raises it on every process, so that no process waits
        for the others. May be called repeatedly; after an error nothing more is written. File names must be unique
        across processes.
        """
        if self.error is not None:
            return
        part_folder = self.folder / f".part-{process_index()}"
        try:
            part_folder.mkdir()
            write(part_folder)
            for path in sorted(part_folder.rglob("*")):
                if path.is_dir():
                    continue
                name = path.relative_to(part_folder)
                fsync_file(path)
                self._files[name.as_posix()] = FileEntry.of(path)
                target = self.folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                path.rename(target)
            shutil.rmtree(part_folder)
        except Exception as error:  # noqa: BLE001 - publish raises it on every process
            self.error = error

    def part(self) -> Part:
        return Part(self._files) if self.error is None else Part(failure=Failure.of(self.error))


class CheckpointStore:
    """Saves and finds checkpoints in one folder.

    A save is `begin`, `Staging.write` and `publish`; another thread may do the writing. One checkpoint is written at a
    time: `begin` drops one that was neither published nor discarded.

    The processes communicate in `group`: the default one, or, if another thread publishes, a separate one
    (`new_cpu_group`).
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_checkpoints: int | None = None,
        keep_every: Every | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.folder = folder
        self._keep_every = keep_every
        self._group = group
        self._num_kept = 1 if max_checkpoints is None else max_checkpoints
        self._in_progress: Path | None = None
        self._claim: FolderLock | None = None

    def claim(self) -> None:
        """Lock the folder against other runs until `release` or the end of this process.

        Processes: collective; the process that manages the disk holds the lock.
        """

        def lock() -> None:
            make_durable(self.folder)
            try:
                self._claim = FolderLock.take(self.folder, "checkpoints")
            except FolderTakenError as error:
                where, got = f"checkpoint folder {self.folder}", f"in use by another run ({error})"
                expected = "a separate folder for each run: runs in one would move and delete each other's checkpoints"
                do = "wait for that run, stop it, or pass another `checkpoint` folder"
                raise fail(CheckpointError, where, got=got, expected=expected, do=do) from None

        self._run_on_each_disk(lock)

    def release(self) -> None:
        """Release the lock of `claim`, if there is one. Not collective."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def begin(self, step: int) -> Staging:
        """Create the temporary folder of a checkpoint. Processes: collective."""

        def make() -> Path:
            self._in_progress = None
            self._clean()
            make_durable(self.folder)
            staged = self.folder / make_unfinished_name("tmp", step)
            staged.mkdir()
            self._in_progress = staged
            return staged

        return Staging(step, self._run_on_each_disk(make, step=step))

    def publish(self, staging: Staging, info: Mapping[str, Any]) -> Path:
        """Rename a checkpoint to its final name once every process has written its part, then delete surplus ones.

        Raises:
            CheckpointError: A process failed. The temporary folder is removed; older checkpoints are kept.

        Processes: collective.
        """
        whole = _merge(gather_objects(staging.part(), group=self._group))
        if whole.failure is not None:
            self.discard(staging)
            raise self._report(whole.failure, staging.step) from staging.error
        step = staging.step
        try:
            manifest, is_kept = self._run_on_main(lambda: self._describe(step, whole.files, info), step=step)
            published = self._run_on_each_disk(lambda: self._publish(staging, manifest, is_kept=is_kept), step=step)
        except CheckpointError:
            self.discard(staging)
            raise
        # Only now, because on other disks the new one may have been missing until here.
        self._run_on_each_disk(lambda: prune(self.folder, newest=published, num_kept=self._num_kept), step=step)
        return published

    def discard(self, staging: Staging) -> None:
        """Remove the temporary folder of a checkpoint that will not be published. Processes: collective."""

        def remove_here() -> None:
            self._in_progress = None
            # It does not if it was renamed on this disk before another disk failed.
            if staging.folder.exists():
                remove(staging.folder)

        self._run_on_each_disk(remove_here)

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, with every file verified, or None.

        A damaged checkpoint causes a warning, is renamed to `damaged-step-...`, and the previous one is used.

        Raises an error if one has a version unknown to this accmt: it may be the newest.

        Processes: collective; the main process decides. On several disks, it is the newest one of which each
        file is on one of them, and the missing files are copied to each disk.
        """
        if not has_separate_disks():
            return self._run_on_main(self._find_newest)
        self._run_on_each_disk(self._finish_replacements)
        newest: Checkpoint | None = addon("find_newest_on_disks")(self.folder)
        return newest

    def find(self, path: Path) -> Checkpoint:
        """Return the checkpoint in the folder `path`, with every file verified.

        Raises:
            NoCheckpointError: There is no checkpoint.
            CheckpointCorruptError: A file is missing or has changed since it was written.
            CheckpointError: The checkpoint has a version unknown to this accmt.

        Processes: collective; the main process decides.
        """

        def read() -> Checkpoint:
            self._finish_replacements()
            return read_checkpoint(path)

        if has_separate_disks():
            on_disks = run_on_every_process(lambda: read_manifest(path) if manages_disk() else None)
            manifests = [manifest for manifest in on_disks if isinstance(manifest, Manifest)]
            if manifests:
                # The same step may have been saved again while one of the disks was away.
                newest = max(manifests, key=lambda manifest: manifest.sequence)
                if not addon("copy_missing")(path, newest):
                    return Checkpoint(path, newest)
        return self._run_on_main(read)

    def set_aside_previous(self) -> Path | None:
        """Move the checkpoints of an earlier run to `<folder>.previous` (`.previous-2` ...), to start a new one.

        Processes: collective.
        """
        return self._run_on_each_disk(self._set_aside_previous)

    def remove_surplus(self, keep: int | None) -> None:
        """Delete the checkpoints of the oldest earlier runs; other files there are kept.

        Processes: only those that manage a disk.
        """
        for place in find_surplus(self.folder.resolve(), keep, _newest_manifest_in):
            for path in filter(_is_checkpoint, sorted(place.iterdir())):
                remove(path)
            with suppress(OSError):  # it contains other files too
                place.rmdir()
            say(f"deleted the checkpoints of an earlier run in {place} (max_previous_runs={keep})")

    def _run_on_main(self, action: Callable[[], T], *, step: int | None = None) -> T:
        return run_on_main_process(lambda: self._explaining(action, step), group=self._group)

    def _run_on_each_disk(self, action: Callable[[], T], *, step: int | None = None) -> T:
        return run_on_each_disk(lambda: self._explaining(action, step), group=self._group)

    def _explaining(self, action: Callable[[], T], step: int | None) -> T:
        try:
            return action()
        except CheckpointError:
            raise
        except Exception as error:
            raise self._report(Failure.of(error), step) from error

    def _report(self, failure: Failure, step: int | None) -> CheckpointError:
        where = f"checkpoint folder {self.folder}"
        if step is not None:
            where = f"checkpoint of step {step} in {self.folder}"
        expected = "every file written and made durable; the complete checkpoints are untouched"
        cause = failure.cause.replace(f"{self.folder}/", "")  # `where` already contains the folder
        return fail(CheckpointError, where, got=cause, expected=expected, do=failure.advice)

    def _describe(self, step: int, files: Mapping[str, FileEntry], info: Mapping[str, Any]) -> tuple[Manifest, bool]:
        """Return the manifest of a new checkpoint, and whether `keep_every` keeps it."""
        is_kept = self._keep_every is not None and is_kept_for_good(self._keep_every, info, self.folder)
        sequence = 1 + max((sequence for _, sequence in list_by_age(self.folder)), default=0)
        return Manifest.of_this_run(step=step, sequence=sequence, files=files, info=info), is_kept

    def _publish(self, staging: Staging, manifest: Manifest, *, is_kept: bool) -> Path:
        if is_kept:
            (staging.folder / PIN_NAME).write_text(KEEP_EVERY)
        # The files are durable; their names come next, then the manifest, then the rename: after a power failure at any
        # point there is either no checkpoint with this name or a complete one.
        fsync_folder(staging.folder)
        for path in staging.folder.rglob("*"):
            if path.is_dir():
                fsync_folder(path)
        write_manifest(staging.folder, manifest)
        published = publish(staging.folder, staging.step)
        self._in_progress = None
        return published

    def _find_newest(self) -> Checkpoint | None:
        self._finish_replacements()
        for folder in sorted(list_published(self.folder), key=_age, reverse=True):
            checkpoint = examine(folder)
            if isinstance(checkpoint, Checkpoint):
                return checkpoint
            set_aside(folder, checkpoint.reason)
        return None

    def _clean(self) -> None:
        self._finish_replacements()
        for leftover, _ in self._list_abandoned("tmp"):
            remove(leftover)

    def _finish_replacements(self) -> None:
        for old, step in self._list_abandoned("old"):
            published = self.folder / step_name(step)
            if published.exists():  # the kill came after the second rename
                dispose(old, step=step)
            else:
                old.rename(published)

    def _list_abandoned(self, kind: Kind) -> Iterator[tuple[Path, int]]:
        for path in sorted(self.folder.glob(f".{kind}-step-*")):
            unfinished = parse_unfinished_name(path.name)
            # `is_abandoned` takes a folder of this process for one of an earlier attempt.
            if unfinished is None or path == self._in_progress:
                continue
            if is_abandoned(path, unfinished):
                yield path, unfinished.step

    def _set_aside_previous(self) -> Path | None:
        self._clean()
        entries = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        ours = list(filter(_is_checkpoint, entries))  # a user may keep other files there
        if not ours:
            return None
        folder = self.folder.resolve()  # a link may lead to another disk, and renames work only within one disk
        previous = place_beside(folder)
        try:
            previous = move(ours, previous, otherwise=place_inside(folder))
        except OSError as error:
            expected = f"a folder whose checkpoints can be moved to {previous}"
            do = "move them away, pass another `checkpoint` folder, or resume the earlier run with `resume=True`"
            where = f"checkpoint folder {self.folder}"
            raise fail(CheckpointError, where, got=str(error), expected=expected, do=do) from error
        say(f"moved the checkpoints of an earlier run in {self.folder} to {previous}")
        return previous


def _is_checkpoint(path: Path) -> bool:
    return bool(STEP.fullmatch(path.name) or SET_ASIDE.fullmatch(path.name))


def _newest_manifest_in(place: Path) -> int | None:
    if (place / LOCK_NAME).exists():  # a run is writing there
        return None
    times = []
    for path in place.iterdir():
        manifest = path / MANIFEST_NAME
        if _is_checkpoint(path) and manifest.is_file():
            times.append(manifest.stat().st_mtime_ns)
    return max(times, default=None)


def _age(folder: Path) -> float:
    """Return a number that grows with each checkpoint; an unreadable one counts as newest, so that it is examined."""
    manifest = read_manifest(folder)
    if isinstance(manifest, Damage):
        return math.inf
    return manifest.sequence


def _merge(parts: Sequence[Part]) -> Part:
    """Merge the parts of all processes: their files, or one failure that names every cause."""
    failures = [part.failure for part in parts if part.failure is not None]
    if failures:
        return Part(failure=Failure("; ".join(failure.cause for failure in failures), failures[0].advice))
    files: dict[str, FileEntry] = {}
    duplicates: set[str] = set()
    for part in parts:
        duplicates |= part.files.keys() & {MANIFEST_NAME, *files}
        files |= part.files
    if duplicates:  # the later file has replaced the earlier one
        cause = f"more than one file called {', '.join(sorted(duplicates))}"
        return Part(failure=Failure(cause, "use a file name per process"))
    return Part(files)
