"""A folder of checkpoints of which the newest complete one survives whatever happens, at any moment.

A checkpoint is written under a temporary name, made durable, and published by one rename; only then do older ones go.
A step that is saved again moves its old checkpoint aside for the instant between two renames; whoever opens the folder
after a kill in that instant moves it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from accmt.checkpoint.folder_names import (
    SET_ASIDE,
    STEP,
    Kind,
    is_abandoned,
    make_unfinished_name,
    parse_unfinished_name,
    step_name,
)
from accmt.checkpoint.manifest import (
    MANIFEST_NAME,
    Checkpoint,
    Damage,
    FileEntry,
    Manifest,
    examine,
    read_checkpoint,
    read_manifest,
    write_manifest,
)
from accmt.checkpoint.retention import dispose, list_by_age, list_published, make_durable, move, prune, remove
from accmt.checkpoint.staged_checkpoint import Failure, Staging, merge
from accmt.errors import CheckpointError, explain
from accmt.files import (
    LOCK_NAME,
    FolderLock,
    FolderTakenError,
    find_free_name,
    find_surplus,
    fsync_folder,
    place_beside,
    place_inside,
)
from accmt.messages import say, warn
from accmt.processes import gather_objects, run_on_main_process

T = TypeVar("T")


class CheckpointStore:
    """Saves and finds checkpoints in one folder.

    `save` is `begin`, `Staging.write` and `publish` in one; apart, the writing can be done by another thread. One
    checkpoint is written at a time: `begin` gives up one that was neither published nor discarded.

    Args:
        group: Where the processes agree; one of its own (`new_cpu_group`) where another thread publishes. None: the
            default group.
    """

    def __init__(
        self, folder: Path, *, max_checkpoints: int | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        self.folder = folder
        self._group = group
        self._num_kept = 1 if max_checkpoints is None else max_checkpoints
        self._in_progress: Path | None = None
        self._claim: FolderLock | None = None

    def claim(self) -> None:
        """Keep every other run from writing here, until `release` or the end of this process, however it ends.

        Processes: collective; the main process holds the claim.
        """

        def lock() -> None:
            make_durable(self.folder)
            try:
                self._claim = FolderLock.take(self.folder)
            except FolderTakenError as error:
                got = f"a run is writing there ({error})"
                expected = "a folder that no other run writes to: each would move and delete the other's checkpoints"
                do = "wait for that run, stop it, or pass another `checkpoint` folder"
                message = explain(f"checkpoint folder {self.folder}", got, expected, do)
                raise CheckpointError(message) from None

        self._run_on_main(lock)

    def release(self) -> None:
        """Give up what `claim` took; without a claim nothing happens. Needs no other process."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def save(self, step: int, write: Callable[[Path], None], info: Mapping[str, Any]) -> Path:
        """Write a checkpoint and publish it; an older one of the same step is replaced.

        Args:
            write: Called on every process with an empty folder for its files; no two may write one of the same name.
            info: Free JSON values for the manifest, those of the main process.

        Raises:
            CheckpointError: Something failed on some process. Older checkpoints are untouched.

        Processes: collective.
        """
        staging = self.begin(step)
        staging.write(write)
        return self.publish(staging, info)

    def begin(self, step: int) -> Staging:
        """Make the temporary folder of a checkpoint.

        Processes: collective.
        """

        def make() -> Path:
            self._in_progress = None
            self._clean()
            make_durable(self.folder)
            staged = self.folder / make_unfinished_name("tmp", step)
            staged.mkdir()
            self._in_progress = staged
            return staged

        return Staging(step, self._run_on_main(make, step=step))

    def publish(self, staging: Staging, info: Mapping[str, Any]) -> Path:
        """Give a checkpoint its name once every process has written its part, then delete those that are too many.

        Raises:
            CheckpointError: As in `save`; the temporary folder is removed.

        Processes: collective.
        """
        whole = merge(gather_objects(staging.part(), group=self._group))
        if whole.failure is not None:
            self.discard(staging)
            raise CheckpointError(self._explain(whole.failure, staging.step)) from staging.error
        return self._run_on_main(lambda: self._publish(staging, whole.files, info), step=staging.step)

    def discard(self, staging: Staging) -> None:
        """Remove the temporary folder of a checkpoint that will not be published.

        Processes: collective.
        """
        self._run_on_main(lambda: self._discard(staging.folder))

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, every file verified; None where there is none.

        A damaged one is named in a warning and set aside as `damaged-step-...`, and the one before it is used.

        Raises:
            CheckpointError: A checkpoint is of a version that this accmt does not know, or one that a kill left without
                its name cannot be renamed.

        Processes: collective; the main process decides.
        """
        return self._run_on_main(self._find_newest)

    def find(self, path: Path) -> Checkpoint:
        """Return the checkpoint in the folder `path`, every file verified.

        Raises:
            NoCheckpointError: There is no checkpoint.
            CheckpointCorruptError: A file is missing, or is not what was written.
            CheckpointError: It is of a version that this accmt does not know.

        Processes: collective; the main process decides.
        """

        def read() -> Checkpoint:
            self._finish_replacements()
            return read_checkpoint(path)

        return self._run_on_main(read)

    def clean(self) -> None:
        """Finish what a killed process left unfinished, and remove the rest of it; that of a living process stays.

        Processes: collective.
        """
        self._run_on_main(self._clean)

    def set_aside_previous(self) -> Path | None:
        """Move the checkpoints of an earlier run to `<folder>.previous` (`.previous-2` ...), to start a new one.

        Processes: collective.
        """
        return self._run_on_main(self._set_aside_previous)

    def remove_surplus(self, keep: int | None) -> None:
        """Delete the checkpoints of the oldest earlier runs that were set aside; other files there stay.

        Processes: main only.
        """
        for place in find_surplus(self.folder.resolve(), keep, _newest_manifest_in):
            for path in filter(_is_checkpoint, sorted(place.iterdir())):
                remove(path)
            with suppress(OSError):  # it holds something else, too
                place.rmdir()
            say(f"the checkpoints of an earlier run in {place} were deleted (max_previous_runs={keep})")

    def _run_on_main(self, action: Callable[[], T], *, step: int | None = None) -> T:
        def act() -> T:
            try:
                return action()
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointError(self._explain(Failure.of(error), step)) from error

        return run_on_main_process(act, group=self._group)

    def _explain(self, failure: Failure, step: int | None) -> str:
        where = f"checkpoint folder {self.folder}" if step is None else f"checkpoint of step {step} in {self.folder}"
        expected = "every file written and made durable; the complete checkpoints are untouched"
        return explain(where, failure.cause, expected, failure.advice)

    def _publish(self, staging: Staging, files: Mapping[str, FileEntry], info: Mapping[str, Any]) -> Path:
        published = self.folder / step_name(staging.step)
        try:
            for folder in (staging.folder, *(path for path in staging.folder.rglob("*") if path.is_dir())):
                fsync_folder(folder)
            sequence = 1 + max((manifest.sequence for _, manifest in list_by_age(self.folder)), default=0)
            manifest = Manifest.of_this_run(step=staging.step, sequence=sequence, files=files, info=info)
            write_manifest(staging.folder, manifest)
            self._rename(staging, published)
        except Exception:
            self._discard(staging.folder)
            raise
        self._in_progress = None
        prune(self.folder, newest=published, num_kept=self._num_kept)
        return published

    def _rename(self, staging: Staging, published: Path) -> None:
        old = self.folder / make_unfinished_name("old", staging.step)
        if published.exists():
            published.rename(old)
        try:
            staging.folder.rename(published)
        except OSError:
            if old.exists():
                old.rename(published)
            raise
        fsync_folder(self.folder)
        if old.exists():
            dispose(old, step=staging.step)

    def _discard(self, staged: Path) -> None:
        self._in_progress = None
        if staged.exists():
            remove(staged)

    def _find_newest(self) -> Checkpoint | None:
        self._finish_replacements()
        for folder in sorted(list_published(self.folder), key=_age, reverse=True):
            found = examine(folder)
            if isinstance(found, Checkpoint):
                return found
            warn(f"the checkpoint {folder} is damaged: {found.reason}; {_set_aside(folder)}")
        return None

    def _clean(self) -> None:
        self._finish_replacements()
        for leftover, _ in self._list_abandoned("tmp"):
            remove(leftover)

    def _finish_replacements(self) -> None:
        for old, step in self._list_abandoned("old"):
            published = self.folder / step_name(step)
            if published.exists():
                dispose(old, step=step)
            else:
                old.rename(published)

    def _list_abandoned(self, kind: Kind) -> Iterator[tuple[Path, int]]:
        for path in sorted(self.folder.glob(f".{kind}-step-*")):
            unfinished = parse_unfinished_name(path.name)
            if unfinished is None or path == self._in_progress:
                continue
            if is_abandoned(path, unfinished):
                yield path, unfinished.step

    def _set_aside_previous(self) -> Path | None:
        self._clean()
        entries = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        ours = list(filter(_is_checkpoint, entries))
        if not ours:
            return None
        folder = self.folder.resolve()  # a link may lead to another disk, and nothing is renamed across disks
        previous = place_beside(folder)
        try:
            previous = move(ours, previous, otherwise=place_inside(folder))
        except OSError as error:
            expected = f"a folder whose checkpoints can be moved to {previous}"
            do = "move them away, pass another `checkpoint` folder, or resume the earlier run with `resume=True`"
            raise CheckpointError(explain(f"checkpoint folder {self.folder}", str(error), expected, do)) from error
        say(f"the checkpoints of an earlier run in {self.folder} were moved to {previous}")
        return previous


def _is_checkpoint(path: Path) -> bool:
    return bool(STEP.fullmatch(path.name) or SET_ASIDE.fullmatch(path.name))


def _newest_manifest_in(place: Path) -> int | None:
    if (place / LOCK_NAME).exists():  # a run writes there
        return None
    manifests = [path / MANIFEST_NAME for path in place.iterdir() if _is_checkpoint(path)]
    return max((path.stat().st_mtime_ns for path in manifests if path.is_file()), default=None)


def _age(folder: Path) -> float:
    """Return a number that grows from older to newer; what cannot be read counts as newest, so that it is looked at."""
    manifest = read_manifest(folder)
    return math.inf if isinstance(manifest, Damage) else manifest.sequence


def _set_aside(folder: Path) -> str:
    aside = find_free_name(folder.with_name(f"damaged-{folder.name}"))
    try:
        folder.rename(aside)
    except OSError as error:
        return f"it could not be set aside ({error})"
    return f"it is set aside as {aside.name}"
