"""Checkpoints in object storage: `Trainer(checkpoint="s3://bucket/run")`, or any other URL that fsspec understands.

The local checkpoint folder stays what it is, so training pauses no longer than without a remote folder. A thread of the
main process uploads each published checkpoint under a name of its own; its manifest goes last. A remote checkpoint is
complete if its manifest is there and every file has the size and digest that the manifest lists. Older ones are deleted
only after that, manifest first. A resume takes the newest checkpoint of both places.

If machines have separate disks, each of them uploads the files on its disk: the main process chooses the checkpoint,
and uploads the manifest when all have uploaded theirs.

A store that fsspec does not know is a class derived from `fsspec.AbstractFileSystem`, registered by its package:
https://filesystem-spec.readthedocs.io/en/latest/developer.html
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch.distributed as dist

from accmt.addons.inspection import Inspection, find_resumable, inspect
from accmt.addons.several_disks import new_disk_group, shares_disk_with
from accmt.checkpoint.manifest import (
    MANIFEST_NAME,
    Damage,
    Manifest,
    find_faults,
    holds_tensors,
    make_unfinished_name,
    read_manifest,
)
from accmt.checkpoint.retention import KEEP_EVERY, PIN_NAME, list_published, make_durable, publish
from accmt.checkpoint.store import CheckpointStore
from accmt.errors import AccmtError, CheckpointError, MissingPackageError, NoCheckpointError, fail
from accmt.files import dumps, fsync_file, fsync_folder, loads, write_text
from accmt.messages import say, warn, warn_once
from accmt.processes import (
    close_cpu_group,
    is_main_process,
    num_processes,
    process_index,
    run_on_each_disk,
    run_on_main_process,
)
from accmt.run import EvaluationRun, Run
from accmt.run.features import Feature
from accmt.secrets import hide_text

if TYPE_CHECKING:
    from accmt.options import Settings

T = TypeVar("T")

_UNIQUE = r"\d{8,}-[0-9a-f]{8}"
"""In a remote name: the step, and the first digits of the manifest's digest. Objects cannot be renamed."""

_NAME = re.compile(f"step-{_UNIQUE}")

_LEASE = "lease.json"

ORIGIN = ".remote.json"
"""In a local checkpoint folder: the URL that its checkpoints are uploaded to."""

