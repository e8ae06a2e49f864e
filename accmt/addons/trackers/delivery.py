"""The thread that starts one tracker, delivers rows to it and ends its run, whatever errors the tracker raises.

After the run, `accmt sync` uses the same thread for the rows that are left.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accmt.addons.trackers.delivery_state import Account, DeliveryFile, Replay, Resume, Row, count_rows_left
from accmt.addons.trackers.spec import Outage, RunStart, TrackerSpec, UserTracker, name_error
from accmt.errors import explain
from accmt.messages import say, warn, warn_once
from accmt.tracking.history import History, HistoryReader
from accmt.tracking.values import CleanNames, Media, flatten

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

# ---- Undelivered rows of one tracker, in order, with clean names


BATCH_ROWS = 200
_PLURALS = {"images": "images", "table": "a table", "artifact": "files"}


@dataclass(frozen=True)
class _Item:
    """One line to deliver: a row of numbers, a configuration or media."""

    line: int
    row: Row | None = None
    config: dict[str, Any] | None = None
    media: Media | None = None

    def __str__(self) -> str:
        if self.media is not None:
            return f"{self.media.name!r} ({_PLURALS[self.media.kind]}) at step {self.media.step}"
        if self.row is not None:
            return f"the row at step {self.row.step}"
        return "the configuration"


class Feed:
    """Reads `history.jsonl` for one tracker and delivers the rows in order; used by one thread.

    Args:
        account: The tracker's delivery state; updated with each delivery.
        replay: Decides which rows the tracker gets.
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
        self._settles_in_s = getattr(tracker, "settles_in_s", 0.0)  # unknown for a user's tracker
        self._arrivals: deque[tuple[float, int]] = deque()

    def fetch(self) -> bool:
        """Read more rows if all are delivered; return False if there is nothing to deliver."""
        while not self._items and self._read():
            pass
        return bool(self._items)

    @property
    def is_empty(self) -> bool:
        return not self._items

    def hand_over(self, limit: int) -> Iterator[None]:
        """Deliver the first item, or up to `limit` rows together; yields whenever the tracker accepted some.

        Raises:
            Exception: Any error of the tracker; items that it accepted before are removed from the queue.
        """
        first = self._items[0]
        if first.row is None:
            if first.media is not None:
                self._spec.deliver_media(self._tracker, first.media)
            else:
                # A separate mapping of names: `lr` may be a setting and a metric.
                config = CleanNames(self._spec.clean_name).rename(flatten(first.config or {}))
                self._tracker.store_init_configuration(config)
            self._remove(1)
            yield
            return
        rows: list[Row] = []
        for item in self._items:
            if item.row is None or len(rows) == limit:
                break
            rows.append(item.row)
        for count in self._spec.deliver(self._tracker, rows):
            self._remove(count)
            yield

    def is_first_at_fault(self) -> bool:
        """Return whether the tracker rejects the first item but accepts the next row.

        The first item is tried again after the next one, so that no row is lost if an outage ends in between.
        """
        if self._items[0].config is not None:
            return True
        if len(self._items) == 1:
            self._read()
        following = next((item for item in list(self._items)[1:] if item.row is not None), None)
        if following is None or following.row is None:  # without a row to compare with, only media are given up
            return self._items[0].media is not None
        try:
            list(self._spec.deliver(self._tracker, [following.row]))
        except Exception:  # noqa: BLE001 - then the tracker is the problem
            return False
        self._items.remove(following)
        try:
            list(self.hand_over(1))
        except Exception:  # noqa: BLE001 - then the item is the problem
            return True
        return False

    def skip_first(self, error: BaseException) -> None:
        """Skip the first item, which the tracker rejects; warn the first time."""
        item = self._items[0]
        self._account.num_rejected += 1
        if self._account.num_rejected == 1:
            got = f"{item} was rejected: {name_error(error)}"
            expected = "names and values that it accepts; training continues, and history.jsonl has the row"
            do = "log it under another name; the number of rejected rows is reported at the end"
            warn(explain(f"the tracker {self._spec.name}", got, expected, do))
        self._remove(1)

    def settle(self) -> float | None:
        """Record what was delivered so long ago that a kill can no longer lose it.

        Returns:
            The seconds until there is more to record; None if there is nothing.
        """
        if math.isinf(self._settles_in_s):
            return None
        time_s, account = time.monotonic(), self._account
        last_arrival = self._arrivals[-1][1] if self._arrivals else account.settled
        if account.delivered != last_arrival:
            self._arrivals.append((time_s, account.delivered))
        while self._arrivals and time_s - self._arrivals[0][0] >= self._settles_in_s:
            account.settled = self._arrivals.popleft()[1]
        if not self._arrivals:
            return None
        return self._arrivals[0][0] + self._settles_in_s - time_s

    def close(self) -> None:
        self._reader.close()

    def _read(self) -> bool:
        lines = self._reader.read(BATCH_ROWS)
        for line, content in lines:
            item = self._item(line, content)
            if item is not None:
                self._items.append(item)
        if not self._items:  # none of the lines is for this tracker, such as superseded ones
            self._account.delivered = self._reader.line
        self._account.handed = max(self._account.handed, self._reader.line)
        return bool(lines)

    def _item(self, line: int, content: dict[str, Any]) -> _Item | None:
        """Return what to deliver of a line; None if the tracker has it, or does not get it."""
        if "config" in content and self._replay.is_new(line):
            return _Item(line, config=content["config"])
        if "values" in content:
            values = self._replay.wanted(line, content)
            if values:
                return _Item(line, Row(content["step"], content["time"], self._names.rename(values)))
        if "media" not in content or not self._replay.is_media_wanted(line, content):
            return None
        media = Media.of_line(self._folder, content)
        if self._spec.takes(self._tracker, media.kind):
            if media.kind != "artifact":  # whose name is that of its file
                media = replace(media, name=self._spec.clean_name(media.name))
            return _Item(line, media=media)
        where, got = f"the tracker {self._spec.name}", f"{_PLURALS[media.kind]}, which it does not support"
        do = f"no action needed: the files are in {media.folder.parent.parent}; or add a tracker that supports them"
        warn_once(explain(where, got, "a type that it supports", do), about=f"{media.kind} in {self._spec.name}")
        return None

    def _remove(self, count: int) -> None:
        for _ in range(count):
            self._items.popleft()
        self._account.delivered = self._items[0].line if self._items else self._reader.line


