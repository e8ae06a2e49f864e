"""One line about each evaluation, so that a log without a progress bar shows how the run goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from accmt.callbacks.base import MainProcessCallback
from accmt.messages import columns_of_messages, say


class EvaluationReport(MainProcessCallback):
    """Says at each evaluation where the run is, the mean training loss of the epoch until here, and the results.

    Each value has an arrow against the last evaluation, and "best" where it is better than all before; "saved" says
    that the model was. Lines of the same names stand in columns.

    Args:
        loss_name: What the training loss is called.

    Processes: main only.
    """

    order = math.inf

    def __init__(self, loss_name: str = "train_loss") -> None:
        self._loss_name = loss_name
        self._last: dict[str, float] = {}
        self._best_before: dict[str, float] = {}
        self._is_saved = False

    def on_fit_start(self) -> None:
        self._last = dict(self.state.metrics)  # of the run that is continued

    def on_evaluation_start(self) -> None:
        self._is_saved = False
        self._best_before = dict(self.state.best_metrics)

    def on_save_model(self, folder: Path) -> None:
        self._is_saved = True

    def on_evaluation_end(self, metrics: Mapping[str, float]) -> None:
        total = self.trainer.estimated_stepping_batches
        step, of_total = str(self.state.global_step), ""
        if math.isfinite(total):
            step, of_total = step.rjust(len(f"{total:.0f}")), f" of {total:.0f}"
        loss = self.trainer.run.running_averages.epoch_loss
        known = {} if loss is None else {self._loss_name: loss}
        is_counted = self.state.train_step == 0 and self.state.epoch > 0  # an evaluation after the epoch's end
        epoch = self.state.epoch if is_counted else self.state.epoch + 1
        epochs = self.trainer.run.cadence.epochs
        head = f"step {step}{of_total}, epoch {str(epoch).rjust(len(str(epochs or '')))}:"
        cells = [f"{name} {value:<7.4g} {self._mark(name, value):<6}" for name, value in {**known, **metrics}.items()]
        say(_fold(head, [*cells, *(["saved"] if self._is_saved else [])], columns_of_messages()))

    def _mark(self, name: str, value: float) -> str:
        """Return how a value compares with the last one, whose place it takes, and with the best one."""
        last, self._last[name] = self._last.get(name, math.nan), value
        arrow = "↑" if value > last else "↓" if value < last else "=" if value == last else ""
        is_best = value == self.state.best_metrics.get(name) and value != self._best_before.get(name)
        return f"{arrow} best" if arrow and is_best else arrow


def _fold(head: str, cells: Sequence[str], columns: int | None) -> str:
    """Return the cells in one line, or below one another where that would be wider than a terminal."""
    lines = [head]
    for cell in cells:
        if columns is not None and len(lines[-1]) + 2 + len(cell) > columns and lines[-1].strip():
            lines.append(" " * len(head))
        lines[-1] += f"  {cell}"
    return "\n".join(line.rstrip() for line in lines)
