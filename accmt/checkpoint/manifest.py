"""`manifest.json`: the contents of a checkpoint with size and digest of every file, written last as proof.

A checkpoint is complete if its manifest exists, matches its own digest and a known version, and every file that it
lists has the recorded size and digest. The manifest's digest covers its other entries as one line of strict JSON.
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
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import xxhash

from accmt.errors import CheckpointCorruptError, CheckpointError, NoCheckpointError, fail
from accmt.files import dumps, loads, write_text
from accmt.processes import is_running, num_processes
from accmt.version import __version__

# ---- File names in a checkpoint folder, and whether a process still works on an unfinished folder.


STEP = re.compile(r"step-(\d{8,})")
"""A published checkpoint. Only its manifest proves that it is complete."""

SET_ASIDE = re.compile(r"(?:damaged|replaced)-step-(\d{8,})(?:-\d+)?")
"""A checkpoint that is no longer used: damaged, or replaced but protected from deletion."""

SILENT_FOR_S = 3600.0
"""Seconds without a change after which another machine's unfinished folder counts as abandoned."""

Kind = Literal["tmp", "old"]
"""The kind of an unfinished folder: being written or deleted ("tmp"), or being replaced ("old")."""

_UNFINISHED = re.compile(r"\.(?P<kind>tmp|old)-step-(?P<step>\d{8,})-(?P<host>.+)-(?P<pid>\d+)-(?P<started>\d+)-\w{8}")
_CLOCK_SLACK_S = 2.0  # process start times depend on the system clock, which may have been adjusted


@dataclass(frozen=True)
class Unfinished:
    """The parsed name of an unfinished folder.

    Attributes:
        started: When that process started, in whole seconds since 1970, because process ids are reused.
    """

    kind: Kind
    step: int
    host: str
    pid: int
    started: int


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def make_unfinished_name(kind: Kind, step: int) -> str:
    """Return a unique name that identifies the process working on the folder."""
    started = int(psutil.Process().create_time())
    return f".{kind}-{step_name(step)}-{_this_host()}-{os.getpid()}-{started}-{secrets.token_hex(4)}"


def parse_unfinished_name(name: str) -> Unfinished | None:
    """Parse a name made by `make_unfinished_name`; None for any other name."""
    match = _UNFINISHED.fullmatch(name)
    if match is None:
        return None
    kind: Kind = "old" if match["kind"] == "old" else "tmp"
    return Unfinished(kind, int(match["step"]), match["host"], int(match["pid"]), int(match["started"]))


def is_abandoned(folder: Path, unfinished: Unfinished) -> bool:
    """Return whether no other process works on an unfinished folder; this process has to track its own.

    Processes of another machine cannot be checked. A folder that one moved aside is always moved back; a folder that
    one was writing counts as abandoned only after a long time without changes.
    """
    if unfinished.host != _this_host():
        if unfinished.kind == "old":  # it may be the only complete checkpoint of its step
            return True
        changes = (path.stat().st_mtime for path in (folder, *folder.rglob("*")))
        return time.time() - max(changes) > SILENT_FOR_S
    # A name with the id of this process is from an earlier attempt to save, unless the store tracks it.
    is_alive = is_running(unfinished.pid, unfinished.started, slack_s=_CLOCK_SLACK_S)
    return unfinished.pid == os.getpid() or not is_alive


def _this_host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())


MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 2
_OWN_DIGEST = "manifest_xxh3_64"
_NO_FILE = {errno.ENOTDIR, errno.EISDIR, errno.ELOOP}


def holds_tensors(name: str) -> bool:
    """Return whether a file holds tensors; if there are several disks, not each of them needs it."""
    return name.endswith(".safetensors")


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
    """The contents and origin of a checkpoint.

    Attributes:
        sequence: How many checkpoints the folder had seen, including this one. The newest has the largest number: a
            run that resumes from an old checkpoint repeats the same steps.
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

    def only(self, names: Collection[str]) -> Manifest:
        """Return the manifest of some of the files."""
        return replace(self, files={name: entry for name, entry in self.files.items() if name in names})

    @property
    def content(self) -> dict[str, Any]:
        """The entries of `manifest.json` without its own digest."""
        # Through JSON and back: the digest must match what is read later, with string keys and tuples as lists.
        content: dict[str, Any] = loads(dumps({"version": MANIFEST_VERSION, **asdict(self)}))
        return content

    @property
    def digest(self) -> str:
        return _digest(self.content)

    @classmethod
    def of_content(cls, content: Mapping[str, Any]) -> Manifest:
        """Create it from a parsed JSON file."""
        entries = dict(content)
        del entries["version"]
        entries["files"] = {name: FileEntry(**entry) for name, entry in content["files"].items()}
        return cls(**entries)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: every file has been verified."""

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
    """Write `manifest.json` durably; the folder is complete afterwards."""
    write_text(folder / MANIFEST_NAME, dumps({**manifest.content, _OWN_DIGEST: manifest.digest}, indent=2) + "\n")


