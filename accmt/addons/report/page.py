"""Builds a self-contained HTML page with charts and tables: no network, no server, no other files."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from gzip import compress
from html import escape
from importlib.resources import files
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accmt.addons.goodput.records import BINS
from accmt.addons.report.records import SPLIT_PREFIX, Curve, RunRecord
from accmt.errors import DataError, MissingPackageError, fail
from accmt.files import write_text
from accmt.tracking.values import Media

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


# ---- Charts: all runs in one chart, one colour per run


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


_GOODPUT = "goodput: how the run spent its time"


class Chart(NamedTuple):
    section: str
    figure: Figure
    table: str = ""
    """HTML below the chart."""


def draw_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Draw the losses, the progress of the runs, and one chart per other value."""
    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    losses = [name for name in names if "loss" in name.split("__")[0]]
    others = [name for name in names if name not in losses and not name.startswith(SPLIT_PREFIX)]
    charts = [Chart("Losses", _draw_curves(runs, losses, "losses"))] if losses else []
    charts += [Chart(_section_of(name), _draw_curves(runs, [name], name)) for name in others]
    if any(run.seconds_by_purpose for run in runs):
        charts.append(Chart("Time", _draw_split("time per phase", runs, [run.seconds_by_purpose for run in runs])))
    if any(run.goodput for run in runs):
        every = [{} if run.goodput is None else run.goodput.seconds for run in runs]
        named = [{BINS.get(name, name): seconds for name, seconds in one.items() if seconds} for one in every]
        charts.append(Chart("Time", _draw_split(_GOODPUT, runs, named), _write_goodput(runs)))
    return [*charts, Chart("Time", _draw_course(runs))]


def _section_of(name: str) -> str:
    return "System" if name.startswith(_SYSTEM) else "Values"


def _draw_curves(runs: Sequence[RunRecord], names: Sequence[str], title: str) -> Figure:
    figure = _make_figure(title)
    for number, run in enumerate(runs):
        command = run.replay_command
        replay = {} if command is None else {"replay": command}
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
                meta={"run": number, "steps": curve.steps, "seconds": curve.times_s, **replay},
                hovertemplate="%{y:.5g} at %{x}",
            )
    figure.update_layout(showlegend=len(figure.data) > 1)
    return figure


def _draw_split(title: str, runs: Sequence[RunRecord], every: Sequence[Mapping[str, float]]) -> Figure:
    figure = _make_figure(title)
    purposes = list(dict.fromkeys(purpose for one in every for purpose in one))
    totals = [sum(one.values()) or 1.0 for one in every]
    for number, purpose in enumerate(purposes):
        seconds = [one.get(purpose, 0.0) for one in every]
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
        longest = thin_out(max(run.curves.values(), key=lambda curve: len(curve.steps), default=Curve()))
        progress = zip(longest.times_s, longest.steps, strict=True)
        points = sorted({(event.time_s, event.step) for event in run.events} | set(progress))
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


