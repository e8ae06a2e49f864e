"""Reads a run folder for a report: curves, evaluations, configuration and events."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accmt.addons.flight_recorder.ledger import LEDGER_FILE
from accmt.addons.fork.lineage import read_origin
from accmt.addons.goodput.records import Totals, read_goodput
from accmt.errors import ArgumentError, fail
from accmt.secrets import hide
from accmt.tracking.history import HISTORY_FILE, read_history
from accmt.tracking.values import HIGHER_IS_BETTER, LOWER_IS_BETTER, Media, flatten

CHECKPOINT = "checkpoint"
SPLIT_PREFIX = "seconds_"


@dataclass
class Curve:
    steps: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Event:
    """Something that happened to a run.

    Attributes:
        kind: "started", "checkpoint", "resumed", "finished", "failed", "interrupted" (Ctrl-C), "preempted" or
            "killed".
    """

    kind: str
    step: int
    time_s: float


@dataclass(frozen=True)
class RunRecord:
    """What a run folder holds; of a fork, from the step on at which it differs from its parent.

    Attributes:
        began: When the run first started, in seconds since the epoch.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    curves: dict[str, Curve]
    evaluations: list[tuple[int, dict[str, float]]]
    events: list[Event]
    images: dict[str, list[Media]] = field(default_factory=dict)
    tables: dict[str, list[Media]] = field(default_factory=dict)
    goodput: Totals | None = None
    began: float = 0.0

    @property
    def status(self) -> str:
        """How the run ended, or "running" if it has no final status."""
        return self.events[-1].kind if self.events[-1].kind in _ENDINGS else "running"

    @property
    def replay_command(self) -> str | None:
        """The command that replays a step, without its number; None if the run has no ledger."""
        has_ledger = (self.folder / LEDGER_FILE).is_file()
        return f"accmt replay {shlex.quote(str(self.folder))} --step " if has_ledger else None

    @property
    def num_steps(self) -> int:
        """The last step with logged values."""
        return max((curve.steps[-1] for curve in self.curves.values()), default=0)

    @property
    def duration_s(self) -> float:
        """Seconds from the first to the last row, including pauses between attempts."""
        last = max((curve.times_s[-1] for curve in self.curves.values()), default=0.0)
        return max(last, self.events[-1].time_s)

    @property
    def best(self) -> dict[str, tuple[int, float]]:
        """The step and value of each best result, for metrics with a known direction.

        Of several validation sets, the mean is a result, too: models are saved by it.
        """
        best: dict[str, tuple[int, float]] = {}
        for step, values in self.evaluations:
            for name, value in {**_means_of_sets(values), **values}.items():
                sign = _sign_of(name, self.config)
                if sign and math.isfinite(value) and (name not in best or sign * value > sign * best[name][1]):
                    best[name] = step, value
        return best

    @property
    def seconds_by_purpose(self) -> dict[str, float]:
        """Time per phase, as far as the monitor measured it."""
        names = [name for name in self.curves if name.startswith(SPLIT_PREFIX)]
        return {name.removeprefix(SPLIT_PREFIX): sum(self.curves[name].values) for name in names}


def _means_of_sets(values: Mapping[str, float]) -> dict[str, float]:
    of_sets: dict[str, list[float]] = {}
    for name, value in values.items():
        base, separator, _ = name.partition("__")
        if separator:
            of_sets.setdefault(base, []).append(value)
    return {base: math.fsum(each) / len(each) for base, each in of_sets.items()}


def _sign_of(name: str, config: Mapping[str, Any]) -> int:
    """Return 1 if higher is better, -1 if lower is better, 0 if unknown; custom metrics are in the configuration."""
    from accmt.saving.selection import METRIC_NAMES

    base = name.split("__")[0]
    declared = {HIGHER_IS_BETTER: 1, LOWER_IS_BETTER: -1}.get(str(config.get(f"metrics.{base}")))
    if declared is not None:
        return declared
    if "loss" in base:
        return -1
    return 0 if base not in METRIC_NAMES else -1 if base in ("cer", "mae", "mse", "perplexity", "rmse", "wer") else 1