_ATTEMPTS = 8
_FIRST_PAUSE_S = 0.5  # doubled after each attempt: about a minute in all
_LONGEST_S = 60.0  # also if each attempt itself takes long
_S3 = ("s3://", "s3a://")
_THREADS = 8


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint in a remote folder.

    Attributes:
        name: Its name in the folder.
        manifest: Its manifest; None if the upload was never finished.
        sizes: The size in bytes of each object, by its path in the checkpoint.
        problem: What is wrong with it; "" if the manifest is there and all sizes agree.
    """

    name: str
    manifest: Manifest | None
    sizes: dict[str, int]
    problem: str = ""

    @property
    def is_pinned(self) -> bool:
        return PIN_NAME in self.sizes


class RemoteFolder:
    """A folder of checkpoints in object storage.

    Requests that fail are repeated with growing, random pauses.

    Args:
        url: Its URL, such as "s3://bucket/run". Leave credentials to the environment or the library's own files.

    Attributes:
        kind: What is in it.
        argument: The argument of the Trainer that names it.
        prefix: What the names of its checkpoints start with.
        advice_if_skipped: What to do if uploads are too slow for each; "" if only the newest matters.

    Raises:
        MissingPackageError: The package for this kind of URL is not installed.
        CheckpointError: fsspec does not know this kind of URL.
    """

    kind: ClassVar[str] = "checkpoint"
    argument: ClassVar[str] = "checkpoint"
    prefix: ClassVar[str] = "step"
    advice_if_skipped: ClassVar[str] = "raise checkpoint_every to upload each"

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs

            is_local = self.url.startswith(("file://", "local://"))  # whose folders do not appear by themselves
            options: dict[str, Any] = {"auto_mkdir": True} if is_local else {}
            if self.url.startswith(_S3):
                # Requests are repeated here. botocore and s3fs repeat each up to five times: three minutes without a
                # word if the store is down.
                options = {"config_kwargs": {"retries": {"total_max_attempts": 1}}, "skip_instance_cache": True}
            self._fs, root = url_to_fs(self.url, use_listings_cache=False, **options)
            if self.url.startswith(_S3):
                self._fs.retries = 1
        except ImportError as error:
            extra = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}.get(url.partition(":")[0])
            do = f"pip install 'accmt-trainer[{extra}]'" if extra else "install the package that the error names"
            raise fail(
                MissingPackageError, self.shown, got=str(error), expected="an installed fsspec file system", do=do
            ) from error
        except ValueError as error:
            do = "use s3://, gs://, az://, hf://, file:// or another protocol that fsspec knows"
            raise fail(
                CheckpointError, self.shown, got=str(error), expected="a URL that fsspec can open", do=do
            ) from error
        self._root = str(root).rstrip("/")

    @property
    def shown(self) -> str:
        """The URL for messages."""
        return hide_text(self.url)

    # ---- Requests

    def _retry(self, request: Callable[[], T]) -> T:
        begin = time.monotonic()
        for attempt in range(_ATTEMPTS):
            try:
                return request()
            except (FileNotFoundError, FileExistsError, PermissionError):
                raise
            except Exception as error:
                if attempt == _ATTEMPTS - 1 or time.monotonic() - begin > _LONGEST_S:
                    raise
                answer = hide_text(f"{type(error).__name__}: {error}")
                warn_once(f"{self.shown}: {answer}; requests are repeated for up to a minute", about=self.url)
                time.sleep(_FIRST_PAUSE_S * 2**attempt * (0.5 + random.random()))  # noqa: S311 - no secret
        raise AssertionError

    def _read(self, key: str) -> bytes:
        content: bytes = self._retry(lambda: self._fs.cat_file(f"{self._root}/{key}"))
        return content

    def _write(self, key: str, content: bytes, **options: Any) -> None:
        self._retry(lambda: self._fs.pipe_file(f"{self._root}/{key}", content, **options))

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError):
                self._retry(partial(self._fs.rm_file, f"{self._root}/{key}"))

    def _modified(self, key: str) -> float:
        """Return when an object was written, by the clock of the store."""
        modified: float = self._retry(lambda: self._fs.modified(f"{self._root}/{key}")).timestamp()
        return modified

    def _sizes(self) -> dict[str, int]:
        """Return the size of each object in the folder, by its path."""
        self._fs.invalidate_cache()
        with suppress(FileNotFoundError):
            found = self._retry(lambda: self._fs.find(self._root, detail=True))
            return {name.removeprefix(f"{self._root}/"): entry["size"] for name, entry in found.items()}
        return {}

    def try_writing(self) -> None:
        """Write an object and delete it, so that missing credentials are found before training."""
        probe = f"probe-{secrets.token_hex(4)}"
        self._write(probe, b"")
        self._delete([probe])

    # ---- Checkpoints

    def checkpoints(self) -> list[RemoteCheckpoint]:
        """Return all checkpoints, finished or not, the newest last."""
        objects: dict[str, dict[str, int]] = defaultdict(dict)
        for key, size in self._sizes().items():
            name, _, file = key.partition("/")
            if re.fullmatch(f"{self.prefix}-{_UNIQUE}", name) and file:
                objects[name][file] = size
        found = [self._inspect(name, sizes) for name, sizes in sorted(objects.items())]
        return sorted(found, key=lambda one: -1 if one.manifest is None else one.manifest.sequence)

    def newest_first(self) -> list[RemoteCheckpoint]:
        """Return the checkpoints whose manifest and sizes agree, the newest first."""
        return [one for one in reversed(self.checkpoints()) if not one.problem]

    def _inspect(self, name: str, sizes: dict[str, int]) -> RemoteCheckpoint:
        if MANIFEST_NAME not in sizes:
            return RemoteCheckpoint(name, None, sizes, "its upload was not finished")
        try:
            content = self._read(f"{name}/{MANIFEST_NAME}")
        except FileNotFoundError:  # since it was listed
            return RemoteCheckpoint(name, None, sizes, "its run is deleting it")
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / name
            folder.mkdir()
            (folder / MANIFEST_NAME).write_bytes(content)
            manifest = read_manifest(folder)
        if isinstance(manifest, Damage):
            return RemoteCheckpoint(name, None, sizes, manifest.reason)
        wrong = (
            f"{file} has {sizes.get(file, 'no')} bytes instead of {entry.size}"
            for file, entry in manifest.files.items()
            if sizes.get(file) != entry.size
        )
        return RemoteCheckpoint(name, manifest, sizes, next(wrong, ""))

    def name_of(self, manifest: Manifest) -> str:
        """Return the remote name of a checkpoint."""
        return f"{self.prefix}-{manifest.step:08d}-{manifest.digest[:8]}"

    def upload(self, folder: Path) -> str:
        """Upload a published checkpoint, and return its name in the remote folder."""
        self.upload_files(folder)
        return self.publish(folder)

    def upload_files(self, folder: Path) -> None:
        """Upload the files of a checkpoint that are on this disk, without the manifest."""
        manifest = _require_manifest(folder)
        files = [file for file in (*manifest.files, PIN_NAME) if (folder / file).exists()]
        name = self.name_of(manifest)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="accmt-upload-file") as threads:
            list(threads.map(lambda file: self._put(folder / file, f"{name}/{file}"), files))

    def publish(self, folder: Path) -> str:
        """Upload the manifest of a checkpoint once all its files are uploaded, and return its remote name.

        Raises:
            OSError: A file is neither on this disk nor uploaded.
        """
        manifest = _require_manifest(folder)
        name = self.name_of(manifest)
        for file, entry in manifest.files.items():
            if not (folder / file).exists():
                self._retry(partial(self._require_size, f"{name}/{file}", entry.size))
        self._put(folder / MANIFEST_NAME, f"{name}/{MANIFEST_NAME}")
        return name

    def _put(self, file: Path, key: str) -> None:
        size = file.stat().st_size

        def put() -> None:
            self._fs.put_file(str(file), f"{self._root}/{key}")
            self._require_size(key, size)

        self._retry(put)

    def _require_size(self, key: str, size: int) -> None:
        self._fs.invalidate_cache()
        stored = self._fs.info(f"{self._root}/{key}")["size"]
        if stored != size:
            raise OSError(f"{key} has {stored} bytes instead of {size}")

    def fetch(self, one: RemoteCheckpoint, folder: Path, *, without: Collection[str] = ()) -> None:
        """Download the files of a checkpoint into a folder, except for some of them, and verify them.

        Raises:
            CheckpointError: A file does not have the digest that the manifest lists.
        """
        files = [file for file in one.sizes if file not in without]
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)

        def get(file: str) -> None:
            self._retry(lambda: self._fs.get_file(f"{self._root}/{one.name}/{file}", str(folder / file)))
            fsync_file(folder / file)

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="accmt-download") as threads:
            list(threads.map(get, files))
        found = read_manifest(folder)
        reason = found.reason if isinstance(found, Damage) else next(find_faults(folder, found.only(files)), None)
        if reason is not None:
            raise _fail_damaged(f"{self.shown}/{one.name}", reason)
        fsync_folder(folder)

    def upload_others(self) -> None:
        """Upload what does not belong to one checkpoint or model."""

    def delete(self, one: RemoteCheckpoint) -> None:
        """Delete a checkpoint; its manifest first, so that what a kill leaves is not complete."""
        names = sorted(one.sizes, key=lambda file: file != MANIFEST_NAME)
        self._delete([f"{one.name}/{file}" for file in names])

    def prune(self, keep: int) -> None:
        """Delete what the local folder would not keep either.

        That is all complete checkpoints but the newest `keep` and pinned ones, and those whose step was saved again,
        except if a user has pinned them. The newest one counts even if it is pinned.
        """
        steps: set[int] = set()
        num_kept = 0
        for one in self.newest_first():
            step = -1 if one.manifest is None else one.manifest.step
            is_newest, is_replaced = not steps, step in steps
            steps.add(step)
            if one.is_pinned and not is_newest:
                is_by_interval = is_replaced and self._read(f"{one.name}/{PIN_NAME}") == KEEP_EVERY.encode()
                if not is_by_interval:
                    continue
            if is_replaced or num_kept == keep:
                self.delete(one)
            else:
                num_kept += 1

    def clean(self) -> Sequence[str]:
        """Delete what unfinished uploads have left, and return their names.

        Only for the holder of the lease: an upload of somebody else looks the same until its manifest is there.
        """
        torn = [one for one in self.checkpoints() if MANIFEST_NAME not in one.sizes]
        for one in torn:
            self.delete(one)
        return [one.name for one in torn]


class Lease:
    """The right to write to a remote folder: an object that its holder writes again and again.

    Ages are differences between two times of the store, so clocks of machines do not matter. A store with conditional
    writes (S3) gives a free lease to one of two runs that ask at the same time; elsewhere, the one that wrote first
    finds at its next heartbeat that it has lost the lease, and uploads nothing more.
    """

    HEARTBEAT_S = 20.0
    EXPIRES_AFTER_S = 90.0

    def __init__(self, folder: RemoteFolder, run_name: str) -> None:
        self._folder = folder
        self._content = {
            "token": secrets.token_hex(8),
            "host": socket.gethostname(),
            "machine": _describe_machine(),
            "process": os.getpid(),
            "run": run_name,
        }
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_lost = False

    def take(self) -> None:
        """Take the lease; wait until that of a run that no longer exists has expired.

        Raises:
            CheckpointError: Another run holds it.
        """
        folder = self._folder
        holder = self._read()
        if holder is not None and not self._is_ours(holder):
            self._wait_for_expiry(holder)
        if holder is not None:
            folder._delete([_LEASE])
        try:
            folder._write(_LEASE, self._encoded, mode="create")
        except (NotImplementedError, TypeError):  # a store without conditional writes
            folder._write(_LEASE, self._encoded)
        except OSError:
            holder = self._read()
            if holder is None:  # another error
                raise
            if not self._holds(holder):  # else it was written, but the answer was lost
                self._refuse(holder)
        self._thread = threading.Thread(target=self._renew, name="accmt-lease", daemon=True)
        self._thread.start()

    def __enter__(self) -> Lease:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the lease back."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with suppress(Exception):
            if not self.is_lost and self._holds(self._read()):
                self._folder._delete([_LEASE])

    @property
    def _encoded(self) -> bytes:
        return json.dumps({**self._content, "beat": secrets.token_hex(4)}).encode()

    def _read(self) -> dict[str, Any] | None:
        try:
            content = json.loads(self._folder._read(_LEASE))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def _holds(self, holder: dict[str, Any] | None) -> bool:
        return holder is not None and holder.get("token") == self._content["token"]

    def _is_ours(self, holder: dict[str, Any]) -> bool:
        """Return whether this process, or a process of this machine that has ended, holds the lease."""
        import psutil

        if holder.get("machine") != self._content["machine"]:
            return False
        process = holder.get("process")
        if process == os.getpid() or not isinstance(process, int):
            return True
        try:  # in a container, the parent of a killed process may never collect it
            return bool(psutil.Process(process).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    def _wait_for_expiry(self, holder: dict[str, Any]) -> None:
        has_said = False
        while True:
            probe = f"probe-{secrets.token_hex(4)}"
            self._folder._write(probe, b"")
            try:
                age = self._folder._modified(probe) - self._folder._modified(_LEASE)
            except FileNotFoundError:
                return
            finally:
                self._folder._delete([probe])
            if age >= self.EXPIRES_AFTER_S:
                return
            if self._read() != holder:  # it was renewed
                self._refuse(holder)
            if not has_said:
                wait = self.EXPIRES_AFTER_S - age
                say(f"{self._folder.shown} was in use {age:.0f} s ago; waiting up to {wait:.0f} s for its run to end")
                has_said = True
            time.sleep(min(self.HEARTBEAT_S / 4, max(self.EXPIRES_AFTER_S - age, 0.1)))

    def _refuse(self, holder: dict[str, Any]) -> None:
        got = f"in use by run {holder.get('run', '?')} (process {holder.get('process', '?')} on {holder.get('host')})"
        folder = self._folder
        expected = f"a separate folder for each run: runs in one folder would replace each other's {folder.kind}s"
        do = f"stop that run, or pass another `{folder.argument}` URL"
        raise fail(CheckpointError, f"{folder.kind} folder {folder.shown}", got=got, expected=expected, do=do)

    def _renew(self) -> None:
        while not self._stopping.wait(self.HEARTBEAT_S):
            try:
                if not self._holds(self._read()):
                    self.is_lost = True
                    warn(f"another run has taken over {self._folder.shown}: nothing more is uploaded there")
                    return
                self._folder._write(_LEASE, self._encoded)
            except Exception as error:  # noqa: BLE001 - the store may be back at the next heartbeat
                warn_once(f"{self._folder.shown} cannot be reached: {error}", about="lease of a remote folder")


def _describe_machine() -> str:
    """Return what is the same for processes that see each other: machines and containers may share a host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return f"{socket.gethostname()} {secrets.token_hex(8)}"