def read_manifest(folder: Path) -> Manifest | Damage:
    """Read `manifest.json` without checking the other files.

    Raises:
        CheckpointError: It has a version unknown to this accmt, or cannot be read now.
    """
    try:
        content = loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except OSError as error:
        return Damage(_name_fault(folder / MANIFEST_NAME, MANIFEST_NAME, error))
    except ValueError:
        return Damage(f"{MANIFEST_NAME} is not JSON")
    if not isinstance(content, dict) or content.pop(_OWN_DIGEST, None) != _digest(content):
        return Damage(f"{MANIFEST_NAME} has changed since it was written")
    # Not damage: taking the previous checkpoint would silently repeat what a newer accmt has trained.
    if content.get("version") != MANIFEST_VERSION:
        versions = content.get("versions")
        writer = "?"
        if isinstance(versions, dict):
            writer = versions.get("accmt", "?")
        got = f"format {content.get('version')}, written by accmt {writer}"
        expected = f"format {MANIFEST_VERSION}, which accmt {__version__} reads"
        do = f"install accmt {writer} or newer, or resume from another checkpoint"
        raise fail(CheckpointError, f"checkpoint {folder}", got=got, expected=expected, do=do)
    try:
        return Manifest.of_content(content)
    except (KeyError, TypeError, AttributeError) as error:
        return Damage(f"{MANIFEST_NAME} does not have the entries of format {MANIFEST_VERSION}: {error}")


def examine(folder: Path) -> Checkpoint | Damage:
    """Read a checkpoint's manifest and compare every file with it."""
    manifest = read_manifest(folder)
    if isinstance(manifest, Damage):
        return manifest
    reason = next(find_faults(folder, manifest), None)
    if reason is not None:
        return Damage(reason)
    return Checkpoint(folder, manifest)


def find_faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield a description of each file that does not match the manifest."""
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            entry = None
            # A file that was cut short is not read: a checkpoint of a large model takes minutes to read.
            if size == expected.size:
                entry = FileEntry.of(path)
        except OSError as error:
            yield _name_fault(path, name, error)
            continue
        if entry is None:
            yield f"{name} has {size} bytes instead of {expected.size}"
        elif entry != expected:
            yield f"{name} has changed since it was written (its digest differs)"


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in `folder` after verifying every file.

    Raises:
        NoCheckpointError: There is no checkpoint.
        CheckpointCorruptError: A file is missing or has changed since it was written.
        CheckpointError: It has a version unknown to this accmt, or cannot be read now.
    """
    # A folder with the name of a checkpoint but without a manifest is a damaged checkpoint, not a wrong path.
    if not (folder / MANIFEST_NAME).exists() and not (folder.is_dir() and STEP.fullmatch(folder.name)):
        inside = sorted(path.name for path in folder.glob("step-*") if (path / MANIFEST_NAME).exists())
        got = "no such folder"
        do = 'check the path, or start a new run with `resume=False` or `resume="auto"`'
        if inside:  # the folder of the run was passed
            got, do = f"a folder of {len(inside)} checkpoint(s)", f"name one of them, such as {folder / inside[-1]}"
        elif folder.is_dir():
            got = f"a folder without {MANIFEST_NAME}"
        expected = f"the folder of a checkpoint, with its {MANIFEST_NAME}"
        raise fail(NoCheckpointError, f"checkpoint {folder}", got=got, expected=expected, do=do)
    checkpoint = examine(folder)
    if isinstance(checkpoint, Damage):
        expected = f"every file as recorded in {MANIFEST_NAME}"
        do = 'resume from another checkpoint; `resume="auto"` takes the newest complete one'
        raise fail(CheckpointCorruptError, f"checkpoint {folder}", got=checkpoint.reason, expected=expected, do=do)
    return checkpoint


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(dumps(content).encode())


def _name_fault(path: Path, name: str, error: OSError) -> str:
    """Describe the problem with a file that is missing or not a regular file.

    Raises:
        CheckpointError: The file may be intact but cannot be read now: too many open files, an unreachable server.
    """
    if isinstance(error, FileNotFoundError):
        return f"{name} is missing"
    if error.errno in _NO_FILE:
        return f"{name} cannot be read: {error.strerror}"
    do = "try again, or move this checkpoint away to use the one before it"
    got = f"it cannot be read: {error.strerror}"
    raise fail(CheckpointError, str(path), got=got, expected="a readable file", do=do) from error
