"""Checkpoints by time: `checkpoint_every="10 minutes"`, and "auto", the interval at which least time is lost.

The main process decides when one is due, by its clock. The processes communicate about it only at a few steps that they
all know. At each, the main process says whether to save now, and what the next such step is: at the present speed, an
eighth of the interval ahead, or half of what is left. That makes about a dozen tiny messages between two checkpoints,
however short the steps are.

Saving often costs the pauses; saving rarely, the steps since the last checkpoint at each failure. Both together are
least where the interval is sqrt(2 * pause * (mean time between failures + restart)).

Source: J. W. Young, "A first order approximation to the optimum checkpoint interval" (1974), and J. T. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps" (2006), https://doi.org/10.1016/j.future.2004.11.016
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from accmt.addons.goodput.recorder import GoodputRecorder
from accmt.addons.goodput.records import Totals
from accmt.messages import say
from accmt.processes import broadcast_object, is_main_process
from accmt.run import EvaluationRun, Run
from accmt.run.features import Activity, Feature

FIRST_S = 60.0
"""The interval as long as no checkpoint was measured."""

LEAST_S, MOST_S = 30.0, 3600.0

_PRIOR_S = 3 * 3600.0
"""Before anything is known, one failure in three hours is assumed: it counts like one that was seen in such a time."""

_CHANGE = 0.2
_EXACT, _AHEAD = 0.05, 0.25


@dataclass(frozen=True)
class Costs:
    """What checkpoints and failures cost, in seconds.

    Attributes:
        pause_s: Training pauses for a checkpoint.
        save_s: From its beginning, until it is durable.
        restart_s: From the start of the program, until it trains.
        mtbf_s: The mean time between failures that lose steps.
        failures: How many such failures there were.
    """

    pause_s: float
    save_s: float
    restart_s: float
    mtbf_s: float
    failures: int

    @classmethod
    def of(cls, totals: Totals) -> Costs | None:
        """Return the means of what was measured; None before the first checkpoint."""
        if not totals.pauses[0]:
            return None
        pause_s = totals.pauses[1] / totals.pauses[0]
        starting = totals.seconds["starting"], totals.starts - totals.resumes
        resuming = totals.seconds["resuming"], totals.resumes
        seconds, number = resuming if totals.resumes else starting
        return cls(
            pause_s=pause_s,
            save_s=totals.saves[1] / totals.saves[0] if totals.saves[0] else pause_s,
            restart_s=seconds / max(1, number),
            mtbf_s=(totals.running_s + _PRIOR_S) / (totals.failures + 1),
            failures=totals.failures,
        )

    def best_interval(self) -> float:
        """Return the interval between checkpoints at which least time is lost, within bounds.

        A checkpoint has to be durable before the next one begins.
        """
        best = math.sqrt(2 * self.pause_s * (self.mtbf_s + self.restart_s))
        return min(max(best, self.save_s, LEAST_S), max(MOST_S, self.save_s))

    def goodput(self, interval_s: float) -> float:
        """Return the expected fraction of running time that trains the model, if failures come at random.

        That is Daly's exact solution, and what is lost because a checkpoint helps only once it is durable.
        """
        mtbf_s = self.mtbf_s
        cycle_s = (
            mtbf_s
            * math.exp(min(self.restart_s / mtbf_s, 100))
            * math.expm1(min((interval_s + self.pause_s) / mtbf_s, 500))
        )
        return interval_s / cycle_s * max(0.0, 1 - self.save_s / mtbf_s)

    def describe(self, interval_s: float) -> str:
        """Return an interval and the reasons for it as a message."""
        return (
            f"every {interval_s:,.0f} s. A checkpoint pauses training for {self.pause_s:.3g} s and is durable after "
            f"{self.save_s:.3g} s; a restart takes {self.restart_s:,.3g} s; {self.failures} failures so far, "
            f"which gives an estimate of one per {self.mtbf_s / 60:,.0f} minutes. Expected goodput: "
            f"{self.goodput(interval_s):.1%} of the running time"
        )


class Pacer:
    """Decides on the main process when a checkpoint is due, and at which step to decide next.

    Args:
        interval_s: Seconds between checkpoints.
        step: The current optimizer step.
        clock: Returns the time in seconds.
    """

    def __init__(self, interval_s: float, step: int, clock: Callable[[], float] = perf_counter) -> None:
        self.interval_s = interval_s
        self._clock = clock
        self._since = self._looked = clock()
        self._looked_step = step

    def decide(self, step: int) -> tuple[bool, int]:
        """Return whether a checkpoint is due after a step, and the next step at which to ask."""
        now = self._clock()
        step_s = (now - self._looked) / max(1, step - self._looked_step)
        self._looked, self._looked_step = now, step
        left_s = self._since + self.interval_s - now
        if left_s <= step_s / 2:
            return True, step + 1
        ahead_s = left_s if left_s <= _EXACT * self.interval_s else min(left_s, _AHEAD * self.interval_s) / 2
        return False, step + max(1, int(min(ahead_s / step_s, 1e9)) if step_s > 0 else 1)

    def begin_again(self) -> None:
        """Count the interval from now on: a checkpoint was written."""
        self._since = self._clock()


class TimedCheckpoints(Feature):
    """Requests a checkpoint whenever its time has come."""

    name = "timed_checkpoints"

    def __init__(self, run: Run, interval_s: float | None) -> None:
        self._run = run
        self._fixed_s = interval_s
        self._pacer: Pacer | None = None
        self._recorder: GoodputRecorder | None = None
        self._next_step = 0

    @classmethod
    def for_run(cls, run: EvaluationRun) -> TimedCheckpoints | None:
        every = run.settings.checkpoints.every
        if every is None or every.unit not in ("second", "auto") or not isinstance(run, Run):
            return None
        return cls(run, None if every.unit == "auto" else float(every.number))

    def on_training_start(self) -> None:
        step = self._run.state.global_step
        self._next_step = step + 1
        if is_main_process():
            self._pacer = Pacer(FIRST_S if self._fixed_s is None else self._fixed_s, step)
            found = (one for one in self._run.features.all if isinstance(one, GoodputRecorder))
            self._recorder = next(found) if self._fixed_s is None else None
            self._choose()

    def is_checkpoint_due(self) -> bool:
        step = self._run.state.global_step
        if step < self._next_step:
            return False
        is_due, self._next_step = broadcast_object((False, 0) if self._pacer is None else self._pacer.decide(step))
        return is_due

    @contextmanager
    def during_activity(self, activity: Activity) -> Iterator[None]:
        yield
        if activity == "checkpoint" and self._pacer is not None:
            self._choose()
            self._pacer.begin_again()

    def _choose(self) -> None:
        """Choose the interval again from what was measured so far, and log it if it has changed."""
        recorder, pacer = self._recorder, self._pacer
        if recorder is None or pacer is None:
            return
        recorder.write()
        costs = Costs.of(recorder.totals)
        if costs is None:
            say(f'checkpoint_every="auto": the first checkpoint after {FIRST_S:g} s of training, to measure it')
            return
        interval_s = costs.best_interval()
        if abs(interval_s - pacer.interval_s) > _CHANGE * pacer.interval_s or pacer.interval_s == FIRST_S:
            pacer.interval_s = interval_s
            say(f'checkpoint_every="auto": {costs.describe(interval_s)}')
