"""Which rows a tracker is still to get, after a run was killed, resumed, or went on without the tracker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from accmt.files import read_json_lines
from accmt.tracking.history import Superseded
from accmt.tracking.ledger import Account


class Rewinding(Enum):
    """What a tracker does with points that a resumed run takes back."""

    WITHDRAWS = "it forgets them, from a step on"
    KEEPS = "it keeps them, and would show a second point at the same step"
    UNKNOWN = "nobody knows: it is handed the new ones too"


@dataclass(frozen=True)
class Row:
    """One row of numbers on its way to a tracker.

    Args:
        step: The update that it belongs to.
        time: When it was logged, in seconds since the epoch.
        values: Numbers by the tracker's names.
    """

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Resume:
    """What a tracker has to know to go on with a run.

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


class Replay:
    """Decides about each line of the history whether a tracker gets it.

    Args:
        history: The file, with the rewind row of this attempt.
        account: What the tracker has got so far.
        rewinding: What the tracker does with superseded points.

    Attributes:
        start: The first line to look at.
        first_step: As in `Resume`.
        kept_steps: As in `Resume`.
    """

    def __init__(self, history: Path, account: Account, rewinding: Rewinding) -> None:
        self._account = replace(account)  # as it was: delivery goes on meanwhile
        self._rewinding = rewinding
        self._superseded = Superseded(read_json_lines(history))
        self._kept: dict[int, set[str]] = defaultdict(set)
        self.start = account.delivered
        self.first_step: int | None = None
        if rewinding is not Rewinding.UNKNOWN and account.handed > account.first:
            self._look_back(history)
        self.kept_steps = (min(self._kept), max(self._kept)) if self._kept else None

    def is_new(self, line: int) -> bool:
        """Return whether the tracker has not got line `line` yet."""
        return line >= self._account.delivered

    def wanted(self, line: int, row: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers of a row that the tracker is to get; none where it has them, or they are superseded."""
        values: dict[str, float] = row["values"]
        if self._superseded.has(line):
            is_under_way = self._rewinding is Rewinding.KEEPS and line < self._account.handed
            return values if is_under_way else {}
        if self.first_step is not None and line < self._account.delivered and row["step"] < self.first_step:
            return {}
        kept = self._kept.get(row["step"])
        return {name: value for name, value in values.items() if name not in kept} if kept else values

    def _look_back(self, history: Path) -> None:
        for line, row in enumerate(read_json_lines(history)):
            if "values" not in row or line < self._account.first:
                continue
            if self._rewinding is Rewinding.KEEPS:
                self._keep(line, row)
            elif line >= self._account.delivered or self._superseded.has(line, since=self._account.delivered):
                self.first_step = row["step"] if self.first_step is None else min(self.first_step, row["step"])
        if self.first_step is not None:
            self.start = self._account.first

    def _keep(self, line: int, row: Mapping[str, Any]) -> None:
        if self._superseded.has(line) and line < self._account.handed:
            self._kept[row["step"]].update(row["values"])


def count_rows_left(history: Path, account: Account) -> int:
    """Return how many rows of numbers, superseded ones aside, a tracker has not got."""
    superseded = Superseded(read_json_lines(history))
    rows = enumerate(read_json_lines(history))
    return sum("values" in row and line >= account.delivered and not superseded.has(line) for line, row in rows)
