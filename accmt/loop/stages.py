"""The stages after an optimizer step and after an epoch: one list, in which an interrupted run resumes.

A checkpoint stores the index of the next stage. The step snapshot is taken again after each stage that changed
something, so that no stage is repeated or skipped after a failure.
"""

from __future__ import annotations

from collections.abc import Callable

from accmt.errors import DataError, fail
from accmt.loop.evaluation import evaluate_and_count
from accmt.loop.logging import log_row
from accmt.loop.train_step import step_scheduler
from accmt.run import Run
from accmt.run.shutdown import stop_if_requested


def _evaluate_before_training(run: Run) -> bool:
    is_wanted = run.settings.evaluation.eval_when_start and bool(run.val_loaders)
    if is_wanted:
        evaluate_and_count(run, counts=False)
    return is_wanted


def _call_step_hooks(run: Run) -> bool:
    for hook in run.hooks.on_update_end:
        hook()
    return run.snapshot.may_change_in_step_hooks


def _log_step(run: Run) -> bool:
    is_due = run.cadence.log_every > 0 and run.snapshot.made_step and run.cadence.is_log_due(run.state)
    if is_due:
        log_row(run)
    return is_due


def _evaluate_step(run: Run) -> bool:
    # Skipped windows leave the step unchanged: its multiple would be due again.
    if run.cadence.evaluate_every is None or not run.snapshot.made_step:
        return False
    is_due = run.cadence.is_evaluation_due(run.state, run.steps_per_epoch)
    if is_due:
        for before_use in run.features.before_use:
            before_use()
        evaluate_and_count(run)
    return is_due


def _log_epoch(run: Run) -> bool:
    log_row(run)
    return True


def _evaluate_epoch(run: Run) -> bool:
    is_due = run.cadence.is_evaluation_due_at_epoch_end(run.state)
    if is_due:
        evaluate_and_count(run)
    return is_due


def _count_epoch(run: Run) -> bool:
    cadence, state = run.cadence, run.state
    # An epoch without progress towards the run's only limit: the run would never end.
    counts_tokens_only = cadence.max_target_tokens is not None and cadence.max_steps is cadence.max_samples is None
    if cadence.epochs is None and counts_tokens_only and state.target_tokens_seen == 0:
        got = "an epoch without target tokens: its batches are weighted by samples"
        expected = "weights in tokens, from the loss of a transformers model or from the step"
        do = 'return {"loss": mean, "weight": number_of_tokens} from training_step, or use max_samples'
        raise fail(DataError, "training until max_target_tokens", got=got, expected=expected, do=do)
    # Without a limit of epochs, the run would never end. A gradient scaler may skip an epoch's steps at first.
    if cadence.epochs is None and state.epoch_step == 0 and run.accelerator.scaler is None:
        got = "an epoch without an optimizer step: the weights of all its batches are 0"
        raise fail(
            DataError,
            "training until max_steps",
            got=got,
            expected="a batch with a positive weight",
            do="check the data",
        )
    if state.is_last_training_batch:  # otherwise, the run ends within the epoch, which is not counted
        step_scheduler(run, at_epoch_end=True)
        state.count_epoch()
        run.running_averages.end_epoch()
    return True


def _call_epoch_hooks(run: Run) -> bool:
    for hook in run.hooks.on_epoch_end:
        hook()
    return True


STAGES: tuple[Callable[[Run], bool], ...] = (
    _evaluate_before_training,
    _call_step_hooks,
    _log_step,
    _evaluate_step,
    _log_epoch,
    _evaluate_epoch,
    _count_epoch,
    _call_epoch_hooks,
)
"""Each returns whether it may have changed the content of a checkpoint. Checkpoints follow `_evaluate_step` and
`_call_epoch_hooks`; saving is not a stage, because a checkpoint stores the position after it."""

BEFORE_TRAINING = 0
AFTER_STEP = STAGES.index(_call_step_hooks)
AFTER_EPOCH = STAGES.index(_log_epoch)
TRAINING = len(STAGES)
"""All stages are done: training continues with the next accumulation window."""


