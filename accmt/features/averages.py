"""Averages of the weights, in the place of the weights themselves where these are evaluated or saved."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from accmt.callbacks.averaging import WeightAverage, using_average
from accmt.features.hooks import Feature
from accmt.run import EvaluationRun, Run


class Averages(Feature):
    """Lets a run that trains save the averages at its end; evaluations in it are a matter of the callbacks."""

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
        """Give the model its trained weights back where an evaluation of their average was interrupted."""
        for average in self._averages:
            if average.is_in_place:
                average.on_fit_end()


class EvaluatedAverages(Averages):
    """Lets an evaluation without training, or between its steps, have the averages."""

    def during(self) -> AbstractContextManager[None]:
        return using_average(self._averages)