class RemoteCheckpoints(Feature):
    """Uploads the checkpoints of a run whose `checkpoint` is a URL, and brings the newest one back for a resume."""

    name = "remote_checkpoints"

    def __init__(self, run: Run, url: str) -> None:
        self._run = run
        self._url = url
        self._group: UploadGroup | None = None
        self._uploads: Uploads | UploadsOfOtherDisk | None = None

    @classmethod
    def for_run(cls, run: EvaluationRun) -> RemoteCheckpoints | None:
        url = run.settings.checkpoints.url
        return cls(run, url) if url is not None and isinstance(run, Run) else None

    @classmethod
    def before_resume(cls, settings: Settings) -> Path | None:
        """Return the checkpoint to resume from: the local one, or a newer one that is downloaded to each disk."""
        options, resume = settings.checkpoints, settings.checkpoints.resume
        folder = settings.checkpoint_folder
        if isinstance(resume, str) and "://" in resume:
            found = _bring(resume, folder.with_name(f"{folder.name}.resumed"))
            if found is None:
                where = f"Trainer(resume={hide_text(resume)!r})"
                do = "check the URL: `accmt check URL` lists what is there"
                raise fail(NoCheckpointError, where, got="no complete checkpoint", expected="one", do=do)
            return found
        if options.url is None or options.checkpointer is not None or resume not in (True, None, "auto"):
            return None
        local = CheckpointStore(folder).newest()
        found = _bring(options.url, folder, newer_than=None if local is None else local.manifest)
        return found if found is not None or local is None else local.folder

    def on_start(self) -> None:
        """Take the lease, so that missing credentials or a second run are errors before training."""
        self._group = UploadGroup.open()
        run_on_main_process(self._start)
        run_on_each_disk(self._follow)

    def _start(self) -> None:
        run = self._run
        with explaining(self._url):
            remote = RemoteFolder(self._url)
            newest = next(iter(remote.newest_first()), None)
            run_name = run.tracking.run_name
            if newest is not None and newest.manifest is not None:
                theirs = newest.manifest.info.get("run_name")
                if not run.is_resumed or theirs != run_name:
                    got = f"checkpoints of run {theirs}, the newest of step {newest.manifest.step}"
                    do = 'resume="auto" continues that run; otherwise pass another `checkpoint` URL, or delete them'
                    where = f"checkpoint folder {remote.shown}"
                    raise fail(
                        CheckpointError, where, got=got, expected="a folder without checkpoints of another run", do=do
                    )
        folder, origin, group = run.checkpoints.folder, self._origin, self._group
        self._uploads = start_uploads(
            remote, folder, ORIGIN, origin, run_name=run_name, keep=origin["keep"], group=group
        )

    def _follow(self) -> None:
        """Upload what is on the disk of this process, if that is another one than the main process's."""
        if self._group is not None and not is_main_process():
            folder = self._run.checkpoints.folder
            with explaining(self._url):
                remote = RemoteFolder(self._url)
                remote.try_writing()
            _write_origin(folder / ORIGIN, remote, self._origin)
            self._uploads = UploadsOfOtherDisk(remote, folder, self._group)

    @property
    def _origin(self) -> dict[str, Any]:
        """What `accmt sync` needs to know besides the URL."""
        keep = self._run.settings.checkpoints.checkpoint_options.max_checkpoints or 1
        return {"run": self._run.tracking.run_name, "keep": keep, "is_part": self._group is not None}

    def on_checkpoint(self, folder: Path) -> None:
        """Upload a checkpoint that was published."""
        if self._uploads is None:
            return
        try:
            self._uploads.add(folder)
        except OSError as error:  # the checkpoint is durable; only its copy for the upload is not
            warn(f"checkpoint {folder} is not uploaded to {hide_text(self._url)} now: {error}")

    @contextmanager
    def during(self) -> Iterator[None]:
        """Wait at the end of the run until the last checkpoint is uploaded."""
        try:
            yield
        finally:
            if self._uploads is not None:
                self._uploads.close()
                self._uploads = None


