"""The rows that one tracker is still to get, in order, with the names that it knows them by."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accmt.errors import explain
from accmt.messages import warn, warn_once
from accmt.tracking.history import History, HistoryReader
from accmt.tracking.ledger import Account
from accmt.tracking.media import Media
from accmt.tracking.outage import name_error
from accmt.tracking.replay import Replay, Row
from accmt.tracking.spec import TrackerSpec
from accmt.tracking.values import CleanNames, flatten

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

BATCH_ROWS = 200
_PLURALS = {"images": "images", "table": "a table", "artifact": "files"}


@dataclass(frozen=True)
class _Item:
    """One line that the tracker is to get: a row of numbers, or else a configuration, or images and the like."""

    line: int
    row: Row | None = None
    config: dict[str, Any] | None = None
    media: Media | None = None

    def __str__(self) -> str:
        if self.media is not None:
            return f"{self.media.name!r} ({_PLURALS[self.media.kind]}) of step {self.media.step}"
        return "the configuration" if self.row is None else f"the row of step {self.row.step}"


class Feed:
    """Reads `history.jsonl` for one tracker, and hands over what comes first; used by one thread.

    Args:
        account: What the tracker has got; kept up to date.
        replay: Which of the rows it is to get.
    """

    def __init__(
        self, spec: TrackerSpec, tracker: GeneralTracker, history: History, account: Account, replay: Replay
    ) -> None:
        self._spec = spec
        self._tracker = tracker
        self._folder = history.path.parent
        self._account = account
        self._replay = replay
        self._names = CleanNames(spec.clean_name, account.names)
        self._reader = HistoryReader(history, replay.start)
        self._items: deque[_Item] = deque()
        self._settles_in_s = getattr(tracker, "settles_in_s", 0.0)  # a user's own: nobody knows
        self._arrivals: deque[tuple[float, int]] = deque()

    def fetch(self) -> bool:
        """Read further rows once all are handed over; False where there is nothing to hand over."""
        while not self._items and self._read():
            pass
        return bool(self._items)

    @property
    def is_empty(self) -> bool:
        return not self._items

    def hand_over(self, limit: int) -> Iterator[None]:
        """Hand over what comes first, of rows up to `limit` together; yields whenever some were taken.

        Raises:
            Exception: What the tracker raised; what it took before that is off the list.
        """
        if self._items[0].row is None:
            self._hand_over_alone(self._items[0])
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
        """Find out whether the tracker refuses what comes first but takes the next row.

        The first is tried once more after the next one, so that an outage that ends in between costs no row.
        """
        if self._items[0].config is not None:
            return True
        if len(self._items) == 1:
            self._read()
        later = next((item for item in list(self._items)[1:] if item.row is not None), None)
        if later is None or later.row is None:
            return self._items[0].media is not None
        try:
            list(self._spec.deliver(self._tracker, [later.row]))
        except Exception:  # noqa: BLE001 - it is the tracker, then
            return False
        self._items.remove(later)
        try:
            list(self.hand_over(1))
        except Exception:  # noqa: BLE001 - the very question
            return True
        return False

    def skip_first(self, error: BaseException) -> None:
        """Leave out what comes first, which the tracker refuses, with a warning the first time."""
        item = self._items[0]
        self._account.num_rejected += 1
        if self._account.num_rejected == 1:
            got = f"{item} was refused: {name_error(error)}"
            expected = "names and values that it takes; training continues, and history.jsonl has them"
            do = "log it under another name; further ones are counted, and reported at the end"
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
            return _Item(line, config=content["config"]) if self._replay.is_new(line) else None
        if "media" in content:
            return self._media_item(line, content) if self._replay.is_media_wanted(line, content) else None
        values = self._replay.wanted(line, content) if "values" in content else {}
        if not values:
            return None
        return _Item(line, Row(content["step"], content["time"], self._names.rename(values)))

    def _media_item(self, line: int, content: dict[str, Any]) -> _Item | None:
        media = Media.of_line(self._folder, content)
        if self._spec.takes(self._tracker, media.kind):
            is_file = media.kind == "artifact"
            return _Item(line, media=media if is_file else replace(media, name=self._spec.clean_name(media.name)))
        where, got = f"the tracker {self._spec.name}", f"{_PLURALS[media.kind]}, for which it has no place"
        do = f"nothing: {media.folder.parent.parent} has them; or add a tracker that takes them"
        warn_once(explain(where, got, "what it takes", do), about=f"{media.kind} in {self._spec.name}")
        return None

    def _hand_over_alone(self, item: _Item) -> None:
        if item.media is not None:
            self._spec.deliver_media(self._tracker, item.media)
        else:
            named = CleanNames(self._spec.clean_name).rename(flatten(item.config or {}))
            self._tracker.store_init_configuration(named)

    def _take_off(self, count: int) -> None:
        for _ in range(count):
            self._items.popleft()
        self._account.delivered = self._items[0].line if self._items else self._reader.line
