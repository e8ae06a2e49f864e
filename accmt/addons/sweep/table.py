"""The trials of a sweep as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accmt.addons.sweep.worker import SweepResult, TrialResult


def write_table(result: SweepResult, top: int = 20) -> str:
    """Return the best trials first, with what they set, and where the best one is.

    Args:
        result: The trials.
        top: How many trials to show.
    """
    order = {one.number: index for index, one in enumerate(result.pareto)}
    shown = sorted(
        result.trials, key=lambda one: (order.get(one.number, len(order)), one.state != "complete", one.number)
    )
    keys = list(dict.fromkeys(key for one in result.trials for key in one.values))
    names = list(dict.fromkeys(name for one in result.trials for name in one.objectives))
    rows = [["trial", "state", *names, "step", *keys]]
    rows += [_row(one, names, keys) for one in shown[:top]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"... and {len(shown) - top} more"] if len(shown) > top else []
    if result.best is not None:
        best = result.best
        lines += ["", f"best trial: {best.number}", f"  hyper-parameters  {best.folder / 'hps.yaml'}"]
        lines += [] if best.model is None else [f"  model             {best.model}"]
    return "\n".join(lines)


def _row(one: TrialResult, names: Sequence[str], keys: Sequence[str]) -> list[str]:
    objectives = [_format(one.objectives.get(name)) for name in names]
    step = "-" if one.step is None else str(one.step)
    return [str(one.number), one.state, *objectives, step, *(_format(one.values.get(key)) for key in keys)]


def _format(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
