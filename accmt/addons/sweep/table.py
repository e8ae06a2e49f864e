"""What came of a sweep, and how it is shown in the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accmt.messages import say, speaking

_SHOWN_LIVE = 12


@dataclass(frozen=True)
class TrialResult:
    """A trial of a sweep.

    Attributes:
        number: Its number, from 0.
        state: "complete", "pruned", "diverged", "failed", "paused" or "running".
        values: What it set, by key.
        objectives: The objectives of the evaluation that counts, by name; empty without one.
        step: The optimizer step of that evaluation.
        steps: The optimizer steps of the trial.
        seconds: How long it trained.
        folder: Its folder, with `hps.yaml`, `output.log`, `checkpoints` and `model`.
        model: Its model folder; None if nothing was saved.
        error: Why it failed.
        parent: In a population, the trial that it was forked from.
    """

    number: int
    state: str
    values: Mapping[str, Any]
    objectives: Mapping[str, float]
    step: int | None
    steps: int
    seconds: float
    folder: Path
    model: Path | None
    error: str | None
    parent: int | None = None


@dataclass(frozen=True)
class SweepResult:
    """What came of a sweep.

    Attributes:
        trials: All trials, in order.
        best: The best complete trial; with several objectives, the first of `pareto`. None without one.
        pareto: With several objectives, the trials that no other one beats in all of them; otherwise the best one.
        is_finished: Whether the budget is spent; if not, the same command continues.
        why: Why it ended before that.
        seconds_left: The time that the other trials of the budget will take; None if nothing is known.
    """

    trials: tuple[TrialResult, ...]
    best: TrialResult | None
    pareto: tuple[TrialResult, ...]
    is_finished: bool = True
    why: str | None = None
    seconds_left: float | None = None


def write_table(result: SweepResult, top: int = 20) -> str:
    """Return the best trials first, with what they set, and where the best one is.

    Args:
        result: The trials.
        top: How many trials to show.
    """
    lines = _write_rows(result, top)
    if result.best is not None:
        best = result.best
        lines += ["", f"best trial: {best.number}", f"  hyper-parameters  {best.folder / 'hps.yaml'}"]
        lines += [] if best.model is None else [f"  model             {best.model}"]
    return "\n".join(lines)


def _write_rows(result: SweepResult, top: int) -> list[str]:
    order = {one.number: index for index, one in enumerate(result.pareto)}
    states = ("running", "complete", "paused", "pruned")
    ranks = {one.number: (order.get(one.number, len(order)), one.number) for one in result.trials}
    by_state = {one.number: states.index(one.state) if one.state in states else len(states) for one in result.trials}
    shown = sorted(result.trials, key=lambda one: (one.number not in order, by_state[one.number], ranks[one.number]))
    keys = list(dict.fromkeys(key for one in result.trials for key in one.values))
    names = list(dict.fromkeys(name for one in result.trials for name in one.objectives))
    has_forks = any(one.parent is not None for one in result.trials)
    rows = [["trial", "state", *names, "step", *keys, *(["fork of"] if has_forks else [])]]
    rows += [_row(one, names, keys) + ([format_value(one.parent)] if has_forks else []) for one in shown[:top]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, *([f"... and {len(shown) - top} more"] if len(shown) > top else [])]


def _row(one: TrialResult, names: Sequence[str], keys: Sequence[str]) -> list[str]:
    objectives = [format_value(one.objectives.get(name)) for name in names]
    step = "-" if one.step is None else str(one.step)
    return [str(one.number), one.state, *objectives, step, *(format_value(one.values.get(key)) for key in keys)]


def format_value(value: Any) -> str:
    """Return a value of a trial for a table."""
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


class Lines:
    """Shows a sweep as lines: one for each trial that ends."""

    def say(self, message: str) -> None:
        """Write a message."""
        with speaking(verbose=True):
            say(message)

    def show(self, result: SweepResult) -> None:
        """Show the trials as they are now."""

    def close(self) -> None:
        """End."""


class LiveTable(Lines):
    """Shows a sweep as a table that is drawn again in its place, in a terminal."""

    def __init__(self) -> None:
        self._height = 0

    def say(self, message: str) -> None:
        self.close()
        super().say(message)

    def show(self, result: SweepResult) -> None:
        width = shutil.get_terminal_size().columns
        states = [one.state for one in result.trials]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        left = "" if result.seconds_left is None else f"; about {_format_time(result.seconds_left)} left"
        lines = [line[: width - 1] for line in [*_write_rows(result, _SHOWN_LIVE), f"{counts}{left}"]]
        self.close()
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()
        self._height = len(lines)

    def close(self) -> None:
        """Remove the table."""
        if self._height:
            sys.stderr.write(f"\x1b[{self._height}A\x1b[J")  # up to its first line, and clear from there
            self._height = 0


def _format_time(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 1 else f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
