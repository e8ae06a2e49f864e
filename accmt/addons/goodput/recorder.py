"""Records in `goodput.jsonl` how a run spends its time.

The main process keeps the clock and writes the lines; a thread does so every ten seconds, also while the main thread is
busy for long. Several processes exchange two numbers each with every log row, which needs no further communication: for
how long they waited for data, and for how long their training steps ran until the loss was there. After that they wait
for one another, so these two show which one the others waited for.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from accmt.addons.goodput.records import SECONDS_BETWEEN_LINES, GoodputFile, Totals, read_goodput
from accmt.callbacks.progress import is_notebook
from accmt.checkpoint.manifest import STEP
from accmt.files import current_folder
from accmt.metrics.averages import Rider
from accmt.processes import is_main_process, num_processes
from accmt.run import EvaluationRun, Run
from accmt.run.features import Activity, Feature

if TYPE_CHECKING:
    from accmt.data import Window
    from accmt.module import AcceleratorModule
    from accmt.options import Settings
    from accmt.run.restart import Recovery

_DIGITS = 6


class Meter:
    """A clock that adds up the seconds of one start of a run by bin: at any time, exactly one bin is counting.

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
            if have_parts and item.num_units > 1:
                item = item._replace(units=self._waits(iter(item.units), have_parts=False))
            yield item


