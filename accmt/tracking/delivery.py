"""The thread that starts one tracker, feeds it and ends it, through whatever happens to the tracker."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from accmt.errors import explain
from accmt.messages import say, warn
from accmt.tracking.feed import BATCH_ROWS, Feed
from accmt.tracking.history import History
from accmt.tracking.ledger import Account, Ledger
from accmt.tracking.outage import Outage, name_error
from accmt.tracking.replay import Replay, Resume, count_rows_left
from accmt.tracking.spec import RunStart, TrackerSpec, UserTracker

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

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
