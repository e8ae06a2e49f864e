"""The rows of the log: what is in one, and how it reaches the trackers and the progress bar."""

from __future__ import annotations

import math
from collections.abc import Mapping

from accmt.callbacks import Callback
from accmt.callbacks.progress import ProgressBar
from accmt.options.monitor import Monitor
from accmt.run import Run
from accmt.tracking import Tracking


def log_row(run: Run) -> None:
    """Log the training values since the last row; a loss that is not finite is logged as it is, and reacted to.

    Processes: collective.
    """
    loss_name = run.settings.tracking.train_loss_metric_name
    for before_row in run.features.before_row:
        before_row()
    row = run.running_averages.take_row(loss_name)
    if not row:
        return
    if run.state.skipped_updates:
        row["skipped_updates"] = run.state.skipped_updates
    if run.state.target_tokens_seen:
        row["target_tokens_seen"] = run.state.target_tokens_seen
    if run.state.skipped_batches:
        row["skipped_batches"] = run.state.skipped_batches
    for add_to_row in run.features.add_to_row:
        add_to_row(row)
    for hook in run.hooks.on_log:
        hook(values=row, step=run.state.global_step)
    for after_row in run.features.after_row:
        after_row(row)


class RowLogger(Callback):
    """Hands every row to the trackers, and what of it is to be seen there to the progress bar.

    Args:
        monitor: Which losses and metrics trackers get.
    """

    order = math.inf

    def __init__(self, tracking: Tracking, bar: ProgressBar, monitor: Monitor) -> None:
        self._tracking = tracking
        self._bar = bar
        self._monitor = monitor

    def on_log(self, values: Mapping[str, float], step: int) -> None:
        """Log one row."""
        self._bar.show(self.module.logs.of_bar(values))
        wanted = {name: value for name, value in values.items() if self._is_wanted(name)}
        row = self.module.logs.of_trackers(wanted)
        if row:
            self._tracking.log(row, step)

    def on_fit_end(self) -> None:
        """Log what came after the last row, such as values that `on_epoch_end` logged."""
        run = self.trainer.run
        if self.state.finished:  # else processes may no longer be together
            row = run.running_averages.take_row(run.settings.tracking.train_loss_metric_name)
            for hook in run.hooks.on_log if row else ():
                hook(values=row, step=self.state.global_step)
        self.module.logs.of_training.close()

    def _is_wanted(self, name: str) -> bool:
        settings = self.trainer.settings.tracking
        if not self.state.now.is_evaluating:
            return self._monitor.train_loss or name != settings.train_loss_metric_name
        is_loss = name.split("__")[0] == settings.val_loss_metric_name
        return self._monitor.validation_loss if is_loss else self._monitor.additional_metrics
