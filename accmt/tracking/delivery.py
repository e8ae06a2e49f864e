"""The thread that starts one tracker, feeds it and ends it, through whatever happens to the tracker."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accmt.errors import explain
from accmt.messages import say, warn, warn_once
from accmt.tracking.history import History, HistoryReader
from accmt.tracking.media import Media
from accmt.tracking.replay import Account, Ledger, Replay, Resume, Row, count_rows_left
from accmt.tracking.spec import Outage, RunStart, TrackerSpec, UserTracker, name_error
from accmt.tracking.values import CleanNames, flatten

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


# ---- The rows that one tracker is still to get, in order, with the names that it knows them by.


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


# Rows of about this time are delivered together: one call for many costs the training thread far less than many.
GATHERING_S = 1.0
_TRIES_PER_ROW = 5
_CLOSING_SHARE = 0.2
_QUIET_WAIT_S = 1.0
_LONGEST_DELAY_AT_THE_END_S = 0.25


class _TimeIsUp(Exception):  # noqa: N818 - no error, but the end of the time for the last rows
    pass


class Delivery:
    """Delivers the rows of a run to one tracker; nobody waits for it.

    Rows are read from `history.jsonl`, so that nothing queues up in memory. One that fails is tried again, and those
    behind it wait; one that the tracker refuses for its content is skipped, with a warning.

    Args:
        start: How the run starts there; what it resumes is found in the ledger.
        is_patient: Whether a start that an outage prevents is tried again, instead of being an error.

    Attributes:
        tracker: The tracker, once it has started.
        start_error: Why it did not start, where it will not be tried again.
        outage: Its failures since it last took something.
    """

    def __init__(
        self,
        spec: TrackerSpec,
        start: RunStart,
        history: History,
        ledger: Ledger,
        *,
        key: str,
        is_patient: bool,
    ) -> None:
        self.spec = spec
        self.key = key
        self.tracker: GeneralTracker | None = None
        self.start_error: BaseException | None = None
        self.outage = Outage(spec.name, str(history.path))
        self._start_of_run = start
        self._is_patient = is_patient
        self._history = history
        self._ledger = ledger
        self._status = ""
        self._flush_ends = self._closing_ends = float("inf")
        self._first_try_is_over = threading.Event()
        self._has_rows = threading.Event()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"accmt-{spec.name}", daemon=True)

    @property
    def account(self) -> Account:
        return self._ledger.accounts[self.key]

    @property
    def is_complete(self) -> bool:
        return self.account.delivered >= self._history.num_lines and self.account.status is not None

    def begin(self, timeout_s: float) -> None:
        """Start the thread, and wait until the tracker has started or failed to, but no longer than `timeout_s`."""
        self._thread.start()
        if self._first_try_is_over.wait(max(timeout_s, 0.0)):
            return
        error = TimeoutError(f"it has not started within {timeout_s:.1f} s")
        if self._is_patient:
            self.outage.announce(error)
        else:
            self.start_error = error

    def notify(self) -> None:
        self._has_rows.set()

    def end(self, status: str, timeout_s: float) -> None:
        """Ask the thread to deliver what there is, and to end the tracker's run.

        Args:
            timeout_s: When to give up; the last fifth is for the ending.
        """
        now = time.monotonic()
        self._status = status
        self._flush_ends, self._closing_ends = now + (1 - _CLOSING_SHARE) * timeout_s, now + timeout_s
        self._is_ending.set()
        self._has_rows.set()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread is done; False if it is not after `timeout_s`."""
        self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()

    def attach(self) -> None:
        if self.tracker is not None:
            with suppress(Exception):
                self.spec.attach(self.tracker)

    def detach(self, status: str) -> None:
        if self.tracker is not None:
            with suppress(Exception):
                self.spec.detach(self.tracker, status)

    def warn_of_rows_left(self, flush_s: float) -> None:
        """Warn of rows that the tracker has not got, of a run that is not ended there, and of rows it refused."""
        where, account = f"the tracker {self.spec.name}", self.account
        if account.num_rejected > 1:
            expected = "names and values that it takes"
            warn(explain(where, f"{account.num_rejected} rows were rejected", expected, "history.jsonl has them"))
        if self.is_complete:
            return
        left = count_rows_left(self._history.path, account)
        got = f"{left} rows left, and the run is not ended there" if account.status is None else f"{left} rows left"
        folder = self._history.path.parent
        is_users_own = isinstance(self.spec, UserTracker)
        do = f"nothing: {self._history.path} has them" if is_users_own else f"accmt sync {folder}"
        expected = f"everything delivered within {flush_s:g} s"
        warn(explain(where, f"{got} ({name_error(self.outage.error)})", expected, do))

    def _run(self) -> None:
        try:
            with closing(self._start()) as feed:
                while self._deliver_or_wait(feed):
                    pass
        except _TimeIsUp:
            pass
        except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise to; `begin` and `end` report it
            self.outage.error = error
            if self.tracker is None:
                self.start_error = error
        self._first_try_is_over.set()
        self._close()
        self._ledger.save()

    def _start(self) -> Feed:
        replay = Replay(self._history.path, self.account, self.spec.rewinding)
        resume = Resume(self.account.run_id, self._ledger.attempt, replay.first_step, replay.kept_steps)
        start = replace(self._start_of_run, resume=resume)
        while True:
            tracker = self.spec.build(start)
            try:
                tracker.start()
                break
            except Exception as error:
                if not (self._is_patient and self.spec.is_outage(error)):
                    raise
                self._wait_to_start(error)
        feed = self._follow(tracker, replay)
        self.tracker = tracker
        self.outage.end()
        self._first_try_is_over.set()
        return feed

    def _wait_to_start(self, error: Exception) -> None:
        if not self._first_try_is_over.is_set():
            self.outage.announce(error)
            self._first_try_is_over.set()
        self._pause(self.outage.count(error))
        self._require_time()

    def _follow(self, tracker: GeneralTracker, replay: Replay) -> Feed:
        """Read on where the tracker stopped, or from the first line if it did not find its run again."""
        account, run_id = self.account, self.spec.run_id(tracker)
        if account.run_id not in (None, run_id):
            account.restart()
            replay = Replay(self._history.path, account, self.spec.rewinding)
        account.run_id, account.status = run_id, None
        return Feed(self.spec, tracker, self._history, account, replay)

    def _deliver_or_wait(self, feed: Feed) -> bool:
        """Deliver the rows that are there, or wait for some; return whether more may come."""
        # Both before the look at the file: a row, or the end, that comes during it is noticed in the next turn.
        is_ending = self._is_ending.is_set()
        self._has_rows.clear()
        if feed.fetch():
            self._ledger.save()  # first what is under way, then what has arrived: a kill in between is known of
            self._hand_over(feed)
            feed.settle()
            self._ledger.save()
            return True
        if not is_ending:
            self._wait_for_rows(feed)
        return not is_ending

    def _wait_for_rows(self, feed: Feed) -> None:
        if not self._has_rows.wait(feed.settle()):
            feed.settle()
            self._ledger.save()
        elif not self._is_ending.is_set():
            self._is_ending.wait(GATHERING_S)

    def _hand_over(self, feed: Feed) -> None:
        limit = BATCH_ROWS
        while not feed.is_empty:
            self._require_time()
            try:
                for _ in feed.hand_over(limit):
                    self._require_time()
            except Exception as error:  # noqa: BLE001 - whatever a tracker raises, training continues
                delay = self.outage.count(error)
                # One bad row must not take the whole batch with it: only a single row can be skipped, so after a
                # failure they go one by one, and in growing batches again once the tracker takes them.
                if limit == 1 and self._is_refusal(error, feed):
                    feed.skip_first(error)
                else:
                    self._pause(delay)
                limit = 1
            else:
                limit = min(2 * limit, BATCH_ROWS)
                self.outage.end()

    def _is_refusal(self, error: Exception, feed: Feed) -> bool:
        """Distinguish a row that the tracker will never take from a tracker that takes nothing at the moment."""
        if self.spec.is_refusal(error) or self.spec.is_outage(error):
            return self.spec.is_refusal(error)
        return self.outage.num_failures >= _TRIES_PER_ROW and feed.is_first_at_fault()

    def _close(self) -> None:
        if self.tracker is None:
            return
        self._is_ending.wait()
        while True:
            try:
                self.spec.finish(self.tracker, self._status)
            except Exception as error:  # noqa: BLE001 - whatever a tracker raises
                delay = self.outage.count(error)
            else:
                self.account.status = self._status
                return
            is_hopeless = self.outage.num_failures >= _TRIES_PER_ROW and not self.spec.is_outage(self.outage.error)
            if is_hopeless or time.monotonic() + delay >= self._closing_ends:
                return
            self._pause(delay)

    def _require_time(self) -> None:
        if time.monotonic() > self._flush_ends:
            raise _TimeIsUp

    def _pause(self, seconds: float) -> None:
        if not self._is_ending.is_set():
            self._is_ending.wait(seconds)
            return
        now = time.monotonic()
        ends = self._flush_ends if now < self._flush_ends else self._closing_ends
        time.sleep(max(min(seconds, _LONGEST_DELAY_AT_THE_END_S, ends - now), 0.0))


def wait_for_the_end(deliveries: Sequence[Delivery], status: str, flush_s: float) -> None:
    """End the run in all trackers, and wait until they have everything, but no longer than `flush_s` in all."""
    deadline = time.monotonic() + flush_s
    for delivery in deliveries:
        delivery.end(status, flush_s)
    warn_at = time.monotonic() + _QUIET_WAIT_S
    waiting = [delivery for delivery in deliveries if not delivery.join(min(warn_at, deadline) - time.monotonic())]
    if waiting and flush_s > _QUIET_WAIT_S:
        names = ", ".join(delivery.spec.name for delivery in waiting)
        say(f"the last rows go to {names}: this takes {flush_s:g} s at most")
    for delivery in waiting:
        delivery.join(deadline - time.monotonic())
