"""Which rows a tracker is still to get, after a run was killed, resumed, or continued without the tracker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from accmt.tracking.history import Superseded, read_rows
from accmt.tracking.ledger import Account


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
