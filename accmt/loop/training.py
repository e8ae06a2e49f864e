"""One epoch of training: micro-batch after micro-batch, and what is due after each update."""

from __future__ import annotations

import math

from accmt.errors import DataError, explain
from accmt.loop.bad_sample_counts import count_bad_samples, tell_bad_samples
from accmt.loop.evaluation import evaluate_and_count
from accmt.loop.manual import ManualSteps
from accmt.loop.train_step import Windows
from accmt.module import ExtendedAcceleratorModule
from accmt.recovery.loss_guard import check_losses
from accmt.recovery.shutdown import stop_if_requested
from accmt.recovery.step_snapshot import Due
from accmt.run import Run


def train_epoch(run: Run) -> bool:
    """Train until the epoch, or the run, ends.

    Returns:
        Whether the epoch's data are used up.
    """
    state = run.state
    run.loaders.reload_if_due()
    state.grad_accum_steps = run.accumulation_at(state.epoch)
    state.now.stage = "train"
    state.now.is_last_epoch = run.cadence.is_last_epoch(state, run.updates_per_epoch(state.epoch))
    if not run.unwrapped_model.training:  # else the user's own choice of modes stands
        run.unwrapped_model.train()
    for hook in run.hooks.on_epoch_start:
        hook()
    run.trained.find_parameters()
    module = run.module
    trained = ManualSteps(run, module) if isinstance(module, ExtendedAcceleratorModule) else Windows(run)
    is_used_up = True  # as it is where a checkpoint was written after the last update of an epoch
    for micro_batch in run.train_loader.micro_batches(state.epoch, first=state.train_step):
        state.now.is_last_training_batch = is_used_up = micro_batch.is_last
        count_bad_samples(run, micro_batch)
        trained.train(micro_batch)
        if run.boundary.due is not None:
            finish_update(run)
        if run.cadence.is_out_of_steps(state) or run.ends_early:
            break
    if state.train_step == 0:
        expected, do = "at least one batch", "look at the data, at the sampler, or at dataloader_drop_last"
        raise DataError(explain("the training data", "an epoch without a batch", expected, do))
    return is_used_up


def finish_update(run: Run) -> None:
    """Do what follows a window: hooks, and after an update the log, the evaluation and the checkpoint that are due."""
    is_update = run.boundary.due != "skipped"
    if run.boundary.due != "evaluation":
        _tell_update(run, is_update=is_update)
    evaluated = is_update and _log_and_evaluate(run)
    ends_training = run.cadence.is_out_of_steps(run.state) or run.ends_early
    due: Due | None = "epoch" if ends_training else None
    if evaluated or run.hooks.on_update_end or run.cadence.is_log_due(run.state):
        run.boundary.mark(run, due)
    else:
        run.boundary.due = due  # nothing has moved since the update
    if is_update:
        save_if_due(run, evaluated=evaluated)
    stop_if_requested(run)


def _tell_update(run: Run, *, is_update: bool) -> None:
    for hook in run.hooks.on_update_end:
        hook()
    if is_update and run.hooks.on_update_end:
        run.boundary.mark(run, "evaluation")  # what these hooks have moved is not to be moved again


def _log_and_evaluate(run: Run) -> bool:
    state = run.state
    if run.cadence.is_log_due(state):
        log_row(run)
    is_evaluation_due = run.cadence.is_evaluation_due(state, run.updates_per_epoch(state.epoch))
    if is_evaluation_due:
        check_losses(run)
        evaluate_and_count(run)
    return is_evaluation_due


def save_if_due(run: Run, *, epoch_ended: bool = False, evaluated: bool = False) -> None:
    """Save a checkpoint if one is due here, unless the losses since the last one are wrong.

    Processes: collective.
    """
    if run.checkpoints.is_due(run, epoch_ended=epoch_ended, evaluated=evaluated):
        check_losses(run)
    run.checkpoints.save_if_due(run, epoch_ended=epoch_ended, evaluated=evaluated)


def log_row(run: Run) -> None:
    """Log the training values since the last row; a loss that is not finite is logged as it is, and reacted to.

    Processes: collective.
    """
    loss_name = run.settings.tracking.train_loss_metric_name
    tell_bad_samples(run)
    row = run.running_averages.take_row(loss_name)
    if not row:
        return
    if run.state.skipped_updates:
        row["skipped_updates"] = run.state.skipped_updates
    if run.state.bad_samples:
        row["bad_samples"] = run.state.bad_samples
    for hook in run.hooks.on_log:
        hook(values=row, step=run.state.global_step)
    if run.guard.looks_at_every_row or not math.isfinite(row.get(loss_name, 0.0)):
        check_losses(run)
