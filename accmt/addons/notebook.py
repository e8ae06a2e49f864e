"""Live loss curves in a notebook with the progress bar above them, in one cell output without widgets."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib import import_module
from statistics import fmean
from time import perf_counter
from typing import Any, TypeAlias

from accmt.callbacks.callback import MainProcessCallback

SECONDS_BETWEEN_DRAWINGS = 1.0
MOST_POINTS = 200
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 640, 240, 60, 24, 24
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")

Point: TypeAlias = tuple[float, float]


class Curve:
    """Values over steps; neighbours are averaged if there are more points than can be displayed."""

    def __init__(self) -> None:
        self.newest = math.nan
        self._points: list[Point] = []
        self._waiting: list[Point] = []
        self._values_per_point = 1

    @property
    def points(self) -> list[Point]:
        """Steps and values, fewer than `2 * MOST_POINTS`."""
        return [*self._points, _average(self._waiting)] if self._waiting else list(self._points)

    def add(self, step: int, value: float) -> None:
        """Add a value; non-finite values leave a gap."""
        self.newest = value
        if not math.isfinite(value):
            return
        self._waiting.append((step, value))
        if len(self._waiting) == self._values_per_point:
            self._points.append(_average(self._waiting))
            self._waiting.clear()
        if len(self._points) >= 2 * MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_average(pair) for pair in pairs]
            self._values_per_point *= 2


class NotebookView(MainProcessCallback):
    """Draws training and validation losses during the run, at most once per second.

    Args:
        loss_name: The name of the training loss in the logged rows.
        val_loss_name: The name of the validation loss in the results of an evaluation.

    Attributes:
        terminal: The output stream for the progress bar.

    Processes: main only.
    """

    def __init__(self, loss_name: str = "train_loss", val_loss_name: str = "val_loss") -> None:
        self.terminal = _Terminal(self._draw_if_due)
        self._loss_name = loss_name
        self._val_loss_name = val_loss_name
        self._curves: dict[str, Curve] = {}
        self._output: Any = None
        self._next_drawing = math.inf

    def on_fit_start(self) -> None:
        self._curves.clear()
        self._output = import_module("IPython.display").display(self._picture(), raw=True, display_id=True)
        self._next_drawing = 0.0

    def on_log(self, values: Mapping[str, float], step: int) -> None:
        if self._loss_name in values:
            self._add(self._loss_name, step, values[self._loss_name])
        self._draw_if_due()

    def on_evaluation_end(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if name.split("__")[0] == self._val_loss_name:
                self._add(name, self.state.global_step, value)
        self._draw_if_due()

    def on_fit_end(self) -> None:
        self._draw()
        self._output, self._next_drawing = None, math.inf

    def _add(self, name: str, step: int, value: float) -> None:
        self._curves.setdefault(name, Curve()).add(step, value)

    def _draw_if_due(self) -> None:
        if perf_counter() >= self._next_drawing:
            self._draw()

    def _draw(self) -> None:
        if self._output is None:
            return
        self._next_drawing = perf_counter() + SECONDS_BETWEEN_DRAWINGS
        try:
            self._output.update(self._picture(), raw=True)
        except Exception:  # noqa: BLE001 - the notebook may be closed; this must not end the run
            self._output, self._next_drawing = None, math.inf

    def _picture(self) -> dict[str, str]:
        bar = f'<pre style="margin: 0; white-space: pre-wrap">{escape(self.terminal.line)}</pre>'
        newest = ", ".join(f"{name} {curve.newest:.4g}" for name, curve in self._curves.items())
        return {"text/html": bar + draw(self._curves), "text/plain": f"{self.terminal.line}\n{newest}".strip()}


def draw(curves: Mapping[str, Curve]) -> str:
    """Return the curves as SVG; hovering over a point shows its value."""
    drawn = {name: curve.points for name, curve in curves.items() if curve.points}
    if not drawn:
        return ""
    everything = [point for points in drawn.values() for point in points]
    first, last = min(step for step, _ in everything), max(step for step, _ in everything)
    lowest, highest = min(value for _, value in everything), max(value for _, value in everything)

    def place(point: Point) -> Point:
        x = _LEFT + (_WIDTH - _LEFT - 10) * _share(point[0], first, last)
        return x, _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * _share(point[1], lowest, highest)

    marks = [
        _write(_LEFT - 6, place((first, highest))[1] + 4, f"{highest:.4g}", anchor="end"),
        _write(_LEFT - 6, place((first, lowest))[1] + 4, f"{lowest:.4g}", anchor="end"),
        _write(_LEFT, _HEIGHT - 6, f"step {first:.0f}"),
        _write(_WIDTH - 10, _HEIGHT - 6, f"{last:.0f}", anchor="end"),
    ]
    for number, (name, points) in enumerate(drawn.items()):
        colour, label = _COLOURS[number % len(_COLOURS)], f"{name} {curves[name].newest:.4g}"
        places = [place(point) for point in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dots = [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2">'
            f"<title>{escape(name)} {value:.4g} at step {step:.0f}</title></circle>"
            for (x, y), (step, value) in zip(places, points, strict=True)
        ]
        marks += [
            _write(_LEFT + 190 * number, 14, label, colour),
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
            f'<g fill="{colour}">{"".join(dots)}</g>',
        ]
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="max-width: 100%">{"".join(marks)}</svg>'


def _write(x: float, y: float, text: str, colour: str = "currentColor", *, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}"'
    return f'<text {place} font-family="sans-serif" fill="{colour}">{escape(text)}</text>'


def _share(value: float, lowest: float, highest: float) -> float:
    return (value - lowest) / (highest - lowest) if highest > lowest else 0.5


def _average(points: Sequence[Point]) -> Point:
    return fmean(step for step, _ in points), fmean(value for _, value in points)


class _Terminal(io.StringIO):
    """Acts as a terminal for a progress bar, and keeps its last line.

    Args:
        on_change: Called when the line changes.
    """

    encoding = "utf-8"

    def __init__(self, on_change: Callable[[], None]) -> None:
        super().__init__()
        self.line = ""
        self._on_change = on_change

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.line = text.rsplit("\r", maxsplit=1)[-1].strip() or self.line
        self._on_change()
        return len(text)
