"""`manifest.json`: what a checkpoint holds, with size and digest of every file; written last, so it is the proof.

A checkpoint is complete when its manifest is there, has its own digest, is of a known version, and every file that it
names is there with its size and digest. The digest of the manifest covers its other entries as one line of strict JSON.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import xxhash

from accmt.errors import CheckpointCorruptError, CheckpointError, NoCheckpointError, explain
from accmt.files import dumps, loads, write_text
from accmt.processes import num_processes
from accmt.version import __version__

# ---- The names of what lies in a checkpoint folder, and whether somebody still works on what is unfinished.


STEP = re.compile(r"step-(\d{8,})")
"""A published checkpoint. The name is no proof that it is complete: its manifest is."""

SET_ASIDE = re.compile(r"(?:damaged|replaced)-step-(\d{8,})(?:-\d+)?")
"""A checkpoint that is out of use: found damaged, or replaced although it must not be deleted."""

SILENT_FOR_S = 3600.0
"""Seconds without a change after which the unfinished folder of another machine counts as abandoned."""

Kind = Literal["tmp", "old"]
"""What an unfinished folder is: one being written or deleted ("tmp"), or one being replaced ("old")."""

_UNFINISHED = re.compile(r"\.(?P<kind>tmp|old)-step-(?P<step>\d{8,})-(?P<host>.+)-(?P<pid>\d+)-(?P<started>\d+)-\w{8}")
_CLOCK_SLACK_S = 2.0  # the system derives the start of a process from its clock, which may have been set since


@dataclass(frozen=True)
class Unfinished:
    """What the name of an unfinished folder says.

    Attributes:
        started: When that process began, in whole seconds since 1970: numbers of processes are used again.
    """

    kind: Kind
    step: int
    host: str
    pid: int
    started: int


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def make_unfinished_name(kind: Kind, step: int) -> str:
    """Return a name that nobody else uses, and that says which process works on it."""
    started = int(psutil.Process().create_time())
    return f".{kind}-{step_name(step)}-{_this_host()}-{os.getpid()}-{started}-{secrets.token_hex(4)}"


def parse_unfinished_name(name: str) -> Unfinished | None:
    """Read what `make_unfinished_name` wrote; None for every other name."""
    match = _UNFINISHED.fullmatch(name)
    if match is None:
        return None
    kind: Kind = "old" if match["kind"] == "old" else "tmp"
    return Unfinished(kind, int(match["step"]), match["host"], int(match["pid"]), int(match["started"]))


def is_abandoned(folder: Path, unfinished: Unfinished) -> bool:
    """Return whether no other process works on an unfinished folder; this process has to know its own.

    Nobody can know about processes of another machine. What one moved aside has to come back in any case; what it was
    writing is left alone until it has been silent for long.
    """
    if unfinished.host != _this_host():
        if unfinished.kind == "old":
            return True
        changes = (path.stat().st_mtime for path in (folder, *folder.rglob("*")))
        return time.time() - max(changes) > SILENT_FOR_S
    return unfinished.pid == os.getpid() or not _is_alive(unfinished.pid, unfinished.started)


def _this_host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())


def _is_alive(pid: int, started: int) -> bool:
    try:
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - started) <= _CLOCK_SLACK_S
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # it is there, and not ours to look at
        return True


MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 2
_OWN_DIGEST = "manifest_xxh3_64"
_NO_FILE = {errno.ENOTDIR, errno.EISDIR, errno.ELOOP}


@dataclass(frozen=True)
class FileEntry:
    size: int
    xxh3_64: str

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_64)
            return cls(file.tell(), digest.hexdigest())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds and where it comes from.

    Attributes:
        sequence: How many checkpoints the folder had seen, this one included. The newest is the one with the largest:
            a run that resumes from an old checkpoint does the same steps again.
    """

    step: int
    sequence: int
    files: Mapping[str, FileEntry]
    info: Mapping[str, Any]
    versions: Mapping[str, str]
    processes: int
    threads: int
    time: str

    @classmethod
    def of_this_run(
        cls, *, step: int, sequence: int, files: Mapping[str, FileEntry], info: Mapping[str, Any]
    ) -> Manifest:
        return cls(
            step=step,
            sequence=sequence,
            files=dict(sorted(files.items())),
            info=dict(info),
            versions={"accmt": __version__, "torch": torch.__version__, "python": platform.python_version()},
            processes=num_processes(),
            threads=torch.get_num_threads(),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    @classmethod
    def of_content(cls, content: Mapping[str, Any]) -> Manifest:
        """Build it from the JSON of a file."""
        files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
        return cls(**{**{key: value for key, value in content.items() if key != "version"}, "files": files})


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: every file was found to be what was written."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def info(self) -> Mapping[str, Any]:
        return self.manifest.info


@dataclass(frozen=True)
class Damage:
    reason: str


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`, durably: from here on the folder is complete."""
    # Through JSON and back: the digest is that of what will be read, where keys are strings and tuples are lists.
    content = loads(dumps({"version": MANIFEST_VERSION, **asdict(manifest)}))
    write_text(folder / MANIFEST_NAME, dumps({**content, _OWN_DIGEST: _digest(content)}, indent=2) + "\n")


def read_manifest(folder: Path) -> Manifest | Damage:
    """Read `manifest.json`, without a look at the other files.

    Raises:
        CheckpointError: It is of a version that this accmt does not know, or cannot be read now.
    """
    try:
        content = loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except OSError as error:
        return Damage(_name_fault(folder / MANIFEST_NAME, MANIFEST_NAME, error))
    except ValueError:
        return Damage(f"{MANIFEST_NAME} is not JSON")
    if not isinstance(content, dict) or content.pop(_OWN_DIGEST, None) != _digest(content):
        return Damage(f"{MANIFEST_NAME} has changed since it was written")
    if content.get("version") != MANIFEST_VERSION:
        versions = content.get("versions")
        writer = versions.get("accmt", "?") if isinstance(versions, dict) else "?"
        got = f"format {content.get('version')}, written by accmt {writer}"
        expected = f"format {MANIFEST_VERSION}, which accmt {__version__} reads"
        do = f"install accmt {writer} or newer, or resume from another checkpoint"
        raise CheckpointError(explain(f"checkpoint {folder}", got, expected, do))
    try:
        manifest = Manifest.of_content(content)
        numbers = [manifest.step, manifest.sequence, manifest.processes, manifest.threads]
        numbers += [entry.size for entry in manifest.files.values()]
        if not all(type(number) is int for number in numbers):
            raise TypeError("a number is of another type")
        if not (isinstance(manifest.info, dict) and isinstance(manifest.versions, dict)):
            raise TypeError("info and versions are no objects")
        return manifest
    except (KeyError, TypeError, AttributeError) as error:
        return Damage(f"{MANIFEST_NAME} does not have the entries of format {MANIFEST_VERSION}: {error}")


def examine(folder: Path) -> Checkpoint | Damage:
    """Read a checkpoint's manifest and compare every file with it."""
    manifest = read_manifest(folder)
    if isinstance(manifest, Damage):
        return manifest
    reason = next(find_faults(folder, manifest), None)
    return Checkpoint(folder, manifest) if reason is None else Damage(reason)


def find_faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield each file that is not what the manifest says, and what is wrong with it."""
    for name, entry in manifest.files.items():
        fault = _find_fault(folder / name, name, entry)
        if fault is not None:
            yield fault


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in `folder` once every file was found to be what was written.

    Raises:
        NoCheckpointError: There is no checkpoint.
        CheckpointCorruptError: A file is missing, or has changed since it was written.
        CheckpointError: It is of a version that this accmt does not know, or cannot be read now.
    """
    if not (folder / MANIFEST_NAME).exists() and not (folder.is_dir() and STEP.fullmatch(folder.name)):
        raise NoCheckpointError(_explain_absence(folder))
    found = examine(folder)
    if isinstance(found, Damage):
        expected = f"every file as {MANIFEST_NAME} says"
        do = 'resume from another checkpoint; `resume="auto"` takes the newest complete one'
        raise CheckpointCorruptError(explain(f"checkpoint {folder}", found.reason, expected, do))
    return found


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(dumps(content).encode())


def _find_fault(path: Path, name: str, expected: FileEntry) -> str | None:
    try:
        size = path.stat().st_size
        found = FileEntry.of(path) if size == expected.size else None
    except OSError as error:
        return _name_fault(path, name, error)
    if found is None:
        return f"{name} has {size} bytes instead of {expected.size}"
    return None if found == expected else f"{name} does not hold what was written (its digest differs)"


def _name_fault(path: Path, name: str, error: OSError) -> str:
    """Say what is wrong with a file that is not there, or is none.

    Raises:
        CheckpointError: It may be as it was written, and cannot be read now: too many open files, a server away.
    """
    if isinstance(error, FileNotFoundError):
        return f"{name} is missing"
    if error.errno in _NO_FILE:
        return f"{name} cannot be read: {error.strerror}"
    do = "try again, or move this checkpoint away to use the one before it"
    got = f"it cannot be read: {error.strerror}"
    raise CheckpointError(explain(str(path), got, "a file that can be read", do)) from error


def _explain_absence(folder: Path) -> str:
    inside = sorted(path.name for path in folder.glob("step-*") if (path / MANIFEST_NAME).exists())
    if inside:
        got, do = f"a folder of {len(inside)} checkpoint(s)", f"name one of them, such as {folder / inside[-1]}"
    else:
        got = f"a folder without {MANIFEST_NAME}" if folder.is_dir() else "no such folder"
        do = 'check the path, or start a new run with `resume=False` or `resume="auto"`'
    return explain(f"checkpoint {folder}", got, f"the folder of a checkpoint, with its {MANIFEST_NAME}", do)
