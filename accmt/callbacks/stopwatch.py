"""Time per phase of a run, measured at its hooks: no clock is needed in the loop itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple

from accmt.callbacks.base import MainProcessCallback

PURPOSES = ("data", "compute", "evaluation", "saving", "other")


class Moment(NamedTuple):
    """What a hook says about the time around it.

    Attributes:
        before: What the time before it was spent on, where nothing else is known to run.
        after: What runs after it; None where the next hook says so.
        callbacks: What the callbacks at this hook take time for.
        is_certain: Whether `before` holds whatever ran.
        interrupts: Whether what ran continues after it.
    """

    before: str
    after: str | None = None
    callbacks: str = "other"
    is_certain: bool = False
    interrupts: bool = False


MOMENTS: dict[str, Moment] = {
    "on_fit_start": Moment("other"),
    "on_epoch_start": Moment("other"),
    "on_before_training_step": Moment("data"),
    "on_after_training_step": Moment("compute"),
    "on_update_end": Moment("compute"),
    "on_log": Moment("compute", interrupts=True),  # reading a row waits for the device
    "on_evaluation_start": Moment("other", after="evaluation"),
    "on_evaluation_end": Moment("evaluation"),
    "on_save_model": Moment("saving", is_certain=True, interrupts=True),
    "on_save_checkpoint": Moment("saving", is_certain=True, interrupts=True),
    "on_epoch_end": Moment("other"),
}
"""A checkpoint is written while training continues; "saving" is what taking it costs."""


class Stopwatch(MainProcessCallback):
    """Adds up seconds by purpose: what lies between two hooks belongs to one.

    A `StopwatchOfCallbacks` beside it measures what the callbacks between the two take. Where the device works on while
    the host goes ahead, it is waited for where a row is read.

    Args:
        moments: The hooks at which it looks at the clock.
        purposes: All purposes that these name.

    Attributes:
        seconds: Since the start of the run, by purpose.
    """

    order = -math.inf

    def __init__(self, moments: Mapping[str, Moment] = MOMENTS, purposes: Sequence[str] = PURPOSES) -> None:
        self.seconds = dict.fromkeys(purposes, 0.0)
        self.moments = moments
        self._last: float | None = None
        self._in_work: str | None = None
        self._interrupted: list[str | None] = []
        for hook in moments:
            setattr(self, hook, partial(self.arrive, hook))

    def lap(self, purpose: str) -> float:
        """Give the time since the last lap a purpose, and return it in seconds; the first lap begins."""
        now = perf_counter()
        passed = 0.0 if self._last is None else now - self._last
        self.seconds[purpose] += passed
        self._last = now
        return passed

    def arrive(self, hook: str) -> None:
        """End what came before a hook; its callbacks follow."""
        moment = self.moments[hook]
        self.lap(moment.before if moment.is_certain or self._in_work is None else self._in_work)
        self._interrupted.append(self._in_work)
        self._in_work = moment.callbacks

    def leave(self, hook: str) -> None:
        """End the callbacks of a hook."""
        moment = self.moments[hook]
        self.lap(moment.callbacks)
        interrupted = self._interrupted.pop()
        self._in_work = interrupted if moment.interrupts else moment.after

    @property
    def training_s(self) -> float:
        """Seconds in which the run trained: neither evaluated nor saved."""
        return self.seconds["data"] + self.seconds["compute"] + self.seconds["other"]


class StopwatchOfCallbacks(MainProcessCallback):
    """Gives what the callbacks between a stopwatch and itself took its purpose.

    Args:
        stopwatch: The stopwatch, which comes before all others as this comes after them.
    """

    order = math.inf

    def __init__(self, stopwatch: Stopwatch) -> None:
        for hook in stopwatch.moments:
            setattr(self, hook, partial(stopwatch.leave, hook))