def evaluate_before_training(run: Run) -> None:
    """Run the first stage, unless the run is resumed from a checkpoint after it."""
    # A run that was interrupted here has evaluated already, and logged the result.
    if run.snapshot.next_stage == BEFORE_TRAINING:
        has_changed = _evaluate_before_training(run)
        run.snapshot.next_stage = TRAINING
        if has_changed:
            run.snapshot.capture(run, TRAINING, compares=True)


def resume_stages(run: Run) -> None:
    """Run the remaining stages of the step or epoch after which the run was interrupted."""
    if run.snapshot.next_stage < AFTER_EPOCH:
        _finish_step(run)
    if run.snapshot.next_stage < TRAINING:
        _finish_epoch(run)


def finish_step(run: Run) -> bool:
    """Run the stages after an accumulation window, and write a checkpoint if one is due.

    Returns:
        Whether training ends here.
    """
    # After the first step: a replica that differs trains on gradients of other weights from here on.
    if run.trained.replicas is not None and run.trained.replicas.is_new:
        run.require_equal_replicas()
    run.snapshot.capture(run, AFTER_STEP, after_step=True)
    return _finish_step(run)


def _finish_step(run: Run) -> bool:
    has_evaluated = _run_stages(run, AFTER_EPOCH)
    if run.snapshot.made_step:
        _save_if_due(run, epoch_ended=False, evaluated=has_evaluated)
    ends_here = run.snapshot.next_stage == AFTER_EPOCH
    stop_if_requested(run)
    return ends_here or (run.interruption.ends_training and run.ends_early)  # its time may be up only now


def finish_epoch(run: Run, *, is_used_up: bool) -> None:
    """Run the stages after an epoch, and write a checkpoint if one is due.

    Args:
        is_used_up: Whether the epoch's data is exhausted; otherwise, the run ends within it.
    """
    run.state.now.is_last_training_batch, run.snapshot.next_stage = is_used_up, AFTER_EPOCH
    _finish_epoch(run)


def _finish_epoch(run: Run) -> None:
    has_evaluated = _run_stages(run, TRAINING)
    run.trained.require_unchanged()
    _save_if_due(run, epoch_ended=run.state.train_step == 0, evaluated=has_evaluated)
    stop_if_requested(run)


def _run_stages(run: Run, end: int) -> bool:
    """Run the remaining stages before `end`, and return whether one of them evaluated."""
    snapshot, evaluations = run.snapshot, run.state.evaluations_done
    for index in range(snapshot.next_stage, end):
        has_changed = STAGES[index](run)
        following = index + 1
        if following == AFTER_EPOCH and not run.ends_here:  # known only now: hooks or an evaluation may end training
            following = TRAINING
        if has_changed:
            # Evaluations and the end of an epoch change attributes of the user that steps do not.
            snapshot.capture(run, following, compares=STAGES[index] not in (_call_step_hooks, _log_step))
        else:
            snapshot.next_stage = following  # the snapshot is still valid
    return run.state.evaluations_done > evaluations


def _save_if_due(run: Run, *, epoch_ended: bool, evaluated: bool) -> None:
    """Save a checkpoint if one is due or requested, unless the losses since the last one are wrong.

    Processes: collective.
    """
    state, cadence, checkpoints = run.state, run.cadence, run.checkpoints
    is_due = cadence.checkpoint_every is not None and cadence.is_checkpoint_due(
        state, run.steps_per_epoch, epoch_ended=epoch_ended, evaluated=evaluated
    )
    for is_checkpoint_due in run.features.is_checkpoint_due:
        is_due = is_checkpoint_due() or is_due
    if is_due or checkpoints.requests:
        for before_use in run.features.before_use:
            before_use()
    if is_due or checkpoints.requests or not checkpoints.is_prepared:
        run.trained.require_unchanged()
        checkpoints.save_requested(run, is_due=is_due)
