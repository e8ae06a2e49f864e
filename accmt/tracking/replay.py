"""Which rows a tracker is still to get, after a run was killed, resumed, or continued without the tracker."""

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
from accmt.tracking.history import Superseded, read_rows

# ---- `delivery.json`: how far each tracker of a run has got, so that a later process continues where this one stopped.


LEDGER_FILE = "delivery.json"


@dataclass
class Account:
    """What one tracker has got of `history.jsonl`. Lines are counted from 0.

    Args:
        server: The URL of the tracker's store, None for one in the folder of logs.
        run_id: The id by which the tracker knows the run.
        first: The first line of the run.
        delivered: The line before which the tracker has everything.
        handed: The line before which it may have everything: what is between was under way when this was written.
        settled: The line before which it has everything permanently, also after a kill; the rest it may have in memory.
        num_rejected: Rows that it rejected for their content.
        names: Its name of each metric.
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
        """Count nothing as delivered: the tracker's run is a new one."""
        self.delivered = self.handed = self.settled = self.first
        self.status = None

    def reopen(self) -> None:
        """Count as under way what a killed process had handed over, and the tracker may have lost with it."""
        if self.status is None:
            self.delivered = min(self.delivered, self.settled)


class Ledger:
    """The accounts of all trackers of a run, written as one file."""

    def __init__(self, folder: Path, track_name: str, run_name: str) -> None:
        self._path = folder / LEDGER_FILE
        self._lock = threading.Lock()
        self.track_name = track_name
        self.run_name = run_name
        self.attempt = 1
        self.accounts: dict[str, Account] = {}

    @classmethod
    def read(cls, folder: Path) -> Ledger | None:
        """Return what an earlier process wrote; None where there is no file, or a damaged one."""
        try:
            content = loads((folder / LEDGER_FILE).read_text(encoding="utf-8"))
            ledger = cls(folder, content["track_name"], content["run_name"])
            ledger.attempt = content["attempt"]
            ledger.accounts = {name: Account(**account) for name, account in content["trackers"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return ledger

    def save(self) -> None:
        """Replace the file; on a full disk it stays as it is, and rows may be delivered twice after a kill."""
        with self._lock, suppress(OSError):
            # Copies: the threads of other trackers keep changing theirs.
            accounts = {key: {**vars(own), "names": dict(own.names)} for key, own in self.accounts.items()}
            content = {"track_name": self.track_name, "run_name": self.run_name, "attempt": self.attempt}
            write_text(self._path, dumps({**content, "trackers": accounts}, indent=2) + "\n")


class Rewinding(Enum):
    """What a tracker does with points that a resumed run takes back."""

    WITHDRAWS = "it forgets them, from a step on"
    KEEPS = "it keeps them, and would show a second point at the same step"
    UNKNOWN = "nobody knows: it gets the new ones too"


@dataclass(frozen=True)
class Row:
    """One row of numbers on its way to a tracker.

    Args:
        step: The step that it belongs to.
        values: Numbers by the tracker's names.
    """

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Resume:
    """What a tracker has to know to resume a run.

    Args:
        run_id: Its id of the run; None for a new run.
        attempt: 1 for the first process of the run, 2 for the one that resumed it, and so on.
        first_step: Points from this step on are withdrawn; None withdraws none.
        kept_steps: The first and the last step at which points of a killed attempt stay; None where there are none.
    """

    run_id: str | None = None
    attempt: int = 1
    first_step: int | None = None
    kept_steps: tuple[int, int] | None = None

    @property
    def tags(self) -> dict[str, str]:
        """What a resumed run says of itself in trackers that keep the points of earlier attempts."""
        if self.attempt == 1:
            return {}
        steps = {} if self.kept_steps is None else {"accmt.steps_of_earlier_attempts": "{}-{}".format(*self.kept_steps)}
        return {"accmt.attempt": str(self.attempt), **steps}


class Replay:
    """Decides about each line of the history whether a tracker gets it.

    Attributes:
        start: The first line to look at.
    """

    def __init__(self, history: Path, account: Account, rewinding: Rewinding) -> None:
        self._account = replace(account)  # as it was: delivery continues meanwhile
        self._rewinding = rewinding
        self._superseded = Superseded(read_rows(history))
        self._kept: dict[int, set[Hashable]] = defaultdict(set)
        self.start = account.delivered
        self.first_step: int | None = None
        if rewinding is not Rewinding.UNKNOWN and account.handed > account.first:
            self._look_back(history)
        self.kept_steps = (min(self._kept), max(self._kept)) if self._kept else None

    def is_new(self, line: int) -> bool:
        return line >= self._account.delivered

    def wanted(self, line: int, row: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers of a row that the tracker is to get; none where it has them, or they are superseded."""
        values: dict[str, float] = row["values"]
        if not self._is_wanted(line, row):
            return {}
        kept = self._kept_beside(line, row)
        return {name: value for name, value in values.items() if name not in kept} if kept else values

    def is_media_wanted(self, line: int, row: Mapping[str, Any]) -> bool:
        return self._is_wanted(line, row) and not (_names_of(row) & self._kept_beside(line, row))

    def _is_wanted(self, line: int, row: Mapping[str, Any]) -> bool:
        if self._superseded.has(line):  # only what is under way, and so may be there already
            return self._rewinding is Rewinding.KEEPS and line < self._account.handed
        return self.first_step is None or line >= self._account.delivered or row["step"] >= self.first_step

    def _kept_beside(self, line: int, row: Mapping[str, Any]) -> Set[Hashable]:
        """Return what the tracker keeps of a killed attempt at the step of a row of a later one."""
        return frozenset() if self._superseded.has(line) else self._kept.get(row["step"], frozenset())

    def _look_back(self, history: Path) -> None:
        for line, row in enumerate(read_rows(history)):
            if "step" not in row or line < self._account.first:
                continue
            if self._rewinding is Rewinding.KEEPS:
                self._keep(line, row)
            elif line >= self._account.delivered or self._superseded.has(line, since=self._account.delivered):
                self.first_step = row["step"] if self.first_step is None else min(self.first_step, row["step"])
        if self.first_step is not None:
            self.start = self._account.first

    def _keep(self, line: int, row: Mapping[str, Any]) -> None:
        if self._superseded.has(line) and line < self._account.handed:
            self._kept[row["step"]] |= _names_of(row)


def _names_of(row: Mapping[str, Any]) -> Set[Hashable]:
    """Return what a tracker that keeps its points must not get twice at a step; a later artifact replaces another."""
    if "values" in row:
        return row["values"].keys()  # type: ignore[no-any-return]
    media = row["media"]
    return frozenset() if media["kind"] == "artifact" else frozenset({(media["kind"], media["name"])})


def count_rows_left(history: Path, account: Account) -> int:
    """Return how many rows of numbers, images, tables and artifacts, superseded ones aside, a tracker has not got."""
    superseded = Superseded(read_rows(history))
    rows = enumerate(read_rows(history))
    return sum("step" in row and line >= account.delivered and not superseded.has(line) for line, row in rows)
