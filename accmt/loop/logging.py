"""Implements `module.log`: adds values to the current phase, and records where else to show them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from accmt.callbacks import Callback
from accmt.callbacks.progress import ProgressBar
from accmt.errors import ArgumentError, ModuleContractError, explain, fail
from accmt.messages import warn_once
from accmt.metrics.averages import LoggedValues, combine
from accmt.metrics.results import describe
from accmt.options.checks import require_choice
from accmt.options.tracking import Monitor
from accmt.processes import is_main_process
from accmt.run import Run
from accmt.tracking import Tracking

if TYPE_CHECKING:
    from accmt import Trainer
    from accmt.state import TrainingState


_EVALUATIONS = ("sanity_check", "validate", "test")


class Logs:
    """The values that a module logs in a run.

    Attributes:
        of_training: Training values that are not in a row yet.
        of_evaluation: Values of the current validation set.
        shown: The latest values on the progress bar, by name.
        logged: The latest values sent to trackers, by name.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.of_training = LoggedValues()
        self.of_evaluation = LoggedValues()
        self.of_evaluation.close()
        self.shown: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self._trainer = trainer
        self._names_on_bar: set[str] = set()
        self._names_not_logged: set[str] = set()

    def log(
        self,
        name: str | Mapping[str, Any],
        value: Any,
        step: int | None,
        reduction: str,
        *,
        instant: bool,
        prog_bar: bool,
        logger: bool,
    ) -> None:
        """Log values; see `AcceleratorModule.log`."""
        require_choice("reduction", reduction, ("mean", "sum"))
        values: Mapping[Any, Any] = name if isinstance(name, Mapping) else {name: value}
        if isinstance(name, Mapping) and value is not None:
            got, do = "a dict of values and a single value", "self.log(name, value), or self.log({name: value})"
            raise fail(ArgumentError, "log", got=got, expected="one of the two", do=do)
        # No row is written while predicting: the value would appear in the next training row.
        if self._state.stage == "predict" and not instant:
            do = "return it from predict_step"
            raise fail(
                ModuleContractError,
                "log",
                got="a call in prediction",
                expected="a call in training or evaluation",
                do=do,
            )
        phase = self.of_training
        if instant:
            phase = LoggedValues()
        elif self._state.stage in _EVALUATIONS:
            phase = self.of_evaluation
        settings = self._trainer.settings.tracking
        for own_name, own_value in values.items():
            if not isinstance(own_name, str) or not own_name.strip():
                got, do = f"the name {describe(own_name)}", 'self.log("name", value)'
                raise fail(ModuleContractError, "log", got=got, expected="a string", do=do)
            # Two values of one name in a row: the chart would show whichever came last.
            if own_name in (settings.train_loss_metric_name, settings.val_loss_metric_name):
                got = "the name of a loss, which accmt logs itself"
                do = 'remove the call and return {"loss": loss} from the step, or rename the value'
                raise fail(ModuleContractError, f"log({own_name!r}, ...)", got=got, expected="another name", do=do)
            phase.add(own_name, own_value, is_total=reduction == "sum")
        if prog_bar:
            self._names_on_bar.update(values)
        if not logger:
            self._names_not_logged.update(values)
        if instant:
            row = combine([phase.take()])
            row_step = self._state.global_step if step is None else step
            if self._state.fn == "fit":  # otherwise, no log is open
                for hook in self._trainer.run.hooks.on_log:
                    hook(values=row, step=row_step)
        # A value with a step of its own would be averaged into the row of another step.
        elif step is not None:
            expected = "step only with instant=True: other values are logged in the row of a step"
            raise fail(ArgumentError, f"log({name!r}, ...)", got=f"step={step!r}", expected=expected, do="remove step")

    def show(self, names: Iterable[str]) -> None:
        """Show values of these names on the progress bar."""
        self._names_on_bar.update(names)

    def media(self, method: str) -> Any:
        """Return the current log of images, tables and files.

        Args:
            method: The method called, for the warning if no run is training.

        Returns:
            None on other processes, in the trial evaluation, and if no run is training.
        """
        # Images of the trial before training would be the first of the run.
        if not is_main_process() or self._state.stage == "sanity_check":
            return None
        run = self._trainer._run
        media = None if run is None else run.tracking.media
        if media is None:
            got = "a call outside training: trackers are closed"
            do = "call it before fit ends, for example in on_fit_end"
            warn_once(explain(method, got, "a call during fit", do), about=f"{method} while nothing is trained")
        return media

    def of_bar(self, row: Mapping[str, float]) -> dict[str, float]:
        """Return the values of a row for the progress bar."""
        self.shown |= {name: value for name, value in row.items() if _has_name(self._names_on_bar, name)}
        return self.shown

    def of_trackers(self, row: Mapping[str, float]) -> dict[str, float]:
        """Return the values of a row for trackers."""
        values = {name: value for name, value in row.items() if not _has_name(self._names_not_logged, name)}
        self.logged |= values
        return values

    @property
    def _state(self) -> TrainingState:
        return self._trainer.state