class GoodputRecorder(Feature):
    """Keeps the clock of one process; on the main process, it writes the lines.

    Attributes:
        meter: The clock.
        totals: The sums over all starts, up to the last line.
    """

    name = "goodput"
    _fit_began: float | None = None
    _is_first_fit = True
    _left: tuple[Recovery, float] | None = None  # a run that another one continues in the same fit, and when it ended

    def __init__(self, run: Run) -> None:
        self._run = run
        self.meter = Meter("resuming" if run.is_resumed else "starting", began=self._find_beginning(run.recovery))
        self._began = time.time() - (perf_counter() - self.meter.since)
        self.totals = Totals()
        self._resumed: Totals | None = None
        self._file: GoodputFile | None = None
        self._lock = threading.Lock()
        self._written: dict[str, float] = {}
        self._pauses: list[float] = []
        self._saves: list[float] = []
        self._saving_since: dict[int, list[float]] = {}  # by step: the last one may be written twice
        self._lags: dict[str, float] = {}
        self._lag: tuple[int, float] | None = None
        self._read_energy: Callable[[], float] | None = None
        self._joules = self._joules_sent = self._joules_of_all = 0.0
        self._is_leaving = False
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def for_run(cls, run: EvaluationRun) -> GoodputRecorder | None:
        settings, monitor = run.settings, run.settings.tracking.monitored
        every = settings.checkpoints.every
        is_on = monitor.record_goodput or monitor.goodput or monitor.price_per_hour is not None
        paces = every is not None and every.unit == "auto"
        if not (is_on or paces) or not isinstance(run, Run) or settings.running.fast_dev_run:
            return None
        return cls(run) if num_processes() == 1 else _OfSeveralProcesses(run)

    @classmethod
    def check(cls, settings: Settings, module: AcceleratorModule, train_data: Any) -> None:
        """Note when `fit` begins."""
        GoodputRecorder._fit_began = perf_counter()

    @staticmethod
    def _find_beginning(recovery: Recovery) -> float:
        """Return when this start began: with the program, unless that has done something else before."""
        kind = GoodputRecorder
        left, kind._left = kind._left, None
        if left is not None and left[0] is recovery:
            return left[1]
        is_first, kind._is_first_fit = kind._is_first_fit, False
        if is_first and not (is_notebook() or hasattr(sys, "ps1")):
            import psutil

            return perf_counter() - max(0.0, time.time() - psutil.Process().create_time())
        return perf_counter() if kind._fit_began is None else kind._fit_began

    # ---- The start and the end

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = Totals.from_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums up to here, with which the run can continue on another disk."""
        if self._file is None:
            return {}
        self.write()
        return replace(self.totals, is_open=not self._is_leaving).to_dict()

    def before_emergency_checkpoint(self) -> None:
        """Note that this start loses nothing."""
        self._is_leaving = True

    def on_start(self) -> None:
        """Write that the run has started, and find the steps that it makes again."""
        self._read_energy = _find_energy_counter(self._run.device)
        if self._read_energy is not None:
            self._joules_sent = self._joules = self._read_energy()
        if is_main_process():
            self._open(current_folder() / self._run.tracking.run_folder)
        if self._file is not None or self._read_energy is not None:
            self._thread = threading.Thread(target=self._keep_writing, name="accmt-goodput", daemon=True)
            self._thread.start()

    def _open(self, folder: Path) -> None:
        state = self._run.state
        file = GoodputFile(folder)
        with suppress(OSError):
            self.totals = read_goodput(folder)
        resumed = None if self._run.checkpoints.began_elsewhere else self._resumed  # a branch is a run of its own
        if resumed is not None and resumed.last > self.totals.last:  # the lines are on a disk that is gone
            self._add(file, {"carried": resumed.to_dict()})
        start: dict[str, Any] = {
            "time": max(self._began, self.totals.last),
            "step": state.global_step,
            "is_resumed": self._run.is_resumed,
            "host": socket.gethostname(),
            "processes": num_processes(),
        }
        if (price := self._run.settings.tracking.monitored.price_per_hour) is not None:
            start["price_per_hour"] = price
        overlap = max(0.0, self.totals.last - self._began)  # this program began before another start of the run ended
        self._written = {name: min(overlap, seconds) for name, seconds in self.meter.read().items()}
        self._add(file, {"start": start})
        furthest = self.totals.step
        if state.global_step < furthest:
            self.meter.are_lost = lambda: state.global_step < furthest
        self._file = file

    def on_end(self, error: BaseException | None) -> None:
        """From here on, the run waits for what it has saved."""
        self.meter.switch("saving")

    @contextmanager
    def during(self) -> Iterator[None]:
        is_restart = False
        try:
            yield
            is_restart = self._run.recovery.checkpoint is not None  # another run continues from it at once
        finally:
            if is_restart:
                GoodputRecorder._left = self._run.recovery, self.meter.clock()
            self._is_over.set()
            if self._thread is not None:
                self._thread.join()
            self.write(end="restart" if is_restart else self._run.state.status)
            self._file = None

    # ---- What a run does

    def reading(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Measure for how long training waits for the windows, and for the micro-batches in them."""
        return self.meter.waits_for_windows(windows)

    @contextmanager
    def during_activity(self, activity: Activity) -> Iterator[None]:
        began = self.meter.clock()
        if activity == "checkpoint":
            self._saving_since.setdefault(self._run.state.global_step, []).append(began)
        with self.meter.during("saving" if activity == "checkpoint" else activity):
            yield
            if activity == "data":
                self.meter.waited_s += self.meter.clock() - began
        if activity == "checkpoint":
            self._pauses.append(self.meter.clock() - began)

    def on_checkpoint(self, folder: Path) -> None:
        """Measure how long it took until a checkpoint was durable."""
        found = STEP.fullmatch(folder.name)
        began = self._saving_since.get(int(found[1])) if found else None
        if began:
            self._saves.append(self.meter.clock() - began.pop(0))

    # ---- Lines and rows

    def write(self, end: str | None = None) -> None:
        """Write a line about the time since the last one; does nothing before the start and on other processes."""
        if self._file is None:
            return
        with self._lock:
            if self._read_energy is not None and num_processes() == 1:
                self._joules = self._read_energy()
                self._joules_of_all += self._take_joules()
            seconds = {name: round(s - self._written.get(name, 0.0), _DIGITS) for name, s in self.meter.read().items()}
            for name, passed in seconds.items():
                self._written[name] = self._written.get(name, 0.0) + passed
            line: dict[str, Any] = {
                "time": self._began + sum(self._written.values()),
                "step": self._run.state.global_step,
            }
            line["seconds"] = {name: passed for name, passed in seconds.items() if passed}
            pauses, self._pauses = self._pauses, []
            saves, self._saves = self._saves, []
            lags, self._lags = self._lags, {}
            joules, self._joules_of_all = self._joules_of_all, 0.0
            measured = {
                "pauses": [round(pause, _DIGITS) for pause in pauses],
                "saves": [round(save, _DIGITS) for save in saves],
                "lags": {key: round(lag, _DIGITS) for key, lag in lags.items()},
                "joules": round(joules, _DIGITS),
                "end": end,
            }
            self._add(self._file, {**line, **{name: value for name, value in measured.items() if value}})

    def _add(self, file: GoodputFile, line: dict[str, Any]) -> None:
        file.add(line)
        self.totals.add(line)

    def _keep_writing(self) -> None:
        while not self._is_over.wait(SECONDS_BETWEEN_LINES):
            if self._read_energy is not None:
                self._joules = self._read_energy()
            self.write()

    def _take_joules(self) -> float:
        passed, self._joules_sent = self._joules - self._joules_sent, self._joules
        return passed

    def add_to_row(self, row: dict[str, float]) -> None:
        """Add fractions of the time so far, if the monitor selects them."""
        if self._file is None or not self._run.settings.tracking.monitored.goodput:
            return
        seconds = dict(self.totals.seconds)
        for name, passed in self.meter.read().items():
            seconds[name] += passed - self._written.get(name, 0.0)
        total = sum(seconds.values())
        row["goodput"] = seconds["training"] / total
        row["goodput_overhead"] = (seconds["data"] + seconds["evaluating"] + seconds["saving"]) / total
        row["goodput_lost"] = 1 - row["goodput"] - row["goodput_overhead"]
        if self._lag is not None:
            row["slowest_process"], row["slowest_process_s"] = self._lag


