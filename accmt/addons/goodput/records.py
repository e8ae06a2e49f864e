"""`goodput.jsonl`: how a run spent its time, one JSON object per line.

There are three kinds of lines:

- `{"start": {"time", "step", "is_resumed", "host", "processes"}}` for each start; `time` is when the program
  began. It may also have `"price_per_hour"`.
- `{"time", "step", "seconds": {...}}`: seconds by bin since the line before, at least every ten seconds. It may also
  have `"joules"` of all GPUs; `"pauses"` and `"saves"`, the seconds for which checkpoints paused training and after
  which they were durable; `"lags"`, the seconds by which a process was slower than the others, by process and bin. The
  last line of a start has `"end"`: how it ended.
- `{"carried": {...}}` if a run continues on another disk: the sums up to its checkpoint.

Lines are never removed. A start that was killed has no `"end"`: what it did after its last line is unrecorded, and
lasted at most as long as lines are apart. The rest of the time until the next start, the run was stopped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accmt.errors import ArgumentError, explain, fail
from accmt.files import dumps, read_json_lines
from accmt.messages import warn

GOODPUT_FILE = "goodput.jsonl"
SECONDS_BETWEEN_LINES = 10.0

BINS = {
    "training": "training",
    "evaluating": "evaluating",
    "data": "waiting for data",
    "saving": "pausing for checkpoints and models",
    "starting": "starting",
    "resuming": "resuming",
    "remaking": "repeating lost steps",
    "unrecorded": "unrecorded before a kill",
    "stopped": "stopped",
}
"""Categories of time, and their names in tables."""

LAG_NAMES = {"data": "waiting for data", "forward": "in its training steps"}

_CLEAN = ("finished", "interrupted", "preempted", "restart")


@dataclass
class Totals:
    """The sums over the lines of a run.

    Attributes:
        seconds: By bin.
        began: When the first start began, in seconds since the epoch; None before it.
        last: The time of the last line.
        step: The furthest optimizer step.
        starts: The number of starts.
        resumes: The number of those that resumed from a checkpoint.
        failures: Starts that ended without saving what they had done: killed, or failed.
        is_open: Whether the last start has not ended, as far as the lines show.
        pauses: Number and sum of the pauses for checkpoints.
        saves: Number and sum of the seconds until a checkpoint was durable.
        lags: Seconds by which a process was slower than the mean of the others, by process and bin ("1 data").
        joules: Energy of all GPUs; 0 if it was not measured.
        price_per_hour: What an hour of all machines costs, as of the last start; None if the user has not set it.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BINS, 0.0))
    began: float | None = None
    last: float = 0.0
    step: int = 0
    starts: int = 0
    resumes: int = 0
    failures: int = 0
    is_open: bool = False
    pauses: tuple[int, float] = (0, 0.0)
    saves: tuple[int, float] = (0, 0.0)
    lags: dict[str, float] = field(default_factory=dict)
    joules: float = 0.0
    price_per_hour: float | None = None

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Totals:
        """Restore sums from `to_dict`."""
        return cls(**{**state, "pauses": tuple(state["pauses"]), "saves": tuple(state["saves"])})

    def to_dict(self) -> dict[str, Any]:
        """Return the sums as JSON values."""
        return asdict(self)

    @property
    def total_s(self) -> float:
        """All seconds since the run first began."""
        return sum(self.seconds.values())

    @property
    def running_s(self) -> float:
        """Seconds for which the run's machines were in use."""
        return self.total_s - self.seconds["stopped"]

    @property
    def goodput(self) -> float:
        """The fraction of all time that trained the model."""
        return self.seconds["training"] / (self.total_s or 1.0)

    @property
    def slowest(self) -> tuple[int, str, float] | None:
        """The process that was slower than the others for most seconds, in which bin, and for how many in all."""
        if not self.lags:
            return None
        of_processes: dict[str, float] = {}
        for key, seconds in self.lags.items():
            process = key.partition(" ")[0]
            of_processes[process] = of_processes.get(process, 0.0) + seconds
        process = max(of_processes, key=of_processes.__getitem__)
        bins = {key.partition(" ")[2]: s for key, s in self.lags.items() if key.partition(" ")[0] == process}
        return int(process), max(bins, key=bins.__getitem__), of_processes[process]

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line."""
        if "carried" in line:
            self.__dict__.update(vars(Totals.from_dict(line["carried"])))
        elif "start" in line:
            start = line["start"]
            if self.began is None:
                self.began = start["time"]
            else:
                gap = max(0.0, start["time"] - self.last)
                unrecorded = min(gap, SECONDS_BETWEEN_LINES) if self.is_open else 0.0
                self.seconds["unrecorded"] += unrecorded
                self.seconds["stopped"] += gap - unrecorded
                self.failures += self.is_open
            self.last = max(self.last, start["time"])
            self.starts += 1
            self.resumes += start["is_resumed"]
            self.price_per_hour = start.get("price_per_hour")
            self.is_open = True
        elif "seconds" in line:
            for name, seconds in line["seconds"].items():
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self.last, self.step = line["time"], max(self.step, line["step"])
            self.pauses = _plus(self.pauses, line.get("pauses", ()))
            self.saves = _plus(self.saves, line.get("saves", ()))
            self.joules += line.get("joules", 0.0)
            for key, seconds in line.get("lags", {}).items():
                self.lags[key] = self.lags.get(key, 0.0) + seconds
            if "end" in line:
                self.is_open = False
                self.failures += line["end"] not in _CLEAN

    def describe(self, price_per_hour: float | None = None) -> str:
        """Return a table of the bins, and what else is known, as text.

        Args:
            price_per_hour: What an hour of all machines of the run costs.
        """
        total = self.total_s or 1.0
        lines = [f"{'':<36}{'seconds':>14}{'share':>9}"]
        lines += [f"{BINS.get(name, name):<36}{s:>14,.1f}{s / total:>9.1%}" for name, s in self.seconds.items() if s]
        lines += [f"{'all':<36}{self.total_s:>14,.1f}{1:>9.1%}", "", *self.describe_facts(price_per_hour)]
        return "\n".join(lines)

    def describe_facts(self, price_per_hour: float | None = None) -> list[str]:
        """Return a line for each fact besides the table.

        Args:
            price_per_hour: What an hour of all machines of the run costs.
        """
        ending = f"{self.failures} of them failed or were killed" if self.failures else "none failed or was killed"
        lines = [f"starts: {self.starts}, {ending}; furthest step: {self.step:,}"]
        if self.pauses[0]:
            durable = f", durable after {_mean(self.saves):.3g} s" if self.saves[0] else ""
            lines.append(f"checkpoints: {self.pauses[0]}, each pauses training for {_mean(self.pauses):.3g} s{durable}")
        if self.slowest is not None:
            process, name, seconds = self.slowest
            where = LAG_NAMES.get(name, name)
            lines.append(
                f"slowest: process {process}, {seconds:,.1f} s slower than the mean of the others, mostly {where}"
            )
        if self.joules:
            lines.append(f"energy of the GPUs: {self.joules / 3.6e6:,.3g} kWh")
        if price_per_hour is not None:
            price = self.running_s / 3600 * price_per_hour
            of_training = self.seconds["training"] / 3600 * price_per_hour
            lines.append(f"price: {price:,.2f}, of which {of_training:,.2f} trained the model")
        return lines


def _plus(before: tuple[int, float], values: Any) -> tuple[int, float]:
    return before[0] + len(values), before[1] + sum(values)


def _mean(of: tuple[int, float]) -> float:
    return of[1] / of[0] if of[0] else 0.0


def read_goodput(folder: Path) -> Totals:
    """Read the records of a run folder; invalid lines are skipped.

    Raises:
        FileNotFoundError: There are none.
    """
    totals = Totals()
    for line in read_json_lines(folder / GOODPUT_FILE):
        with suppress(KeyError, TypeError, ValueError, AttributeError):  # of a line that was edited, or torn
            totals.add(line)
    return totals


def require_goodput(folder: Path) -> Totals:
    """Read the records of a run folder, for a command.

    Raises:
        ArgumentError: There are none.
    """
    try:
        return read_goodput(folder)
    except OSError as error:
        got = f"no {GOODPUT_FILE} in it" if folder.is_dir() else f"no such folder; you are in {Path.cwd()}"
        expected = "the folder of a run: logs/<track>/<run>"
        do = 'pass a run folder; a run records it with Trainer(monitor={"record_goodput": True})'
        raise fail(ArgumentError, f"accmt goodput {folder}", got=got, expected=expected, do=do) from error


class GoodputFile:
    """Appends lines. A full disk or an unwritable folder causes one warning, never an error.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / GOODPUT_FILE
        self._is_failing = False
        self._is_torn = self.path.is_file() and self.path.read_bytes()[-1:] not in (b"", b"\n")  # by a kill

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line, and pass it to the operating system."""
        text = ("\n" if self._is_torn else "") + dumps(dict(line)) + "\n"
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._is_torn = os.write(file, text.encode()) < len(text.encode())
            finally:
                os.close(file)
        except OSError as error:
            if not self._is_failing:
                expected = "a writable file; training continues without it"
                warn(explain(str(self.path), str(error), expected, "free disk space, or make the run folder writable"))
            self._is_failing = True
