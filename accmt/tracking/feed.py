"""The rows that one tracker is still to get, in order, with the names that it knows them by."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accmt.errors import explain
from accmt.messages import warn
from accmt.tracking.history import History, HistoryReader
from accmt.tracking.ledger import Account
from accmt.tracking.outage import name_error
from accmt.tracking.replay import Replay, Row
from accmt.tracking.spec import TrackerSpec
from accmt.tracking.values import CleanNames, flatten

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

BATCH_ROWS = 200


@dataclass(frozen=True)
class _Item:
    """One line that the tracker is to get: a row of numbers, or a configuration."""

    line: int
    row: Row | None
    config: dict[str, Any] | None = None


class Feed:
    """Reads `history.jsonl` for one tracker, and hands over what comes first; used by one thread.

    Args:
        spec: The tracker's kind.
        tracker: The tracker, started.
        history: The rows.
        account: What the tracker has got; kept up to date.
        replay: Which of the rows it is to get.
    """

    def __init__(
        self, spec: TrackerSpec, tracker: GeneralTracker, history: History, account: Account, replay: Replay
    ) -> None:
        self._spec = spec
        self._tracker = tracker
        self._account = account
        self._replay = replay
        self._names = CleanNames(spec.clean_name, account.names)
        self._reader = HistoryReader(history, replay.start)
        self._items: deque[_Item] = deque()
        self._settles_in_s = spec.settles_in_s(tracker)
        self._arrivals: deque[tuple[float, int]] = deque()

    def fetch(self) -> bool:
        """Read further rows once all are handed over; False where there is nothing to hand over."""
        while not self._items and self._read():
            pass
        return bool(self._items)

    @property
    def is_empty(self) -> bool:
        """Whether all that was read is handed over."""
        return not self._items

    def hand_over(self, limit: int) -> Iterator[None]:
        """Hand over the configuration or the up to `limit` rows that come first; yields whenever some were taken.

        Raises:
            Exception: What the tracker raised; what it took before that is off the list.
        """
        first = self._items[0]
        if first.config is not None:
            named = CleanNames(self._spec.clean_name).rename(flatten(first.config))
            self._tracker.store_init_configuration(named)
            self._take_off(1)
            yield
            return
        rows: list[Row] = []
        for item in self._items:
            if item.row is None or len(rows) == limit:
                break
            rows.append(item.row)
        for count in self._spec.deliver(self._tracker, rows):
            self._take_off(count)
            yield

    def is_first_at_fault(self) -> bool:
        """Find out whether the tracker refuses the first row but takes the next.

        The first is tried once more after the next one, so that an outage that ends in between costs no row.
        """
        if self._items[0].config is not None:
            return True
        if len(self._items) == 1:
            self._read()
        second = self._items[1].row if len(self._items) > 1 else None
        if second is None:
            return False
        try:
            list(self._spec.deliver(self._tracker, [second]))
        except Exception:  # noqa: BLE001 - it is the tracker, then
            return False
        del self._items[1]
        try:
            list(self.hand_over(1))
        except Exception:  # noqa: BLE001 - the very question
            return True
        return False

    def pass_over_first(self, error: BaseException) -> None:
        """Leave out what comes first, which the tracker refuses, and say so the first time."""
        item = self._items[0]
        self._account.num_refused += 1
        if self._account.num_refused == 1:
            what = "the configuration" if item.row is None else f"the row of step {item.row.step}"
            got = f"{what} was refused: {name_error(error)}"
            expected = "names and values that it takes; training goes on, and history.jsonl has them"
            do = "log it under another name; further refusals are counted, and told at the end"
            warn(explain(f"the tracker {self._spec.name}", got, expected, do))
        self._take_off(1)

    def settle(self) -> float | None:
        """Note in the account what arrived so long ago that no kill takes it from the tracker any more.

        Returns:
            The seconds until there is more to note; None where there is nothing.
        """
        if math.isinf(self._settles_in_s):
            return None
        now, account = time.monotonic(), self._account
        if account.delivered != (self._arrivals[-1][1] if self._arrivals else account.settled):
            self._arrivals.append((now, account.delivered))
        while self._arrivals and now - self._arrivals[0][0] >= self._settles_in_s:
            account.settled = self._arrivals.popleft()[1]
        return self._arrivals[0][0] + self._settles_in_s - now if self._arrivals else None

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def _read(self) -> bool:
        lines = self._reader.read(BATCH_ROWS)
        for line, content in lines:
            item = self._item(line, content)
            if item is not None:
                self._items.append(item)
        if not self._items:
            self._account.delivered = self._reader.line
        self._account.handed = max(self._account.handed, self._reader.line)
        return bool(lines)

    def _item(self, line: int, content: dict[str, Any]) -> _Item | None:
        if "config" in content:
            return _Item(line, None, content["config"]) if self._replay.is_new(line) else None
        values = self._replay.wanted(line, content) if "values" in content else {}
        if not values:
            return None
        return _Item(line, Row(content["step"], content["time"], self._names.rename(values)))

    def _take_off(self, count: int) -> None:
        for _ in range(count):
            self._items.popleft()
        self._account.delivered = self._items[0].line if self._items else self._reader.line
