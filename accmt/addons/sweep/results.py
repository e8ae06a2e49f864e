"""What came of a sweep, and how it is shown: in the terminal, and as an HTML page."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accmt.addons.sweep.spec import SweepSpec
from accmt.addons.text_tables import align
from accmt.errors import MissingPackageError, fail
from accmt.messages import say, speaking

if TYPE_CHECKING:
    import optuna

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

    @property
    def counts(self) -> str:
        """The number of trials in each state, for messages."""
        states = [one.state for one in self.trials]
        return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


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
    return [*align(rows), *([f"... and {len(shown) - top} more"] if len(shown) > top else [])]


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
        left = ""
        if result.seconds_left is not None:
            seconds, minutes, hours = result.seconds_left, result.seconds_left / 60, result.seconds_left / 3600
            time = f"{seconds:.0f} s" if minutes < 1 else f"{minutes:.0f} min" if minutes < 100 else f"{hours:.1f} h"
            left = f"; about {time} left"
        lines = [line[: width - 1] for line in [*_write_rows(result, _SHOWN_LIVE), f"{result.counts}{left}"]]
        self.close()
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()
        self._height = len(lines)

    def close(self) -> None:
        """Remove the table."""
        if self._height:
            sys.stderr.write(f"\x1b[{self._height}A\x1b[J")  # up to its first line, and clear from there
            self._height = 0


# ---- The page: Optuna's visualizations and a table, in one file that needs no network

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #222; margin: 0 auto; max-width: 1280px; padding: 0 24px 48px; }
h1 { font-size: 20px; } h2 { font-size: 16px; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid #eee; white-space: nowrap; }
tr.best { font-weight: 600; }
"""


def build_page(spec: SweepSpec, study: optuna.Study, result: SweepResult) -> str:
    """Return the page as HTML."""
    try:
        import plotly.io
    except ImportError as error:
        do = 'pip install "accmt-trainer[sweep]"'
        raise fail(
            MissingPackageError, "accmt sweep --report", got="plotly is not installed", expected="plotly", do=do
        ) from error
    summary = f"{len(result.trials)} trials: {result.counts}"
    if result.best is not None:
        objectives = ", ".join(f"{name} {value:.6g}" for name, value in result.best.objectives.items())
        summary = f"{summary}; best: trial {result.best.number}, {objectives}"
    parts = [f"<h1>{escape(spec.name)}</h1>", f"<p>{escape(summary)}</p>"]
    has_script = False
    for title, figure in _draw(spec, study):
        script = False if has_script else "inline"  # plotly itself, once
        html = plotly.io.to_html(figure, full_html=False, include_plotlyjs=script, config={"displaylogo": False})
        parts += [f"<h2>{escape(title)}</h2>", html]
        has_script = True
    parts += ["<h2>Trials</h2>", _write_trials(result)]
    head = f'<meta charset="utf-8"><title>{escape(spec.name)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _draw(spec: SweepSpec, study: optuna.Study) -> Iterator[tuple[str, Any]]:
    """Yield the figures that the trials allow: most need two that have finished, with different values."""
    from optuna import visualization

    plots: list[tuple[str, Callable[..., Any], dict[str, Any]]] = []
    if len(spec.objectives) > 1:
        names = [one.name for one in spec.objectives]
        plots += [("Objectives", visualization.plot_pareto_front, {"target_names": names})] if len(names) <= 3 else []
    else:
        plots.append(("Curves", visualization.plot_intermediate_values, {}))
    for index, one in enumerate(spec.objectives):
        target = {"target_name": one.name, "target": (lambda trial, at=index: trial.values[at])}
        title = f": {one.name}" if len(spec.objectives) > 1 else ""
        plots += [
            (f"History{title}", visualization.plot_optimization_history, target),
            (f"Parallel coordinates{title}", visualization.plot_parallel_coordinate, target),
            (f"Importance of parameters{title}", visualization.plot_param_importances, target),
            (f"Slices{title}", visualization.plot_slice, target),
        ]
    for title, plot, arguments in plots:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of experimental plots, and of trials that a plot leaves out
            try:
                yield title, plot(study, **arguments)
            except (ValueError, RuntimeError, IndexError):
                continue


def _write_trials(result: SweepResult) -> str:
    best = {one.number for one in result.pareto}
    keys = list(dict.fromkeys(key for one in result.trials for key in one.values))
    names = list(dict.fromkeys(name for one in result.trials for name in one.objectives))
    rows = ["".join(f"<th>{escape(cell)}</th>" for cell in ("trial", "state", *names, "step", *keys, "folder"))]
    for one in result.trials:
        cells = [str(one.number), one.state, *(format_value(one.objectives.get(name)) for name in names)]
        cells += ["-" if one.step is None else str(one.step), *(format_value(one.values.get(key)) for key in keys)]
        cells.append(str(one.folder) if one.error is None else one.error.splitlines()[0])
        kind = ' class="best"' if one.number in best else ""
        rows.append(f"</tr><tr{kind}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells))
    return f"<table><tr>{''.join(rows)}</tr></table>"