# Rows of about this time span are delivered together: one call costs the training thread far less than many.
GATHERING_S = 1.0
_TRIES_PER_ROW = 5
_CLOSING_SHARE = 0.2
_QUIET_WAIT_S = 1.0
_LONGEST_DELAY_AT_THE_END_S = 0.25


class _TimeIsUp(Exception):  # noqa: N818 - not an error: the time for the last rows is over
    pass


class Delivery:
    """Delivers the rows of a run to one tracker in the background.

    Rows are read from `history.jsonl`, so nothing queues up in memory. If delivery fails, it is retried and later rows
    wait; a row that the tracker rejects because of its content is skipped with a warning.

    Args:
        start: How the run starts in the tracker; the delivery file knows which run it resumes.
        is_patient: Whether to retry a start that fails because of an outage, instead of raising an error.

    Attributes:
        tracker: The tracker, once it has started.
        start_error: The error that prevented the start, if it will not be retried.
        outage: Failures since the last successful delivery.
    """

    def __init__(
        self,
        spec: TrackerSpec,
        start: RunStart,
        history: History,
        delivery_file: DeliveryFile,
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
        self._delivery_file = delivery_file
        self._status = ""
        self._flush_ends = self._closing_ends = float("inf")
        self._first_try_is_over = threading.Event()
        self._has_rows = threading.Event()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"accmt-{spec.name}", daemon=True)

    @property
    def account(self) -> Account:
        return self._delivery_file.accounts[self.key]

    @property
    def is_complete(self) -> bool:
        return self.account.delivered >= self._history.num_lines and self.account.status is not None

    def begin(self, timeout_s: float) -> None:
        """Start the thread, and wait until the tracker has started or failed to, but no longer than `timeout_s`."""
        self._thread.start()
        if self._first_try_is_over.wait(max(timeout_s, 0.0)):
            return
        error = TimeoutError(f"it did not start within {timeout_s:.1f} s")
        if self._is_patient:
            self.outage.announce(error)
        else:
            self.start_error = error

    def notify(self) -> None:
        self._has_rows.set()

    def end(self, status: str, timeout_s: float) -> None:
        """Tell the thread to deliver all remaining rows and end the tracker's run.

        Args:
            timeout_s: The time limit; its last fifth is reserved for ending the run.
        """
        self._status = status
        time_s = time.monotonic()
        self._flush_ends, self._closing_ends = time_s + (1 - _CLOSING_SHARE) * timeout_s, time_s + timeout_s
        # After the limits, which the thread reads as soon as it is woken.
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
        """Warn about undelivered rows, a run that could not be ended in the tracker, and rejected rows."""
        where, account = f"the tracker {self.spec.name}", self.account
        if account.num_rejected > 1:
            expected, do = "names and values that it accepts", "no action needed: history.jsonl has them"
            warn(explain(where, f"{account.num_rejected} rejected rows", expected, do))
        if self.is_complete:
            return
        got = f"{count_rows_left(self._history.path, account)} rows not delivered"
        if account.status is None:
            got += ", and the run was not closed"
        do = f"accmt sync {self._history.path.parent}"
        if isinstance(self.spec, UserTracker):  # which `accmt sync` cannot build
            do = f"no action needed: {self._history.path} has them"
        expected = f"all rows delivered within {flush_s:g} s"
        warn(explain(where, f"{got} ({name_error(self.outage.error)})", expected, do))

    def _run(self) -> None:
        try:
            with closing(self._start()) as feed:
                while self._deliver_or_wait(feed):
                    pass
        except _TimeIsUp:
            pass
        except BaseException as error:  # noqa: BLE001 - errors in a thread are lost; `begin` and `end` report it
            self.outage.error = error
            if self.tracker is None:
                self.start_error = error
        self._first_try_is_over.set()
        self._close()
        self._delivery_file.save()

    def _start(self) -> Feed:
        replay = Replay(self._history.path, self.account, self.spec.rewinding)
        resume = Resume(self.account.run_id, self._delivery_file.attempt, replay.first_step)
        start = replace(self._start_of_run, resume=resume)
        while True:
            tracker = self.spec.build(start)
            try:
                tracker.start()
                break
            except Exception as error:
                # A wrong argument or a missing permission would fail in the same way again and again.
                if not (self._is_patient and self.spec.is_outage(error)):
                    raise
                if not self._first_try_is_over.is_set():
                    self.outage.announce(error)
                    self._first_try_is_over.set()
                self._pause(self.outage.count(error))
                self._require_time()
        feed = self._follow(tracker, replay)
        self.tracker = tracker
        self.outage.end()
        self._first_try_is_over.set()
        return feed

    def _follow(self, tracker: GeneralTracker, replay: Replay) -> Feed:
        """Continue where the tracker stopped, or from the first line if it did not find its run."""
        account, run_id = self.account, self.spec.run_id(tracker)
        if account.run_id not in (None, run_id):  # somebody deleted the run in the service
            account.restart()
            replay = Replay(self._history.path, account, self.spec.rewinding)
        account.run_id, account.status = run_id, None
        return Feed(self.spec, tracker, self._history, account, replay)

    def _deliver_or_wait(self, feed: Feed) -> bool:
        """Deliver available rows, or wait for some; return whether more may come."""
        # Both are read before the file, so that a row or the end that comes meanwhile is noticed in the next iteration.
        is_ending = self._is_ending.is_set()
        self._has_rows.clear()
        if feed.fetch():
            self._delivery_file.save()  # save before and after delivery, so that a kill in between is detected
            self._hand_over(feed)
            feed.settle()
            self._delivery_file.save()
            return True
        if not is_ending:
            if not self._has_rows.wait(feed.settle()):  # no row came, but delivered ones have settled
                feed.settle()
                self._delivery_file.save()
            elif not self._is_ending.is_set():
                self._is_ending.wait(GATHERING_S)
        return not is_ending

    def _hand_over(self, feed: Feed) -> None:
        limit = BATCH_ROWS
        while not feed.is_empty:
            self._require_time()
            try:
                for _ in feed.hand_over(limit):
                    self._require_time()
            except Exception as error:  # noqa: BLE001 - training continues whatever a tracker raises
                delay = self.outage.count(error)
                # A bad row must not cost the whole batch. Only single rows can be skipped, so after a failure rows
                # are sent one by one, and in growing batches again once the tracker accepts them.
                if limit == 1 and self._is_refusal(error, feed):
                    feed.skip_first(error)
                else:
                    self._pause(delay)
                limit = 1
            else:
                limit = min(2 * limit, BATCH_ROWS)
                self.outage.end()

    def _is_refusal(self, error: Exception, feed: Feed) -> bool:
        """Return whether the tracker will never accept the row, rather than accepting nothing at the moment."""
        if self.spec.is_refusal(error):
            return True
        if self.spec.is_outage(error):
            return False
        # An error of neither kind: several attempts, and another row that is accepted, show that it is the row.
        return self.outage.num_failures >= _TRIES_PER_ROW and feed.is_first_at_fault()

    def _close(self) -> None:
        if self.tracker is None:
            return
        # After an error of the thread, too: a run ends in its tracker with the status with which it ends here.
        self._is_ending.wait()
        while True:
            try:
                self.spec.finish(self.tracker, self._status)
            except Exception as error:  # noqa: BLE001 - trackers may raise anything
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
        time_s = time.monotonic()
        end_s = self._flush_ends if time_s < self._flush_ends else self._closing_ends
        time.sleep(max(min(seconds, _LONGEST_DELAY_AT_THE_END_S, end_s - time_s), 0.0))


def wait_for_the_end(deliveries: Sequence[Delivery], status: str, flush_s: float) -> None:
    """End the run in all trackers, and wait at most `flush_s` in total until all rows are delivered."""
    deadline = time.monotonic() + flush_s
    for delivery in deliveries:
        delivery.end(status, flush_s)
    warn_at = time.monotonic() + _QUIET_WAIT_S
    waiting = [delivery for delivery in deliveries if not delivery.join(min(warn_at, deadline) - time.monotonic())]
    if waiting and flush_s > _QUIET_WAIT_S:  # so that a program that waits does not look hung
        names = ", ".join(delivery.spec.name for delivery in waiting)
        say(f"delivering the last rows to {names}: this takes at most {flush_s:g} s")
    for delivery in waiting:
        delivery.join(deadline - time.monotonic())
