"""The charts of a page, as plotly draws them: all runs over one another, a colour for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from accmt.addons.report.records import SPLIT_PREFIX, Curve, RunRecord
from accmt.errors import MissingPackageError, explain

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLOURS = ("#2f6fde", "#e4572e", "#17a673", "#9b51e0", "#f2a900", "#00a3bf", "#d6336c", "#6b705c")
_SHADES = ("#8ecae6", "#219ebc", "#ffb703", "#fb8500", "#adb5bd")
MOST_POINTS = 4_000
_SYMBOLS = {
    "started": "circle",
    "checkpoint": "diamond",
    "resumed": "triangle-up",
    "finished": "star",
    "failed": "x",
    "interrupted": "square",
    "killed": "x",
    "preempted": "square",
}
_SYSTEM = ("CPU", "GPU", "RAM", "mfu", "samples_per_s", "batches_per_s", "tokens_per_s")


class Chart(NamedTuple):
    section: str
    figure: Figure


def draw_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Draw the losses, the course of the runs, and a chart for every other value."""
    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    losses = [name for name in names if "loss" in name.split("__")[0]]
    others = [name for name in names if name not in losses and not name.startswith(SPLIT_PREFIX)]
    charts = [Chart("Losses", _draw_curves(runs, losses, "losses"))] if losses else []
    charts += [Chart(_section_of(name), _draw_curves(runs, [name], name)) for name in others]
    if any(run.seconds_by_purpose for run in runs):
        charts.append(Chart("Time", _draw_split(runs)))
    return [*charts, Chart("Time", _draw_course(runs))]


def _section_of(name: str) -> str:
    return "System" if name.startswith(_SYSTEM) else "Values"


def _draw_curves(runs: Sequence[RunRecord], names: Sequence[str], title: str) -> Figure:
    figure = _make_figure(title)
    for number, run in enumerate(runs):
        for place, name in enumerate(name for name in names if name in run.curves):
            curve = thin_out(run.curves[name])
            is_sparse = len(curve.steps) < 50
            figure.add_scatter(
                x=curve.steps,
                y=curve.values,
                name=f"{run.name}: {name}" if len(runs) > 1 else name,
                mode="lines+markers" if is_sparse else "lines",
                line={"color": _colour(number), "dash": ("solid", "dash", "dot", "dashdot")[place % 4], "width": 1.8},
                marker={"size": 5},
                meta={"run": number, "steps": curve.steps, "seconds": curve.times_s},
                hovertemplate="%{y:.5g} at %{x}",
            )
    figure.update_layout(showlegend=len(figure.data) > 1)
    return figure


def _draw_split(runs: Sequence[RunRecord]) -> Figure:
    figure = _make_figure("time per phase")
    purposes = list(dict.fromkeys(purpose for run in runs for purpose in run.seconds_by_purpose))
    for number, purpose in enumerate(purposes):
        seconds = [run.seconds_by_purpose.get(purpose, 0.0) for run in runs]
        totals = [sum(run.seconds_by_purpose.values()) or 1.0 for run in runs]
        figure.add_bar(
            x=[100 * part / total for part, total in zip(seconds, totals, strict=True)],
            y=[run.name for run in runs],
            name=purpose,
            orientation="h",
            marker={"color": _SHADES[number % len(_SHADES)]},
            customdata=seconds,
            hovertemplate="%{x:.1f} %, %{customdata:.1f} s",
        )
    figure.update_layout(barmode="stack", meta={"is_fixed": True}, height=200 + 40 * len(runs), legend={"y": -0.5})
    figure.update_xaxes(title="percent of the time", range=[0, 100])
    return figure


def _draw_course(runs: Sequence[RunRecord]) -> Figure:
    figure = _make_figure("steps over time, and what happened")
    for number, run in enumerate(runs):
        points = sorted({(event.time_s, event.step) for event in run.events} | set(_progress_of(run)))
        line = {"color": _colour(number), "width": 1.5}
        figure.add_scatter(
            x=[time_s for time_s, _ in points],
            y=[step for _, step in points],
            name=run.name,
            mode="lines",
            line=line,
            meta={"run": number},
            hoverinfo="skip",
        )
        figure.add_scatter(
            x=[event.time_s for event in run.events],
            y=[event.step for event in run.events],
            text=[event.kind for event in run.events],
            mode="markers",
            name=f"{run.name}: events",
            showlegend=False,
            marker={"size": 10, "color": _colour(number), "symbol": [_SYMBOLS[event.kind] for event in run.events]},
            meta={"run": number},
            hovertemplate="%{text} at step %{y}, %{x:.1f} s<extra></extra>",
        )
    figure.update_layout(meta={"is_fixed": True}, showlegend=len(runs) > 1, legend={"y": -0.3})
    figure.update_xaxes(title="seconds since the start")
    figure.update_yaxes(title="steps")
    return figure


def _progress_of(run: RunRecord) -> list[tuple[float, int]]:
    longest = max(run.curves.values(), key=lambda curve: len(curve.steps), default=Curve())
    curve = thin_out(longest)
    return list(zip(curve.times_s, curve.steps, strict=True))


def thin_out(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """Return at most so many points of a curve: of each stretch the lowest and the highest, so that no peak is lost.

    A value that is not finite is kept.
    """
    count = len(curve.values)
    if count <= most:
        return curve
    width = -(-count // (most // 2))
    kept: set[int] = set()
    for start in range(0, count, width):
        stretch = range(start, min(start + width, count))
        finite = [index for index in stretch if abs(curve.values[index]) < float("inf")]
        kept.update(index for index in stretch if index not in set(finite))
        if finite:
            kept |= {min(finite, key=curve.values.__getitem__), max(finite, key=curve.values.__getitem__)}
    indices = sorted(kept | {0, count - 1})
    return Curve(
        *([values[index] for index in indices] for values in (curve.steps, curve.times_s, curve.values))  # type: ignore[arg-type]
    )


def _make_figure(title: str) -> Any:
    try:
        from plotly.graph_objects import Figure
    except ImportError as error:
        message = explain("accmt report", "no plotly", "the package that draws the charts", "pip install plotly")
        raise MissingPackageError(message) from error
    figure = Figure()
    figure.update_layout(
        title={"text": title, "font": {"size": 14}},
        template="plotly_white",
        margin={"l": 55, "r": 15, "t": 40, "b": 40},
        height=320,
        hovermode="x unified",
        legend={"orientation": "h", "y": -0.2},
    )
    return figure


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