class SilentLogs(Logs):
    """Drops the values that a module logs in a trial."""

    def log(self, name: str | Mapping[str, Any], value: Any, *_: Any, **__: Any) -> None:
        """Drop values."""

    def media(self, method: str) -> None:
        """Drop images, tables and files."""


def _has_name(names: set[str], name: str) -> bool:
    """Return whether a value has one of these names, possibly followed by the key of a validation set."""
    end = name.find("__")
    while end >= 0 and name[:end] not in names:
        end = name.find("__", end + 1)
    return end >= 0 or name in names


def logging_step(step: Callable[[Any], Any], logged: LoggedValues) -> Callable[[Any], Any]:
    """Return a training step whose logged values get the weight of its batch."""

    def begin_and_step(batch: Any) -> Any:
        logged.begin_batch()
        return step(batch)

    return begin_and_step


# ---- Log rows, and their way to trackers and the progress bar


def log_row(run: Run) -> None:
    """Log the training values since the last row; a non-finite loss is logged unchanged, then handled.

    Processes: collective.
    """
    loss_name = run.settings.tracking.train_loss_metric_name
    for before_row in run.features.before_row:
        before_row()
    riders = [exchange() for exchange in run.features.exchange]
    row = run.running_averages.take_row(loss_name, riders)
    if not row:
        return
    if run.state.skipped_steps:
        row["skipped_steps"] = run.state.skipped_steps
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
    """Sends every row to the trackers and its `prog_bar` values to the progress bar.

    Args:
        bar: The progress bar; None without one.
        monitor: The losses and metrics to send to trackers.
    """

    order = math.inf

    def __init__(self, tracking: Tracking, bar: ProgressBar | None, monitor: Monitor) -> None:
        self._tracking = tracking
        self._bar = bar
        self._monitor = monitor

    def on_log(self, values: Mapping[str, float], step: int) -> None:
        """Log one row."""
        shown = self.module.logs.of_bar(values)
        if self._bar is not None:
            self._bar.show(shown)
        wanted = {name: value for name, value in values.items() if self._is_wanted(name)}
        row = self.module.logs.of_trackers(wanted)
        if row:
            self._tracking.log(row, step)

    def on_fit_end(self) -> None:
        """Log the values after the last row, such as those logged in `on_epoch_end`."""
        run = self.trainer.run
        if self.state.finished:  # otherwise, processes may be out of step
            row = run.running_averages.take_row(run.settings.tracking.train_loss_metric_name)
            if row:
                for hook in run.hooks.on_log:
                    hook(values=row, step=self.state.global_step)
        self.module.logs.of_training.close()

    def _is_wanted(self, name: str) -> bool:
        settings = self.trainer.settings.tracking
        if not self.state.now.is_evaluating:
            return self._monitor.train_loss or name != settings.train_loss_metric_name
        is_loss = name.split("__")[0] == settings.val_loss_metric_name
        return self._monitor.validation_loss if is_loss else self._monitor.additional_metrics
