"""Draw curves of a run as a small SVG, of the history in its run folder: the pictures of docs/recipes.md.

python docs/draw_curves.py logs/gan docs/images/curve-gan.svg digit_score train_loss discriminator_loss
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from accmt import read_history
from accmt.addons.notebook import Curve, draw

MOST_POINTS = 40
"""Of a curve; neighbours are averaged, so that a picture has a few kilobytes."""


def draw_run(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return an SVG of some of the values that a run has logged.

    Args:
        rows: The rows of its history.
        names: The values, each a curve.

    Raises:
        ValueError: The run has not logged one of them.
    """
    logged = [(row["step"], row["values"]) for row in rows if "values" in row]
    curves = {}
    for name in names:
        points = [(step, values[name]) for step, values in logged if name in values]
        if not points:
            known = ", ".join(sorted({key for _, values in logged for key in values}))
            raise ValueError(f"the run has no {name}; it has {known}")
        curves[name] = build_curve(points)
    picture = draw(curves)
    return picture.replace("max-width: 100%", "max-width: 100%; background: white", 1) + "\n"


def build_curve(points: Sequence[tuple[int, float]]) -> Curve:
    """Return a curve of at most `MOST_POINTS` averages of neighbours, named by its last value."""
    curve, size = Curve(), -(-len(points) // MOST_POINTS)
    for first in range(0, len(points), size):
        steps, values = zip(*points[first : first + size], strict=True)
        curve.add(round(fmean(steps)), fmean(values))
    curve.newest = points[-1][1]
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw curves of a run as SVG.")
    parser.add_argument("folder", type=Path, help="the folder of a run, or of several, of which the newest is drawn")
    parser.add_argument("picture", type=Path, help="the file to write")
    parser.add_argument("names", nargs="+", help="the values to draw")
    options = parser.parse_args()
    runs = sorted(options.folder.glob("*/history.jsonl"))
    folder = runs[-1].parent if runs else options.folder
    options.picture.write_text(draw_run(read_history(folder), options.names), encoding="utf-8")
    print(f"{options.picture} of {folder}")


if __name__ == "__main__":
    main()