def upload_rest(folder: Path, *, url: str | None = None) -> str | None:
    """Upload the newest checkpoint of a local folder, unless the remote folder has it.

    Args:
        folder: The local checkpoint folder.
        url: The remote folder; None is the one that the run used. Needed if that has a password, which is not stored.

    Returns:
        The name of the uploaded checkpoint; None if nothing was left to upload.

    Raises:
        CheckpointError: A run is still writing there, or some files are on the disks of other machines.
    """
    origin = loads((folder / ORIGIN).read_text(encoding="utf-8"))
    url = url or origin["url"]
    with explaining(url):
        remote = RemoteFolder(url)
        with Lease(remote, origin["run"]):
            found = inspect(folder)
            newest = _find_newest_part(found) if origin["is_part"] else find_resumable(found)
            if newest is None or any(one.manifest == newest.manifest for one in remote.newest_first()):
                return None
            try:
                name = remote.upload(newest.folder)
            except FileNotFoundError as error:
                got, expected = f"no file {error}", "all files of the checkpoint, some of which are on other machines"
                do = "run `accmt sync` on the other machines, too: the last one completes the checkpoint"
                raise fail(
                    CheckpointError, f"checkpoint folder {remote.shown}", got=got, expected=expected, do=do
                ) from error
            remote.prune(origin["keep"])
            return name