def name_apart(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs with readable unique names: those named by time get the project and the time.

    If the runs differ in one or two entries of their configuration, these are added.
    """
    named = list(runs)
    for index, run in enumerate(runs):
        if time := _NAMED_BY_TIME.fullmatch(run.name):
            project = run.folder.resolve().parent.name
            named[index] = replace(run, name=f"{project} {time[1]} {time[2].replace('-', ':')}")
    keys = list(dict.fromkeys(key for run in runs for key in run.config if key not in _SAYS_NOTHING))
    different = [key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1]
    if 1 <= len(different) <= 2:
        named = [replace(run, name=f"{run.name}, {_describe(run, different)}") for run in named]
    return named if len({run.name for run in named}) == len(runs) else list(runs)


def _describe(run: RunRecord, keys: Sequence[str]) -> str:
    return ", ".join(f"{key} {run.config.get(key, '-')}" for key in keys)


_NAMED_BY_TIME = re.compile(r"\d{4}-(\d\d-\d\d)_(\d\d-\d\d-\d\d)-\w+")
_SAYS_NOTHING = ("model_path", "seed", "fork.parent", "fork.step")
_ENDINGS = ("finished", "failed", "interrupted", "killed", "preempted")


def read_run(folder: Path) -> RunRecord:
    """Read a run folder; the run may still be running."""
    if not (folder / HISTORY_FILE).is_file():
        got, do = f"no {HISTORY_FILE} in it", "pass a run folder: <logging_dir>/<track_name>/<run_name>"
        raise fail(ArgumentError, str(folder), got=got, expected="the folder of a run", do=do)
    rows = read_history(folder)
    if not rows:
        raise fail(
            ArgumentError,
            str(folder),
            got=f"an empty {HISTORY_FILE}",
            expected="a run that has started",
            do="wait for it",
        )
    start = rows[0]["time"]
    origin = read_origin(folder)
    first = 0 if origin is None else origin.step
    logged = [row for row in rows if "values" in row and row["step"] >= first]
    config: dict[str, Any] = next((row["config"] for row in reversed(rows) if "config" in row), {})
    logged_media: dict[str, dict[str, list[Media]]] = {"images": {}, "table": {}, "artifact": {}}
    for media in (Media.of_line(folder, row) for row in rows if "media" in row):
        logged_media[media.kind].setdefault(media.name, []).append(media)
    curves: dict[str, Curve] = {}
    for row in logged:
        for name, value in row["values"].items():
            if name != CHECKPOINT:
                curve = curves.setdefault(name, Curve())
                curve.steps.append(row["step"])
                curve.times_s.append(row["time"] - start)
                curve.values.append(float(value))
    goodput = None
    with suppress(OSError):
        goodput = read_goodput(folder)
    return RunRecord(
        name=folder.resolve().name,
        folder=folder,
        config=dict(flatten(hide(config))),
        curves=curves,
        evaluations=_read_evaluations(logged),
        events=_read_events(read_history(folder, include_superseded=True), start),
        images=logged_media["images"],
        tables=logged_media["table"],
        goodput=goodput,
        began=start,
    )


def _read_evaluations(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    """Return the rows of evaluations: those with a validation loss, or without one, all that are not training rows."""
    has_loss = any(name.startswith("val") for row in rows for name in row["values"])
    counts = Counter(name for row in rows for name in row["values"])
    training = "train_loss" if "train_loss" in counts else next(iter(counts), None)

    def is_evaluation(values: Mapping[str, float]) -> bool:
        if has_loss:
            return any(name.startswith("val") for name in values)
        return training not in values and CHECKPOINT not in values

    return [(row["step"], dict(row["values"])) for row in rows if is_evaluation(row["values"])]


def _read_events(rows: list[dict[str, Any]], start: float) -> list[Event]:
    events: list[Event] = [Event("started", 0, 0.0)]
    step = 0
    for row in rows:
        step = (row["rewind"]["step"] or 0) if "rewind" in row else row.get("step", step)
        name = "checkpoint" if CHECKPOINT in row.get("values", {}) else None
        if "rewind" in row:
            name = "resumed"
        elif "status" in row:
            name = str(row.get("how", row["status"])).lower()
        if name is not None:
            events.append(Event(name, step, row["time"] - start))
    return events
