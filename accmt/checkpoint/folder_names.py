"""The names of what lies in a checkpoint folder, and whether somebody still works on what is unfinished."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

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
