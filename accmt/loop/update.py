"""One update: reduce, scale, clip, step, schedule, and begin the next window; each with its hooks."""

from __future__ import annotations

from torch.optim.lr_scheduler import ReduceLROnPlateau

from accmt.loop.reduction import average_gradients
from accmt.loop.run import Run
from accmt.loop.weighting import Window


def finish_window(run: Run, window: Window) -> bool:
    """Make the update of a finished window, and count it.

    Processes: collective.

    Returns:
        Whether there was an update: none where all weights are 0, or where the gradient scaler met inf.
    """
    stepper = run.stepper
    if window.is_unreduced:  # before unscaling, so that all processes find the same inf
        average_gradients(stepper.parameters)
    stepper.unscale()
    factor, samples = run.weighting.close(window)
    stepper.multiply_gradients(factor)
    is_done = step_optimizer(run) if factor > 0 else _skip(run)
    if is_done:
        step_schedule(run, at_epoch_end=False)
    zero_gradients(run)
    run.state.count_samples(samples)
    run.state.count_update(is_skipped=not is_done)
    run.boundary.mark(run, "update" if is_done else "skipped")
    return is_done


def _skip(run: Run) -> bool:
    run.boundary.is_torn = True
    return run.stepper.skip()


def step_optimizer(run: Run) -> bool:
    """Clip the unscaled gradients and let the optimizer step.

    Returns:
        Whether it really stepped.
    """
    optimizer = run.stepper.optimizer
    run.stepper.clip()
    for hook in run.hooks.on_before_optimizer_step:
        hook(optimizer=optimizer)
    run.boundary.is_torn = True
    is_done = run.actions.optimizer_step()
    for hook in run.hooks.on_after_optimizer_step:
        hook(optimizer=optimizer)
    return is_done


def step_schedule(run: Run, *, at_epoch_end: bool) -> None:
    """Advance the schedule if its turn is now: after an update, or after an epoch where the hyper-parameters say so."""
    is_turn = run.settings.hps.step_scheduler_per_epoch == at_epoch_end
    if run.scheduler is not None and is_turn and not isinstance(run.scheduler, ReduceLROnPlateau):
        advance_schedule(run)


def advance_schedule(run: Run) -> None:
    """Advance the schedule by one step."""
    run.boundary.is_torn = True
    for hook in run.hooks.on_before_scheduler_step:
        hook(scheduler=run.scheduler)
    run.scheduler.step()
    for hook in run.hooks.on_after_scheduler_step:
        hook(scheduler=run.scheduler)


def zero_gradients(run: Run) -> None:
    """Begin the next window without gradients."""
    optimizer = run.stepper.optimizer
    for hook in run.hooks.on_before_zero_grad:
        hook(optimizer=optimizer)
    run.actions.zero_grad()
    for hook in run.hooks.on_after_zero_grad:
        hook(optimizer=optimizer)
