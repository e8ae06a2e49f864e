"""Simulate training on spot machines: how good is the interval that `checkpoint_every="auto"` chooses?

    python tests/benchmarks/simulate_spot.py [--schedules 20]

Each schedule draws when machines vanish, how fast steps are, and what a checkpoint, a save and a restart cost. A run
trains on it with accmt's own clock, record and pacer, of which only the time is simulated: what it records is read back
and added up by the code of `accmt goodput`. Two things are compared:

- the goodput that the run predicted with what its record shows, of the time that machines ran, in percentage points;
- the goodput of "auto" with that of each fixed interval of a grid on the same schedule, in percent of the best.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

from accmt.addons.goodput.pace import FIRST_S, Costs, Pacer
from accmt.addons.goodput.recorder import Meter
from accmt.addons.goodput.records import SECONDS_BETWEEN_LINES, GoodputFile, Totals, read_goodput

HOURS = 48.0
GRID_S = (30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0)


@dataclass(frozen=True)
class Schedule:
    """What happens to a run.

    Attributes:
        lives_s: For how long each machine lives, in turn.
        gaps_s: For how long the run waits for the next machine.
        step_s: The duration of a step.
        pause_s: For how long training pauses for a checkpoint.
        save_s: How long it takes until the checkpoint is durable.
        restart_s: From the start of the program until it trains.
    """

    lives_s: list[float]
    gaps_s: list[float]
    step_s: float
    pause_s: float
    save_s: float
    restart_s: float


def draw(seed: int) -> Schedule:
    """Draw a schedule: machines live 30 minutes to 12 hours on average."""
    draws = random.Random(seed)  # noqa: S311 - no secret
    mean_s = 3600 * draws.choice([0.5, 1, 2, 4, 12])
    number = int(2 * HOURS * 3600 / mean_s) + 10
    pause_s = draws.choice([0.2, 1.0, 5.0, 15.0])
    return Schedule(
        lives_s=[draws.expovariate(1 / mean_s) for _ in range(number)],
        gaps_s=[draws.uniform(30, 600) for _ in range(number)],
        step_s=draws.choice([0.5, 2.0, 6.0]),
        pause_s=pause_s,
        save_s=pause_s + draws.choice([1.0, 10.0, 40.0]),
        restart_s=draws.choice([20.0, 60.0, 180.0]),
    )


class Simulation:
    """A run on a schedule; everything but the time is accmt's own.

    Args:
        schedule: What happens to it.
        folder: The run folder.
        fixed_s: The interval between checkpoints; None is "auto".

    Attributes:
        now: The simulated time in seconds.
        done: Optimizer steps done.
        predictions: The goodput that "auto" predicted at each checkpoint.
    """

    def __init__(self, schedule: Schedule, folder: Path, fixed_s: float | None) -> None:
        self.now = 0.0
        self.done = 0
        self.predictions: list[float] = []
        self._schedule = schedule
        self._folder = folder
        self._file = GoodputFile(folder)
        self._fixed_s = fixed_s
        self._totals = Totals()
        self._durable = 0
        self._in_flight = (0.0, 0)  # when the newest checkpoint is durable, and its step
        self._written: dict[str, float] = {}

    def run(self) -> Totals:
        """Train until the schedule ends, and return what was recorded."""
        for life_s, gap_s in zip(self._schedule.lives_s, self._schedule.gaps_s, strict=True):
            if self.now > HOURS * 3600:
                break
            death = self.now + life_s
            self._live_until(death)
            self._settle(death)
            self.now = death + gap_s
        return read_goodput(self._folder)

    def _live_until(self, death: float) -> None:
        """Start from the newest durable checkpoint, and train until the machine vanishes."""
        schedule = self._schedule
        self.done, self._in_flight, self._written = self._durable, (0.0, self._durable), {}
        self._meter = meter = Meter("resuming" if self._totals.starts else "starting", clock=lambda: self.now)
        start = {"time": self.now, "step": self.done, "is_resumed": bool(self._totals.starts)}
        furthest = self._totals.step
        self._add({"start": start})
        self.now += schedule.restart_s
        if self.now >= death:
            return
        if self.done < furthest:
            meter.are_lost = lambda: self.done < furthest
        meter.switch("training")
        pacer = Pacer(self._choose(), self.done, lambda: self.now)
        next_step = self.done + 1
        while self.now + schedule.step_s < death:
            last = death - SECONDS_BETWEEN_LINES if self.now < death - SECONDS_BETWEEN_LINES else death
            steps = min(next_step - self.done, max(1, int((last - self.now) / schedule.step_s)))
            steps = steps if meter.are_lost is None else min(steps, furthest - self.done)
            self.now, self.done = self.now + steps * schedule.step_s, self.done + steps
            if meter.are_lost is not None and not meter.are_lost():
                meter.are_lost = None
                meter.switch("training")
            self._write()
            if self.done == next_step:
                is_due, next_step = pacer.decide(self.done)
                if is_due and not self._save(death):
                    return
                if is_due:
                    pacer.interval_s = self._choose()
                    pacer.begin_again()

    def _save(self, death: float) -> bool:
        """Pause for a checkpoint, once the one before is durable; return whether the machine is still there."""
        schedule = self._schedule
        waited_s = max(0.0, self._in_flight[0] - self.now)
        if self.now + waited_s + schedule.pause_s >= death:
            return False
        self._settle(self.now + waited_s)
        self._in_flight = self.now + waited_s + schedule.save_s, self.done
        with self._meter.during("saving"):
            self.now += waited_s + schedule.pause_s
        self._write(pauses=[waited_s + schedule.pause_s], saves=[schedule.save_s])
        return True

    def _settle(self, now: float) -> None:
        if now >= self._in_flight[0]:
            self._durable = self._in_flight[1]

    def _choose(self) -> float:
        costs = Costs.of(self._totals)
        interval_s = self._fixed_s or (FIRST_S if costs is None else costs.best_interval())
        if costs is not None:
            self.predictions.append(costs.goodput(interval_s))
        return interval_s

    def _write(self, **more: object) -> None:
        seconds = self._meter.read()
        passed = {name: total - self._written.get(name, 0.0) for name, total in seconds.items()}
        self._written = seconds
        self._add({"time": self.now, "step": self.done, "seconds": passed, **more})

    def _add(self, line: dict[str, object]) -> None:
        self._file.add(line)
        self._totals.add(line)


def train(schedule: Schedule, fixed_s: float | None = None) -> tuple[Totals, float]:
    """Return what a run recorded, and the last goodput that it predicted."""
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(schedule, Path(folder), fixed_s)
        totals = simulation.run()
    return totals, simulation.predictions[-1]


def measure(totals: Totals) -> float:
    """Return the fraction of the time that machines ran that trained the model and was not lost."""
    return totals.seconds["training"] / totals.running_s


def main() -> None:
    """Print a table, and the largest differences."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schedules", type=int, default=20)
    worst_prediction = worst_interval = 0.0
    print("schedule  failures  pause   save  restart  predicted  measured  best of the grid")
    for seed in range(parser.parse_args().schedules):
        schedule = draw(seed)
        totals, predicted = train(schedule)
        measured = measure(totals)
        grid = {interval_s: measure(train(schedule, interval_s)[0]) for interval_s in GRID_S}
        best_s = max(grid, key=grid.__getitem__)
        worst_prediction = max(worst_prediction, abs(predicted - measured))
        worst_interval = max(worst_interval, 1 - measured / grid[best_s])
        print(
            f"{seed:8}  {totals.failures:8}  {schedule.pause_s:5.1f}  {schedule.save_s:5.1f}  "
            f"{schedule.restart_s:7.0f}  {predicted:9.1%}  {measured:8.1%}  {grid[best_s]:.1%} at {best_s:g} s",
            flush=True,
        )
    print(f"largest difference between predicted and measured: {100 * worst_prediction:.1f} points")
    print(f"auto is at most {worst_interval:.1%} below the best of the grid")


if __name__ == "__main__":
    main()
