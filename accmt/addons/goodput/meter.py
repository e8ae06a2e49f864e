"""A clock that puts every second of one start of a run into a bin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accmt.data import Window


class Meter:
    """Adds up seconds by bin: at any time, exactly one bin is counting.

    Another thread may read it at any time. In the middle of a change it may read one stretch twice; what it reads next
    is then less by as much, so that differences between readings still add up to the time that has passed.

    Args:
        activity: The first bin.
        clock: Returns the time in seconds.
        began: When the first bin began, by that clock; None means now.

    Attributes:
        waited_s: Seconds spent waiting for data, whatever bin they are in.
        since: When the current stretch began.
        are_lost: Returns whether the steps that are now made were lost before; None once they are not.
    """

    def __init__(self, activity: str, *, clock: Callable[[], float] = perf_counter, began: float | None = None) -> None:
        self.clock = clock
        self.since = clock() if began is None else began
        self.waited_s = 0.0
        self.are_lost: Callable[[], bool] | None = None
        self._activity = self._bin = activity
        self._seconds: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """Return the seconds so far, by bin."""
        name, since, seconds = self._bin, self.since, dict(self._seconds)
        seconds[name] = seconds.get(name, 0.0) + self.clock() - since
        return seconds

    def switch(self, activity: str) -> None:
        """End the current stretch, and begin one of another activity."""
        now = self.clock()
        self._seconds[self._bin] = self._seconds.get(self._bin, 0.0) + now - self.since
        self._activity, self._bin, self.since = activity, activity if self.are_lost is None else "remaking", now

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Count an activity, and then again what was counted before."""
        before = self._activity
        self.switch(activity)
        try:
            yield
        finally:
            self.switch(before)

    def waits_for_windows(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Yield windows: what they and their micro-batches take is waiting for data; the rest is training."""
        return self._waits(windows, have_parts=True)

    def _waits(self, items: Iterator[Any], *, have_parts: bool) -> Iterator[Any]:
        """Yield from an iterator. This runs once per step, so `switch` is inlined."""
        clock, seconds = self.clock, self._seconds
        for name in ("data", "training", "remaking"):
            seconds.setdefault(name, 0.0)
        self.switch("training")
        while True:
            now = clock()
            seconds[self._bin] += now - self.since
            self.since = now
            if self.are_lost is not None and not self.are_lost():
                self.are_lost = None
            self._bin = "data" if self.are_lost is None else "remaking"
            item = next(items, None)
            now = clock()
            seconds[self._bin] += now - self.since
            self.waited_s += now - self.since
            self._activity, self.since = "training", now
            self._bin = "training" if self.are_lost is None else "remaking"
            if item is None:
                return
            if have_parts and item.num_micro_batches > 1:
                item = item._replace(micro_batches=self._waits(iter(item.micro_batches), have_parts=False))
            yield item
