"""Puts charts and tables on one page that needs nothing else: no network, no server, no other file."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from gzip import compress
from html import escape
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from accmt.addons.report.charts import COLOURS, Chart, draw_charts
from accmt.addons.report.records import RunRecord
from accmt.errors import DataError
from accmt.files import write_text
from accmt.tracking.media import Media

if TYPE_CHECKING:
    from PIL.Image import Image

SECTIONS = ("Losses", "Values", "System", "Time")
MOST_EVALUATIONS = 200
MOST_STEPS_OF_IMAGES = 3
MOST_IMAGES = 8
MOST_PIXELS = 256


def write_report(runs: Sequence[RunRecord], path: Path) -> None:
    """Write the page.

    Args:
        runs: Drawn over one another; the first is what the configurations of others are compared with.
    """
    write_text(path, build_page(runs))


def build_page(runs: Sequence[RunRecord]) -> str:
    """Return the page as HTML."""
    charts = draw_charts(runs)
    from plotly.offline import get_plotlyjs

    figures = ",\n".join(chart.figure.to_json() for chart in charts)  # which writes "<" as \u003c
    parts = {
        "TITLE": escape(", ".join(run.name for run in runs)),
        "PLOTLY": b64encode(compress(get_plotlyjs().encode(), mtime=0)).decode(),  # a third of its size
        "FIGURES": f"[{figures}]",
        "RUNS": _list_runs(runs),
        "SECTIONS": "\n".join(_write_section(name, charts) for name in SECTIONS),
        "IMAGES": write_images(runs),
        "EVALUATIONS": "\n".join(_write_evaluations(run) for run in runs if run.evaluations),
        "CONFIG": _write_config(runs),
    }
    page = files("accmt.addons.report").joinpath("page.html").read_text(encoding="utf-8")
    head, *rest = page.split("@@")  # every second part is a name
    filled = (parts[part] if number % 2 == 0 else part for number, part in enumerate(rest))
    return head + "".join(filled)


def _list_runs(runs: Sequence[RunRecord]) -> str:
    rows = [
        [
            f'<label><input type="checkbox" class="run" data-run="{number}" checked> '
            f'<i style="background:{COLOURS[number % len(COLOURS)]}"></i> {escape(run.name)}</label>',
            f'<b class="{run.status}">{run.status}</b>',
            f"{run.num_steps:,}",
            f"{run.duration_s:,.1f} s",
            _count_events(run),
            escape(", ".join(f"{name} {value:.5g} at step {step:,}" for name, (step, value) in run.best.items()))
            or "-",
            escape(str(run.folder)),
        ]
        for number, run in enumerate(runs)
    ]
    return _write_table(["run", "status", "steps", "time", "what happened", "best", "folder"], rows)


def _count_events(run: RunRecord) -> str:
    kinds = [event.kind for event in run.events if event.kind not in ("started", "finished")]
    return ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds)) or "-"


def _write_section(name: str, charts: Sequence[Chart]) -> str:
    numbers = [number for number, chart in enumerate(charts) if chart.section == name]
    if not numbers:
        return ""
    boxes = "".join(f'<div class="chart" id="chart-{number}"></div>' for number in numbers)
    return f'<section id="{name}"><h2>{name}</h2><div class="grid">{boxes}</div></section>'


def _write_evaluations(run: RunRecord) -> str:
    names = list(dict.fromkeys(name for _, values in run.evaluations for name in values))
    shown = run.evaluations[-MOST_EVALUATIONS:]
    rows = [
        [f"{step:,}", *(_write_result(run, step, name, values.get(name)) for name in names)] for step, values in shown
    ]
    more = f" (the last {len(shown)} of {len(run.evaluations)})" if len(shown) < len(run.evaluations) else ""
    return f"<h3>{escape(run.name)}{more}</h3>" + _write_table(["step", *map(escape, names)], rows)


def _write_result(run: RunRecord, step: int, name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"<b>{value:.5g}</b>" if (step, value) == run.best.get(name) else f"{value:.5g}"


def _write_config(runs: Sequence[RunRecord]) -> str:
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    different = [key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1]
    header = ["", *(escape(run.name) for run in runs)]
    common = _write_table(header, _config_rows(runs, [key for key in keys if key not in different]))
    if len(runs) == 1:
        return common
    changed = _write_table(header, _config_rows(runs, different)) if different else "<p>no difference</p>"
    return f'<div id="differences">{changed}</div><details><summary>what is the same</summary>{common}</details>'


def _config_rows(runs: Sequence[RunRecord], keys: Iterable[str]) -> list[list[str]]:
    return [[escape(key), *(escape(str(run.config.get(key, "-"))) for run in runs)] for key in keys]


def _write_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def write_images(runs: Sequence[RunRecord]) -> str:
    """Return a section with the images of each name at its last three steps; empty where there are none.

    Of one call up to eight are shown, none larger than 256 pixels; the run folder has them as they were.
    """
    shown = "".join(_write_images_of_name(run, name, logged) for run in runs for name, logged in run.images.items())
    return f'<section id="Images"><h2>Images</h2>{shown}</section>' if shown else ""


def _write_images_of_name(run: RunRecord, name: str, logged: Sequence[Media]) -> str:
    figures = "".join(_write_images_of_step(media) for media in reversed(logged[-MOST_STEPS_OF_IMAGES:]))
    return f"<h3>{escape(run.name)}: {escape(name)}</h3>{figures}"


def _write_images_of_step(media: Media) -> str:
    try:
        images = list(media.images().values())
    except DataError:  # a disk that lost some images does not lose the report
        return f"<p>step {media.step:,}: not readable in {escape(str(media.folder))}</p>"
    pictures = "".join(f'<img alt="" src="{_to_data_uri(image)}">' for image in images[:MOST_IMAGES])
    more = f" (the first {MOST_IMAGES} of {len(images)})" if len(images) > MOST_IMAGES else ""
    return f"<figure>{pictures}<figcaption>step {media.step:,}{more}</figcaption></figure>"


def _to_data_uri(image: Image) -> str:
    image.thumbnail((MOST_PIXELS, MOST_PIXELS))
    content = BytesIO()
    image.save(content, "png", optimize=True)
    return f"data:image/png;base64,{b64encode(content.getvalue()).decode()}"