def _find_newest_part(found: Sequence[Inspection]) -> Inspection | None:
    """Return the newest checkpoint of which this disk has some files, all of them intact."""
    for one in reversed(found):
        names = () if one.manifest is None else one.manifest.files
        num_missing = sum(not (one.folder / name).exists() for name in names)
        if num_missing < len(names) and len(one.faults) == num_missing:
            return one
    return None


def clean(url: str) -> Sequence[str]:
    """Delete what unfinished uploads have left in a remote folder, and return their names.

    Raises:
        CheckpointError: A run is writing there.
    """
    with explaining(url):
        remote = RemoteFolder(url)
        with Lease(remote, "accmt check --clean"):
            return remote.clean()


@contextmanager
def explaining(url: str, kind: type[RemoteFolder] = RemoteFolder) -> Iterator[None]:
    """Turn the error of a store into one that says what to do."""
    try:
        yield
    except AccmtError:
        raise
    except Exception as error:
        where, expected = (
            f"{kind.kind} folder {hide_text(url)}",
            "a bucket or folder that this program may read and write",
        )
        do = f"check the URL, the credentials, the region and the endpoint, or pass a local folder as `{kind.argument}`"
        got = str(error).strip().partition("\n")[0] or type(error).__name__
        raise fail(CheckpointError, where, got=f"{type(error).__name__}: {got}", expected=expected, do=do) from error


