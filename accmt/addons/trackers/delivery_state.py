"""Decides which rows a tracker still needs after a run was killed, resumed, or continued without the tracker."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Hashable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from accmt.files import dumps, loads, write_text
from accmt.tracking.history import DELIVERY_FILE, Superseded, read_rows

# ---- `delivery.json`: the delivery state of each tracker, so that a later process can continue


@dataclass
class Account:
    """One tracker's delivery state for `history.jsonl`. Lines are counted from 0.

    Args:
        server: The URL of the tracker's store; None for one in the logging folder.
        run_id: The tracker's id of the run.
        first: The first line of the run.
        delivered: All lines before this one are delivered.
        handed: Lines before this one may be delivered: those after `delivered` were in progress when this was written.
        settled: All lines before this one survive a kill; later ones may only be in the tracker's memory.
        num_rejected: The number of rows that the tracker rejected because of their content.
        names: The tracker's name of each metric.
    """

    server: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    run_id: str | None = None
    first: int = 0
    delivered: int = 0
    handed: int = 0
    settled: int = 0
    num_rejected: int = 0
    names: dict[str, str] = field(default_factory=dict)
    status: str | None = None

    def restart(self) -> None:
        """Reset the state, because the tracker has started a new run."""
        self.delivered = self.handed = self.settled = self.first
        self.status = None

    def reopen(self) -> None:
        """Treat rows that the tracker may have lost in a kill as not yet delivered."""
        if self.status is None:
            self.delivered = min(self.delivered, self.settled)


class DeliveryFile:
    """The accounts of all trackers of a run, written as one file."""

    def __init__(self, folder: Path, track_name: str, run_name: str) -> None:
        self._path = folder / DELIVERY_FILE
        self._lock = threading.Lock()
        self.track_name = track_name
        self.run_name = run_name
        self.attempt = 1
        self.accounts: dict[str, Account] = {}

    @classmethod
    def read(cls, folder: Path) -> DeliveryFile | None:
        """Return the delivery file of an earlier process; None if the file is missing or damaged."""
        try:
            content = loads((folder / DELIVERY_FILE).read_text(encoding="utf-8"))
            delivery_file = cls(folder, content["track_name"], content["run_name"])
            delivery_file.attempt = content["attempt"]
            delivery_file.accounts = {name: Account(**account) for name, account in content["trackers"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return delivery_file

    def save(self) -> None:
        """Replace the file. If the disk is full, the old file is kept, and rows may be delivered twice after a kill."""
        with self._lock, suppress(OSError):
            # Copy them, because the threads of other trackers keep changing theirs.
            accounts = {}
            for key, account in self.accounts.items():
                accounts[key] = {**vars(account), "names": dict(account.names)}
            content = {"track_name": self.track_name, "run_name": self.run_name, "attempt": self.attempt}
            write_text(self._path, dumps({**content, "trackers": accounts}, indent=2) + "\n")


class Rewinding(Enum):
    """How a tracker handles points that a resumed run supersedes."""

    WITHDRAWS = "it can delete all points from a step on"
    KEEPS = "it keeps them, and would show a second point at the same step"
    UNKNOWN = "unknown: it also gets the new points"


@dataclass(frozen=True)
class Row:
    """One row of numbers for a tracker.

    Args:
        step: The step at which it was logged.
        values: Numbers by the tracker's names.
    """

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Resume:
    """The information that a tracker needs to resume a run.

    Args:
        run_id: The tracker's id of the run; None for a new run.
        attempt: 1 for the first process of the run, 2 for the one that resumed it, and so on.
        first_step: Points from this step on are deleted; None deletes none.
    """

    run_id: str | None = None
    attempt: int = 1
    first_step: int | None = None

    @property
    def tags(self) -> dict[str, str]:
        """Tags of a resumed run in trackers that keep the points of earlier attempts."""
        if self.attempt == 1:
            return {}
        return {"accmt.attempt": str(self.attempt)}


class Replay:
    """Decides for each line of the history whether a tracker gets it.

    Attributes:
        start: The first line to read.
    """

    def __init__(self, history: Path, account: Account, rewinding: Rewinding) -> None:
        self._account = account = replace(account)  # a copy, because delivery continues meanwhile
        self._rewinding = rewinding
        self._superseded = Superseded(read_rows(history))
        self._names_in_tracker: dict[int, set[Hashable]] = defaultdict(set)  # of a killed attempt, by step
        self.start = account.delivered
        self.first_step: int | None = None
        if rewinding is Rewinding.UNKNOWN or account.handed <= account.first:  # nothing to compare
            return
        steps: list[int] = []
        for line, row in enumerate(read_rows(history)):
            if "step" not in row or line < account.first:
                continue
            if rewinding is Rewinding.KEEPS:
                if self._superseded.has(line) and line < account.handed:
                    self._names_in_tracker[row["step"]] |= _names_of(row)
            elif line >= account.delivered or self._superseded.has(line, since=account.delivered):
                steps.append(row["step"])
        if steps:  # the tracker deletes all points from the first of them on, so it gets the rest again
            self.first_step = min(steps)
            self.start = account.first

    def is_new(self, line: int) -> bool:
        return line >= self._account.delivered

    def wanted(self, line: int, row: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers of a row to deliver; empty if the tracker has them or they are superseded."""
        values: dict[str, float] = row["values"]
        if not self._is_wanted(line, row):
            return {}
        existing = self._existing_names(line, row)
        return {name: value for name, value in values.items() if name not in existing}

    def is_media_wanted(self, line: int, row: Mapping[str, Any]) -> bool:
        return self._is_wanted(line, row) and not (_names_of(row) & self._existing_names(line, row))

    def _is_wanted(self, line: int, row: Mapping[str, Any]) -> bool:
        if self._superseded.has(line):  # only rows in progress, which the tracker may already have
            return self._rewinding is Rewinding.KEEPS and line < self._account.handed
        return self.first_step is None or line >= self._account.delivered or row["step"] >= self.first_step

    def _existing_names(self, line: int, row: Mapping[str, Any]) -> Set[Hashable]:
        """Return the names that the tracker has of a killed attempt at the step of a later row."""
        if self._superseded.has(line):
            return frozenset()
        return self._names_in_tracker.get(row["step"], frozenset())


def _names_of(row: Mapping[str, Any]) -> Set[Hashable]:
    """Return the names that a tracker that keeps its points must not get twice at a step; artifacts are replaced."""
    if "values" in row:
        return row["values"].keys()  # type: ignore[no-any-return]
    media = row["media"]
    if media["kind"] == "artifact":
        return frozenset()
    return frozenset({(media["kind"], media["name"])})


def count_rows_left(history: Path, account: Account) -> int:
    """Return the number of rows (numbers and media, without superseded ones) that a tracker still needs."""
    superseded = Superseded(read_rows(history))
    rows = enumerate(read_rows(history))
    return sum("step" in row and line >= account.delivered and not superseded.has(line) for line, row in rows)
