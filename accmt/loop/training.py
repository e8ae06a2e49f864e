"""One epoch of training: round after round, and what is due after each update."""

from __future__ import annotations

import math

from accmt.errors import DataError, explain
from accmt.loop.evaluation import evaluate_and_count
from accmt.loop.manual import ManualSteps
from accmt.loop.run import Run
from accmt.loop.windows import Windows
from accmt.messages import warn_once
from accmt.module import ExtendedAcceleratorModule


def train_epoch(run: Run) -> bool:
    """Train until the epoch, or the run, ends.

    Returns:
        Whether the epoch's data are used up.
    """
    state = run.state
    state.grad_accum_steps = run.accumulation_at(state.epoch)
    state.now.stage = "train"
    state.now.is_last_epoch = run.cadence.is_last_epoch(state, run.updates_per_epoch(state.epoch))
    if not run.unwrapped_model.training:  # else the user's own choice of modes stands
        run.unwrapped_model.train()
    for hook in run.hooks.on_epoch_start:
        hook()
    module = run.module
    rounds = ManualSteps(run, module) if isinstance(module, ExtendedAcceleratorModule) else Windows(run)
    is_used_up = True  # as it is where a checkpoint was written after the last update of an epoch
    for round_ in run.train_loader.rounds(state.epoch, first=state.train_step):
        state.now.is_last_training_batch = is_used_up = round_.is_last
        if rounds.train(round_):
            _after_update(run)
        if run.cadence.is_out_of_steps(state) or run.is_out_of_patience:
            break
    if state.train_step == 0:
        expected, do = "at least one batch", "look at the data, at the sampler, or at dataloader_drop_last"
        raise DataError(explain("the training data", "an epoch without a batch", expected, do))
    return is_used_up


def _after_update(run: Run) -> None:
    state = run.state
    if run.cadence.is_log_due(state):
        log_row(run)
    is_evaluation_due = run.cadence.is_evaluation_due(state, run.updates_per_epoch(state.epoch))
    if is_evaluation_due:
        evaluate_and_count(run)
    run.checkpoints.save_if_due(run, evaluated=is_evaluation_due)


def log_row(run: Run) -> None:
    """Log the training values since the last row.

    Processes: collective.
    """
    loss_name = run.settings.tracking.train_loss_metric_name
    row = run.window.take_row(loss_name)
    if not row:
        return
    if not math.isfinite(row[loss_name]):
        do = "lower the learning rate, or pass clip_grad=1.0"
        warn_once(f"{loss_name} is {row[loss_name]} at update {run.state.global_step}: {do}", about=loss_name)
    if run.state.skipped_updates:
        row["skipped_updates"] = run.state.skipped_updates
    for hook in run.hooks.on_log:
        hook(values=row, step=run.state.global_step)
