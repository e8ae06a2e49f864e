"""One line about each evaluation, so that a log without a progress bar tells how the run goes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from accmt.callbacks.base import MainProcessCallback
from accmt.messages import say


class EvaluationReport(MainProcessCallback):
    """Says after each evaluation where the run is and what the results are.

    Processes: main only.
    """

    order = math.inf

    def on_evaluation_end(self, metrics: Mapping[str, float]) -> None:
        """Say one line; nothing where there are no validation data."""
        if not metrics:
            return
        total = self.trainer.estimated_stepping_batches
        of_total = f" of {total:.0f}" if math.isfinite(total) else ""
        values = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        say(f"update {self.state.global_step}{of_total}, epoch {self.state.epoch + 1}: {values}")