def _bring(url: str, folder: Path, *, newer_than: Manifest | None = None) -> Path | None:
    """Download the newest checkpoint; damaged ones are skipped.

    Of several disks, each gets a part of the files of tensors, and all other files.

    Processes: collective; the main process chooses the checkpoint.

    Args:
        url: The remote folder, or one checkpoint in it.
        folder: The local folder.
        newer_than: The newest local checkpoint.

    Returns:
        The local folder of the checkpoint; None if there is none, or if the local one is not older.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    is_one = _NAME.fullmatch(name) is not None
    open_remote = partial(RemoteFolder, parent if is_one else url)
    with explaining(url):
        for one in run_on_main_process(lambda: open_remote().newest_first()):
            manifest = one.manifest
            if manifest is None or (is_one and one.name != name):
                continue
            if newer_than is not None and (manifest == newer_than or manifest.sequence < newer_than.sequence):
                return None
            try:
                return download(open_remote, one, folder)
            except CheckpointError as error:
                warn(f"a checkpoint is damaged, so the one before it is used: {error}")
    return None


def download(open_remote: Callable[[], RemoteFolder], one: RemoteCheckpoint, folder: Path) -> Path:
    """Return the local copy of a remote checkpoint; download it if there is none, or if it is incomplete.

    It is published when all disks have downloaded and verified their files.

    Processes: collective.

    Args:
        open_remote: Opens the remote folder.
        one: A checkpoint in it.
        folder: The local folder of checkpoints.

    Raises:
        CheckpointError: A file does not have the digest that the manifest lists.
    """
    manifest = one.manifest
    if manifest is None:
        raise _fail_damaged(one.name, one.problem)
    staged: list[Path] = []

    def stage() -> Path:
        # Each file of tensors is on the disk of one process: the one that wrote it, if there are as many processes.
        tensors = sorted(filter(holds_tensors, manifest.files))
        of_process = {file: number * num_processes() // len(tensors) for number, file in enumerate(tensors)}
        others = {file for file, process in of_process.items() if not shares_disk_with(process)}
        for path in list_published(folder):
            needed = [file for file in manifest.files if file not in others or (path / file).exists()]
            if read_manifest(path) == manifest and next(find_faults(path, manifest.only(needed)), None) is None:
                return path
        remote = open_remote()
        say(f"downloading {remote.shown}/{one.name} to {folder}")
        make_durable(folder)
        staged.append(folder / make_unfinished_name("tmp", manifest.step))
        remote.fetch(one, staged[0], without=others)
        return staged[0]

    try:
        found = run_on_each_disk(stage)
        return run_on_each_disk(lambda: publish(found, manifest.step) if found in staged else found)
    finally:
        for path in staged:
            shutil.rmtree(path, ignore_errors=True)


def _require_manifest(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    if isinstance(manifest, Damage):
        raise _fail_damaged(str(folder), manifest.reason)
    return manifest


def _fail_damaged(where: str, reason: str) -> CheckpointError:
    expected, do = "the files that its manifest lists", "resume from an older checkpoint, which `accmt check` finds"
    return fail(CheckpointError, where, got=reason, expected=expected, do=do)


def start_uploads(
    remote: RemoteFolder,
    folder: Path,
    origin: str,
    content: Mapping[str, Any],
    *,
    run_name: str,
    keep: int,
    group: UploadGroup | None = None,
) -> Uploads:
    """Take the lease of a remote folder, delete leftovers there, and start a thread that uploads to it.

    Args:
        remote: The remote folder.
        folder: The local folder.
        origin: A file in the local folder, which says where it is uploaded to.
        content: What it contains besides the URL.
        run_name: The run.
        keep: The number of checkpoints or models to keep in the remote folder.
        group: The upload threads of the machines, if they have separate disks.

    Raises:
        CheckpointError: Another run holds the lease, or the store cannot be used.
    """
    lease = Lease(remote, run_name)
    with explaining(remote.url, type(remote)):
        lease.take()
    try:
        try:
            remote.clean()
        except Exception as error:  # noqa: BLE001 - leftovers only take space
            warn(f"the leftovers of unfinished uploads in {remote.shown} could not be deleted: {error}")
        make_durable(folder)
        _write_origin(folder / origin, remote, content)
        return Uploads(remote, folder, keep=keep, lease=lease, group=group)
    except BaseException:
        lease.release()  # else nobody could use the folder until it has expired
        raise


def _write_origin(file: Path, remote: RemoteFolder, content: Mapping[str, Any]) -> None:
    write_text(file, dumps({"url": remote.shown, **content}, indent=2) + "\n")


class Uploads:
    """A thread that uploads checkpoints or models, and keeps the files that it still needs.

    Args:
        remote: Where to.
        local: The local folder, where copies are kept that wait; weights as hard links.
        keep: The number of checkpoints to keep in the remote folder.
        lease: The lease on the remote folder.
        group: The upload threads of the machines, if they have separate disks.
    """

    WAIT_AT_END_S = 600.0

    def __init__(
        self, remote: RemoteFolder, local: Path, *, keep: int, lease: Lease, group: UploadGroup | None = None
    ) -> None:
        self._remote = remote
        self._local = local
        self._keep = keep
        self._lease = lease
        self._group = group
        self._waiting: list[Path] = []
        self._are_others_waiting = False
        self._is_busy = False
        self._is_ending = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="accmt-upload", daemon=True)
        _remove_leftovers(local)
        self._thread.start()

    def add(self, folder: Path) -> None:
        """Upload a checkpoint, which may be deleted afterwards.

        One that still waits is skipped, so that uploads do not fall further and further behind.
        """
        waiting = _copy_aside(folder, self._local)
        with self._changed:
            skipped = [path for path in self._waiting if not (path / PIN_NAME).exists()]
            self._waiting = [path for path in self._waiting if path not in skipped] + [waiting]
            self._changed.notify_all()
        for path in skipped:
            shutil.rmtree(path, ignore_errors=True)
            if advice := self._remote.advice_if_skipped:
                what = f"uploads to {self._remote.shown} are slower than checkpoints"
                warn_once(f"{what}: some are skipped, the newest is not; {advice}", about="skipped uploads")

    def add_others(self) -> None:
        """Upload what does not belong to one checkpoint or model, such as the history."""
        with self._changed:
            self._are_others_waiting = True
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for the uploads, at most `WAIT_AT_END_S`, and give the lease back."""
        remote = self._remote
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
            if self._is_busy or self._waiting:
                say(f"waiting for the upload of the last {remote.kind} to {remote.shown}")
        self._thread.join(self.WAIT_AT_END_S)
        if self._thread.is_alive():
            warn(f"the last {remote.kind} is not in {remote.shown} yet: `accmt sync {self._local}` uploads it")
        else:
            self._lease.release()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._are_others_waiting or self._is_ending)
                if not self._waiting and not self._are_others_waiting:
                    break
                folder = self._waiting.pop(0) if self._waiting else None
                self._are_others_waiting, self._is_busy = False, True
            try:
                if not self._lease.is_lost and folder is None:
                    self._remote.upload_others()
                elif not self._lease.is_lost and folder is not None:
                    self._upload(folder)
                    self._remote.prune(self._keep)
            except Exception as error:  # noqa: BLE001 - training goes on, and the next checkpoint is tried again
                kind, shown = self._remote.kind, self._remote.shown
                warn(
                    f"a {kind} could not be uploaded to {shown}: {type(error).__name__}: {error}\n"
                    f"It is kept in {self._local}. The next upload, or `accmt sync {self._local}`, tries again."
                )
            finally:
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                with self._changed:
                    self._is_busy = False
        if self._group is not None:
            self._group.end()

    def _upload(self, folder: Path) -> None:
        if self._group is not None:
            name = self._remote.name_of(_require_manifest(folder))
            try:
                self._group.choose(name)
                failures = self._group.upload(partial(self._remote.upload_files, folder))
            except RuntimeError as error:  # of the connection
                warn(f"the other machines cannot be reached, so this one uploads only what it has whole: {error}")
                self._group = None
            else:
                if failures:
                    raise OSError("; ".join(failures))
                self._remote.publish(folder)
                return
        self._remote.upload(folder)


