"""One line about each evaluation, so that a log without a progress bar tells how the run goes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from accmt.callbacks.base import MainProcessCallback
from accmt.messages import say


class EvaluationReport(MainProcessCallback):
    """Says at each evaluation where the run is, the training loss that was logged last, and the results.

    Args:
        loss_name: The training loss in the rows that are logged.

    Processes: main only.
    """

    order = math.inf

    def __init__(self, loss_name: str = "train_loss") -> None:
        self._loss_name = loss_name
        self._loss: float | None = None

    def on_log(self, values: Mapping[str, float]) -> None:
        """Take the loss out of a row of logged values."""
        self._loss = values.get(self._loss_name, self._loss)

    def on_evaluation_end(self, metrics: Mapping[str, float]) -> None:
        """Say one line."""
        total = self.trainer.estimated_stepping_batches
        of_total = f" of {total:.0f}" if math.isfinite(total) else ""
        known = {} if self._loss is None else {self._loss_name: self._loss}
        values = ", ".join(f"{name} {value:.4g}" for name, value in {**known, **metrics}.items())
        say(f"update {self.state.global_step}{of_total}, epoch {self.state.epoch + 1}: {values}")
