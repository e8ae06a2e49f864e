"""Copies a checkpoint to another run, which continues from it with its own name, folders and trackers."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accmt.checkpoint.contents import STATE_FILE
from accmt.checkpoint.manifest import (
    Damage,
    FileEntry,
    find_faults,
    make_unfinished_name,
    read_manifest,
    write_manifest,
)
from accmt.checkpoint.retention import list_by_age, make_durable, publish
from accmt.errors import CheckpointCorruptError, fail
from accmt.files import fsync_file, fsync_folder, write_text

_OF_THE_RUN_FOLDER = ("flight_recorder", "goodput")
"""Features whose state says where they are in a file of the run folder."""

_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}
"""Another disk, a file system without hard links, files of another user."""


def fork_checkpoint(source: Path, folder: Path, *, run_name: str) -> Path:
    """Copy a checkpoint to the checkpoint folder of another run, as the newest one in it.

    The other run resumes from it (`resume="auto"`) as from one of its own. Weights, optimizer, scheduler, position in
    the data, random numbers and hyper-parameters are those of the checkpoint; rows, records and the model folder are
    the run's own. Files of tensors are hard links where the disk allows, so that the source may be deleted meanwhile.

    Processes: main only.

    Args:
        source: The checkpoint; it is not changed.
        folder: The checkpoint folder of the other run, in which no process is training.
        run_name: The name of that run.

    Returns:
        The copy, with every file verified.

    Raises:
        FileNotFoundError: The source was deleted meanwhile.
        CheckpointCorruptError: It is damaged.
    """
    manifest = read_manifest(source)
    if isinstance(manifest, Damage):
        if not source.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
        raise _damaged(source, manifest.reason)
    make_durable(folder)
    staged = folder / make_unfinished_name("tmp", manifest.step)
    staged.mkdir()
    try:
        for name in manifest.files:
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            _link(source / name, staged / name)
        fault = next(find_faults(staged, manifest), None)
        if fault is not None:
            raise _damaged(source, fault)
        state = staged / STATE_FILE
        # By `json`, not by our `loads`: everything else stays as it is, digit by digit.
        content: dict[str, Any] = json.loads(state.read_text(encoding="utf-8"))
        others = content["others"]
        others["run_name"], others["run_id"] = run_name, secrets.token_hex(8)
        others["parts"].pop("tracking", None)  # a new run in all trackers
        for name in _OF_THE_RUN_FOLDER:
            others["parts"].get("features", {}).pop(name, None)
        write_text(state, json.dumps(content, allow_nan=False))  # a new file, not the linked one
        for place in {path.parent for path in map(staged.joinpath, manifest.files)}:
            fsync_folder(place)
        origin = {
            "run_name": manifest.info.get("run_name"),
            "step": manifest.step,
            "checkpoint": str(source.absolute()),
        }
        # `launch` would make the copy look like one that this run wrote before its launcher restarted it.
        info = {**manifest.info, "run_name": run_name, "launch": None, "forked_from": origin}
        own = replace(
            manifest,
            sequence=1 + max((sequence for _, sequence in list_by_age(folder)), default=0),
            files={**manifest.files, STATE_FILE: FileEntry.of(state)},
            info=info,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        write_manifest(staged, own)
        return publish(staged, manifest.step)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        shutil.copyfile(source, target)
        fsync_file(target)


def _damaged(source: Path, reason: str) -> CheckpointCorruptError:
    do = "fork from another checkpoint; `accmt check` lists those that are complete"
    return fail(
        CheckpointCorruptError,
        f"checkpoint {source}",
        got=reason,
        expected="every file as recorded in its manifest",
        do=do,
    )