class UploadsOfOtherDisk:
    """A thread that uploads the files on another disk than the main process's, of the checkpoints that this chooses.

    Args:
        remote: Where to.
        local: The local folder, where copies are kept that wait.
        group: The upload threads of the machines.
    """

    WAIT_FOR_OWN_S = 60.0

    def __init__(self, remote: RemoteFolder, local: Path, group: UploadGroup) -> None:
        self._remote = remote
        self._local = local
        self._group = group
        self._waiting: dict[str, Path] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="accmt-upload", daemon=True)
        _remove_leftovers(local)
        self._thread.start()

    def add(self, folder: Path) -> None:
        """Keep a copy of a checkpoint until the main process has chosen it, or a newer one."""
        if self._thread.is_alive():
            waiting = _copy_aside(folder, self._local)
            with self._changed:
                self._waiting[self._remote.name_of(_require_manifest(waiting))] = waiting
                self._changed.notify_all()

    def close(self) -> None:
        """Wait until the main process has ended the uploads."""
        self._thread.join(Uploads.WAIT_AT_END_S)

    def _work(self) -> None:
        try:
            while (name := self._group.receive()) is not None:
                self._group.upload(partial(self._upload, name))
        except RuntimeError as error:  # of the connection
            warn(f"the main process cannot be reached, so nothing more is uploaded from here: {error}")
        finally:
            self._group.close()
            _remove_leftovers(self._local)

    def _upload(self, name: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._waiting, self.WAIT_FOR_OWN_S):
                raise OSError(f"no files of {name} to upload in {self._local}")
            names = list(self._waiting)
            done = [self._waiting.pop(one) for one in names[: names.index(name) + 1]]
        try:
            self._remote.upload_files(done[-1])
        finally:
            for folder in done:
                shutil.rmtree(folder, ignore_errors=True)