def thin_out(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """Return at most `most` points of a curve: the lowest and the highest of each interval, so that no peak is lost.

    Non-finite values are kept.
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
        raise fail(
            MissingPackageError,
            "accmt report",
            got="plotly is not installed",
            expected="plotly, for the charts",
            do="pip install plotly",
        ) from error
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


SECTIONS = ("Losses", "Values", "System", "Time")
MOST_EVALUATIONS = 200
MOST_STEPS_OF_IMAGES = 3
MOST_IMAGES = 8
MOST_ROWS = 50
MOST_PIXELS = 256


def write_report(runs: Sequence[RunRecord], path: Path) -> None:
    """Write the page.

    Args:
        runs: The runs, drawn in the same charts.
        path: The file to write.
    """
    write_text(path, build_page(runs))


def build_page(runs: Sequence[RunRecord]) -> str:
    """Return the page as HTML."""
    charts = draw_charts(runs)
    from plotly.offline import get_plotlyjs

    figures = ",\n".join(chart.figure.to_json() for chart in charts)  # writes "<" as \u003c
    parts = {
        "TITLE": escape(", ".join(run.name for run in runs)),
        "PLOTLY": b64encode(compress(get_plotlyjs().encode(), mtime=0)).decode(),  # a third of its size
        "FIGURES": f"[{figures}]",
        "RUNS": _list_runs(runs),
        "SECTIONS": "\n".join(_write_section(name, charts) for name in SECTIONS),
        "IMAGES": write_images(runs),
        "TABLES": write_tables(runs),
        "EVALUATIONS": "\n".join(_write_evaluations(run) for run in runs if run.evaluations),
        "CONFIG": _write_config(runs),
    }
    page = files("accmt.addons.report").joinpath("page.html").read_text(encoding="utf-8")
    head, *rest = page.split("@@")  # every second part is a name
    filled = (parts[part] if number % 2 == 0 else part for number, part in enumerate(rest))
    return head + "".join(filled)


def _list_runs(runs: Sequence[RunRecord]) -> str:
    rows = []
    for number, run in enumerate(runs):
        kinds = [event.kind for event in run.events if event.kind not in ("started", "finished")]
        best = ", ".join(f"{name} {value:.5g} at step {step:,}" for name, (step, value) in run.best.items())
        cells = [
            f'<label><input type="checkbox" class="run" data-run="{number}" checked> '
            f'<i style="background:{COLOURS[number % len(COLOURS)]}"></i> {escape(run.name)}</label>',
            f'<b class="{run.status}">{run.status}</b>',
            f"{run.num_steps:,}",
            f"{run.duration_s:,.1f} s",
            ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds)) or "-",
            escape(best) or "-",
            f'<span class="folder">{escape(str(run.folder))}</span>',
        ]
        rows.append(cells)
    return _write_table(["run", "status", "steps", "time", "what happened", "best", "folder"], rows)


def _write_section(name: str, charts: Sequence[Chart]) -> str:
    numbers = [number for number, chart in enumerate(charts) if chart.section == name]
    if not numbers:
        return ""
    boxes = ""
    for number in numbers:
        boxes += f'<div class="box"><div class="chart" id="chart-{number}"></div>{charts[number].table}</div>'
    return f'<section id="{name}"><h2>{name}</h2><div class="grid">{boxes}</div></section>'


def _write_evaluations(run: RunRecord) -> str:
    names = list(dict.fromkeys(name for _, values in run.evaluations for name in values))
    shown = run.evaluations[-MOST_EVALUATIONS:]
    rows, best = [], run.best
    for step, values in shown:
        cells = [f"{step:,}"]
        for name in names:
            text = f"{values[name]:.5g}" if name in values else ""
            is_best = name in values and best.get(name) == (step, values[name])
            cells.append(f"<b>{text}</b>" if is_best else text)
        rows.append(cells)
    more = f" (the last {len(shown)} of {len(run.evaluations)})" if len(shown) < len(run.evaluations) else ""
    return f"<h3>{escape(run.name)}{more}</h3>" + _write_table(["step", *map(escape, names)], rows)


def _write_goodput(runs: Sequence[RunRecord]) -> str:
    """Return the numbers of the goodput chart as a table with a column per run, and what else is known of each run."""
    recorded = [(run, run.goodput) for run in runs if run.goodput is not None]
    if not recorded:
        return ""
    rows = []
    for name in dict.fromkeys(name for _, goodput in recorded for name in goodput.seconds):
        if any(goodput.seconds.get(name) for _, goodput in recorded):
            seconds = [goodput.seconds.get(name, 0.0) for _, goodput in recorded]
            shares = [part / (goodput.total_s or 1.0) for part, (_, goodput) in zip(seconds, recorded, strict=True)]
            cells = [f"{part:,.1f} s, {share:.1%}" for part, share in zip(seconds, shares, strict=True)]
            rows.append([escape(BINS.get(name, name)), *cells])
    rows.append(["all", *(f"{goodput.total_s:,.1f} s" for _, goodput in recorded)])
    table = _write_table(["", *(escape(run.name) for run, _ in recorded)], rows)
    for run, goodput in recorded:
        facts = "<br>".join(map(escape, goodput.describe_facts(goodput.price_per_hour)))
        table += f"<p>{f'{escape(run.name)}: ' if len(runs) > 1 else ''}{facts}</p>"
    return table


def _write_config(runs: Sequence[RunRecord]) -> str:
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    different = [key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1]
    header = ["", *(escape(run.name) for run in runs)]
    common = _write_table(header, _config_rows(runs, [key for key in keys if key not in different]))
    if len(runs) == 1:
        return common
    changed = _write_table(header, _config_rows(runs, different)) if different else "<p>no differences</p>"
    return f'<div id="differences">{changed}</div><details><summary>identical settings</summary>{common}</details>'


def _config_rows(runs: Sequence[RunRecord], keys: Iterable[str]) -> list[list[str]]:
    return [[escape(key), *(escape(str(run.config.get(key, "-"))) for run in runs)] for key in keys]


def _write_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def write_tables(runs: Sequence[RunRecord]) -> str:
    """Return a section with the newest table of each name; empty if there are none.

    Cells that have changed since the table before are marked, with what they were, if it has the same columns and rows.
    Up to 50 rows are shown; the run folder has all.
    """
    shown = ""
    for run in runs:
        for name, logged in run.tables.items():
            newest = logged[-1]
            heading = f"<h3>{escape(run.name)}: {escape(name)}, step {newest.step:,}</h3>"
            try:
                columns, rows = newest.table()
                before = logged[-2].table() if len(logged) > 1 else None
            except DataError:  # a missing table must not prevent the report
                shown += f"{heading}<p>{escape(str(newest.folder))} cannot be read</p>"
                continue
            old: Sequence[Sequence[Any]] = [[]] * len(rows)
            if before is not None and before[0] == columns and len(before[1]) == len(rows):
                heading = heading.replace("</h3>", f" (changes since step {logged[-2].step:,} are marked)</h3>")
                old = before[1]
            cells = [
                [_write_cell(*pair) for pair in zip_longest(row, was)]
                for row, was in zip(rows[:MOST_ROWS], old, strict=False)
            ]
            more = f"<p>the first {MOST_ROWS} of {len(rows)} rows</p>" if len(rows) > MOST_ROWS else ""
            shown += f'{heading}<div class="texts">{_write_table(list(map(escape, columns)), cells)}</div>{more}'
    return f'<section id="Tables"><h2>Tables</h2>{shown}</section>' if shown else ""


def _write_cell(value: Any, was: Any) -> str:
    now, before = (f"{one:.4g}" if isinstance(one, float) else str(one) for one in (value, was))
    if was is None or now == before:
        return escape(now)
    return f"<ins>{escape(now)}</ins> <del>{escape(before)}</del>"


def write_images(runs: Sequence[RunRecord]) -> str:
    """Return a section with the images of each name at its last three steps; empty if there are none.

    Up to eight images per call are shown, scaled down to 256 pixels; the run folder has the originals.
    """
    shown = ""
    for run in runs:
        for name, logged in run.images.items():
            figures = "".join(map(_write_images_of_step, reversed(logged[-MOST_STEPS_OF_IMAGES:])))
            shown += f"<h3>{escape(run.name)}: {escape(name)}</h3>{figures}"
    return f'<section id="Images"><h2>Images</h2>{shown}</section>' if shown else ""


def _write_images_of_step(media: Media) -> str:
    try:
        images = list(media.images().values())
    except DataError:  # missing images must not prevent the report
        return f"<p>step {media.step:,}: images in {escape(str(media.folder))} cannot be read</p>"
    pictures = ""
    for image in images[:MOST_IMAGES]:
        image.thumbnail((MOST_PIXELS, MOST_PIXELS))
        content = BytesIO()
        image.save(content, "png", optimize=True)
        pictures += f'<img alt="" src="data:image/png;base64,{b64encode(content.getvalue()).decode()}">'
    more = f" (the first {MOST_IMAGES} of {len(images)})" if len(images) > MOST_IMAGES else ""
    return f"<figure>{pictures}<figcaption>step {media.step:,}{more}</figcaption></figure>"
