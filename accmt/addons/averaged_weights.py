"""Evaluates or saves weight averages instead of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from accmt.addons.averaging import WeightAverage, using_average
from accmt.run import EvaluationRun, Run
from accmt.run.features import Feature


class Averages(Feature):
    """Saves the averages at the end of a training run; the callbacks handle its evaluations."""

    name = "averages"

    def __init__(self, averages: Sequence[WeightAverage]) -> None:
        self._averages = averages

    @classmethod
    def for_run(cls, run: EvaluationRun) -> Averages | None:
        averages = [callback for callback in run.callbacks if isinstance(callback, WeightAverage)]
        kind = Averages if isinstance(run, Run) else EvaluatedAverages
        return kind(averages) if averages else None

    def saving_last(self) -> AbstractContextManager[None]:
        return using_average(self._averages)

    def before_emergency_checkpoint(self) -> None:
        """Restore the trained weights if an evaluation of their average was interrupted."""
        for average in self._averages:
            if average.is_in_place:
                average.on_fit_end()


class EvaluatedAverages(Averages):
    """Uses the averages in an evaluation outside the training loop."""

    def during(self) -> AbstractContextManager[None]:
        return using_average(self._averages)
