"""One line about each evaluation, so that a log without a progress bar shows how the run goes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from accmt.callbacks.base import MainProcessCallback
from accmt.messages import say


class EvaluationReport(MainProcessCallback):
    """Says at each evaluation where the run is, the mean training loss of the epoch until here, and the results.

    Args:
        loss_name: What the training loss is called.

    Processes: main only.
    """

    order = math.inf

    def __init__(self, loss_name: str = "train_loss") -> None:
        self._loss_name = loss_name

    def on_evaluation_end(self, metrics: Mapping[str, float]) -> None:
        total = self.trainer.estimated_stepping_batches
        of_total = f" of {total:.0f}" if math.isfinite(total) else ""
        loss = self.trainer.run.running_averages.epoch_loss
        known = {} if loss is None else {self._loss_name: loss}
        values = ", ".join(f"{name} {value:.4g}" for name, value in {**known, **metrics}.items())
        is_counted = self.state.train_step == 0 and self.state.epoch > 0  # an evaluation after the epoch's end
        epoch = self.state.epoch if is_counted else self.state.epoch + 1
        say(f"step {self.state.global_step}{of_total}, epoch {epoch}: {values}")