class _OfSeveralProcesses(GoodputRecorder):
    """Also finds the slowest process; on one process, this would only cost time."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._forward_s = 0.0
        self._before = (0.0, 0.0)

    def after_forward(self, outputs: Any) -> None:
        self._forward_s += self.meter.clock() - self.meter.since

    def exchange(self) -> Rider:
        now = self.meter.waited_s, self._forward_s
        passed = [after - before for after, before in zip(now, self._before, strict=True)]
        self._before = now
        return Rider((*passed, self._take_joules()), self._compare)

    def _compare(self, every: list[tuple[float, ...]]) -> None:
        self._joules_of_all += sum(joules for *_, joules in every)
        process, of_bins = find_slowest([numbers[:2] for numbers in every])
        self._lag = process, sum(of_bins)
        for name, seconds in zip(("data", "forward"), of_bins, strict=True):
            key = f"{process} {name}"
            self._lags[key] = self._lags.get(key, 0.0) + seconds


def find_slowest(every: list[tuple[float, ...]]) -> tuple[int, tuple[float, ...]]:
    """Return the process with most seconds in all, and how many more it has in each bin than the mean of the others."""
    slowest = max(range(len(every)), key=lambda index: sum(every[index]))
    others = [numbers for index, numbers in enumerate(every) if index != slowest]
    means = [sum(of_bin) / len(others) for of_bin in zip(*others, strict=True)]
    return slowest, tuple(own - mean for own, mean in zip(every[slowest], means, strict=True))


def _find_energy_counter(device: torch.device) -> Callable[[], float] | None:
    """Return a function for the joules that this process's GPU has used since a fixed time; None if nothing counts."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        gpu = pynvml.nvmlDeviceGetHandleByUUID(identity)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    except pynvml.NVMLError:  # a GPU without such a counter, or a container without access to it
        return None

    joules = 0.0

    def read() -> float:
        nonlocal joules
        with suppress(pynvml.NVMLError):  # then it is as it was
            joules = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000
        return joules

    return read