class UploadGroup:
    """The upload threads of machines with separate disks; that of the main process chooses what they upload together.

    Processes: collective, once per run: `open`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @classmethod
    def open(cls) -> UploadGroup | None:
        """Return the group, or None if all machines share a disk."""
        group = new_disk_group()
        return None if group is None else cls(group)

    def choose(self, name: str | None) -> None:
        """Send the name of the next checkpoint from the main process to the others."""
        dist.broadcast_object_list([name], src=0, group=self._group)

    def receive(self) -> str | None:
        """Wait for the name of the next checkpoint; None at the end."""
        received: list[str | None] = [None]
        dist.broadcast_object_list(received, src=0, group=self._group)
        return received[0]

    def upload(self, upload: Callable[[], None]) -> list[str]:
        """Upload what is on this disk, wait for the others, and return what has failed.

        Raises:
            RuntimeError: Another machine cannot be reached.
        """
        failure = ""
        try:
            upload()
        except Exception as error:  # noqa: BLE001 - reported by the main process
            failure = f"on process {process_index()}: {type(error).__name__}: {error}"
        failures = [""] * dist.get_world_size(self._group)
        dist.all_gather_object(failures, failure, group=self._group)
        return [one for one in failures if one]

    def end(self) -> None:
        """Let the other threads end."""
        with suppress(RuntimeError):  # of the connection
            self.choose(None)
        self.close()

    def close(self) -> None:
        close_cpu_group(self._group)


def _remove_leftovers(local: Path) -> None:
    """Delete the copies that still waited for their upload when a run was killed."""
    for leftover in local.glob(".upload-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _copy_aside(folder: Path, local: Path) -> Path:
    copy = local / f".upload-{folder.name}-{secrets.token_hex(4)}"
    shutil.copytree(folder, copy, copy_function=_link_or_copy, ignore=shutil.ignore_patterns(".*"))
    return copy


def _link_or_copy(source: str, target: str) -> None:
    """Link weights, which are never changed in place, and copy the small files beside them."""
    if source.endswith((".safetensors", ".bin")):
        with suppress(OSError):  # a file system without hard links
            os.link(source, target)
            return
    shutil.copy2(source, target)
