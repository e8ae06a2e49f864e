"""Where the time of a run goes, told by its hooks: no clock is needed in the loop itself."""

from __future__ import annotations

import math
from time import perf_counter

from accmt.callbacks.base import MainProcessCallback

PURPOSES = ("data", "compute", "evaluation", "saving", "other")


class Stopwatch(MainProcessCallback):
    """Adds up seconds by purpose: what lies between two hooks belongs to one.

    Waiting for the next batch is "data"; what callbacks take is "other". A device that works on while the host goes
    ahead is waited for where a row is read, which is "compute".

    Attributes:
        seconds: Since the start of the run, by purpose.
    """

    order = -math.inf

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PURPOSES, 0.0)
        self._last = perf_counter()
        self._is_evaluating = False

    def lap(self, purpose: str) -> None:
        """Give the time since the last lap a purpose."""
        now = perf_counter()
        self.seconds[purpose] += now - self._last
        self._last = now

    @property
    def training_s(self) -> float:
        """Seconds in which the run trained: neither evaluated nor saved."""
        return self.seconds["data"] + self.seconds["compute"] + self.seconds["other"]

    def on_fit_start(self) -> None:
        """Begin."""
        self._last = perf_counter()

    def on_epoch_start(self) -> None:
        """End what lies between epochs."""
        self.lap("other")

    def on_before_training_step(self) -> None:
        """End the wait for a batch."""
        self.lap("data")

    def on_after_training_step(self) -> None:
        """End forward and backward."""
        self.lap("compute")

    def on_update_end(self) -> None:
        """End the update."""
        self.lap("compute")

    def on_log(self) -> None:
        """End the reading of a row, which waits for the device."""
        self.lap("evaluation" if self._is_evaluating else "compute")

    def on_evaluation_start(self) -> None:
        """Begin an evaluation."""
        self.lap("other")
        self._is_evaluating = True

    def on_evaluation_end(self) -> None:
        """End an evaluation."""
        self.lap("evaluation")
        self._is_evaluating = False

    def on_save_model(self) -> None:
        """End the saving of a model."""
        self.lap("saving")

    def on_save_checkpoint(self) -> None:
        """End the taking of a checkpoint; it is written while training goes on."""
        self.lap("saving")

    def on_epoch_end(self) -> None:
        """End what lies between epochs."""
        self.lap("other")


class StopwatchOfCallbacks(MainProcessCallback):
    """Gives what the callbacks between a stopwatch and itself took its purpose.

    Args:
        stopwatch: The stopwatch, which comes before all others as this comes after them.
    """

    order = math.inf

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch

    def _lap(self) -> None:
        self._stopwatch.lap("other")

    on_fit_start = _lap
    on_epoch_start = _lap
    on_after_training_step = _lap
    on_update_end = _lap
    on_log = _lap
    on_evaluation_start = _lap
    on_evaluation_end = _lap
    on_save_model = _lap
    on_save_checkpoint = _lap
    on_epoch_end = _lap
