"""The HTML page of a sweep: Optuna's visualizations and a table, in one file that needs no network."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from html import escape
from typing import Any

import optuna
from optuna import visualization

from accmt.addons.sweep.spec import SweepSpec
from accmt.addons.sweep.table import SweepResult, format_value
from accmt.errors import MissingPackageError, explain

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #222; margin: 0 auto; max-width: 1280px; padding: 0 24px 48px; }
h1 { font-size: 20px; } h2 { font-size: 16px; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid #eee; white-space: nowrap; }
tr.best { font-weight: 600; }
"""

_Plot = Callable[..., Any]


def build_page(spec: SweepSpec, study: optuna.Study, result: SweepResult) -> str:
    """Return the page as HTML."""
    try:
        import plotly.io
    except ImportError as error:
        do = 'pip install "accmt-trainer[sweep]"'
        raise MissingPackageError(explain("accmt sweep --report", "plotly is not installed", "plotly", do)) from error
    parts = [f"<h1>{escape(spec.name)}</h1>", f"<p>{escape(_summarize(result))}</p>"]
    has_script = False
    for title, figure in _draw(spec, study):
        script = False if has_script else "inline"  # plotly itself, once
        html = plotly.io.to_html(figure, full_html=False, include_plotlyjs=script, config={"displaylogo": False})
        parts += [f"<h2>{escape(title)}</h2>", html]
        has_script = True
    parts += ["<h2>Trials</h2>", _write_trials(result)]
    head = f'<meta charset="utf-8"><title>{escape(spec.name)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _summarize(result: SweepResult) -> str:
    states = [one.state for one in result.trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    if result.best is None:
        return f"{len(states)} trials: {counts}"
    best = ", ".join(f"{name} {value:.6g}" for name, value in result.best.objectives.items())
    return f"{len(states)} trials: {counts}; best: trial {result.best.number}, {best}"


def _draw(spec: SweepSpec, study: optuna.Study) -> Iterator[tuple[str, Any]]:
    """Yield the figures that the trials allow: most need two that have finished, with different values."""
    plots: list[tuple[str, _Plot, dict[str, Any]]] = []
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
