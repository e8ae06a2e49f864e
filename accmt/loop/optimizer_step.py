"""One optimizer step: reduce, scale, clip, step, scheduler, and begin the next window; each with its hooks."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from accmt.data import derive_seed, seed_generators
from accmt.loop.weighting import AccumulationWindow
from accmt.run import Run


def finish_window(run: Run, window: AccumulationWindow) -> None:
    """Make the optimizer step of a finished window, and count it.

    There is none where all weights are 0, or where the gradient scaler met inf.

    Processes: collective.

    Raises:
        Restart: A feature lets another run continue.
    """
    stepper = run.stepper
    for before_optimizer_step in run.features.before_optimizer_step:
        before_optimizer_step(window)
    run.trained.require_unchanged()
    run.engine.reduce_remaining()  # before unscaling, so that all processes find the same inf
    scaler = run.accelerator.scaler
    if scaler is not None:
        stepper.unscale()
    factor, samples = run.weighting.close(window)
    if factor != 1.0:
        stepper.multiply_gradients(factor)
    allowing = run.features.allows_step
    is_wanted = factor > 0 and (not allowing or all(allows_step(window) for allows_step in allowing))
    made_step = step_optimizer(run) if is_wanted else _skip(run)
    for on_skipped_step in () if made_step else run.features.on_skipped_step:
        on_skipped_step(window)
    if made_step and run.scheduler is not None:
        step_scheduler(run, at_epoch_end=False)
    zero_gradients(run)
    if run.weighting.is_explicit:
        run.state.count_target_tokens(round(window.total_weight))
    if window.skipped_batches:
        run.state.count_skipped_batches(window.skipped_batches)
    _count(run, samples, made_step=made_step)


def skip_window(run: Run, window: AccumulationWindow) -> None:
    """Count a window that was not trained on as one without an optimizer step.

    Processes: collective.
    """
    _, samples = run.weighting.close(window)
    _count(run, samples, made_step=False)


def _count(run: Run, samples: int, *, made_step: bool) -> None:
    run.state.count_samples(samples)
    run.state.count_step(is_skipped=not made_step)
    run.snapshot.made_step = made_step


def _skip(run: Run) -> bool:
    run.snapshot.invalidate()
    return run.stepper.skip()


def step_optimizer(run: Run) -> bool:
    """Clip the unscaled gradients and let the optimizer step.

    Returns:
        Whether it really stepped.
    """
    optimizer = run.stepper.optimizer
    if run.stepper.clips:
        run.stepper.clip()
    for hook in run.hooks.on_before_optimizer_step:
        hook(optimizer=optimizer)
    run.snapshot.invalidate()
    if run.stepper.may_draw:  # the same on every process
        seed_generators(derive_seed(run.seed, "optimizer_step", run.state.global_step), run.device)
    is_done = run.actions.optimizer_step()
    for hook in run.hooks.on_after_optimizer_step:
        hook(optimizer=optimizer)
    return is_done


def step_scheduler(run: Run, *, at_epoch_end: bool) -> None:
    """Advance the scheduler if its turn is now: after a step, or after an epoch where the hyper-parameters say so.

    At its end it stays: with loaders that are reloaded a run may have more steps than were planned.
    """
    is_turn = run.settings.hps.step_scheduler_per_epoch == at_epoch_end
    is_at_end = not at_epoch_end and run.total_steps is not None and run.state.global_step >= run.total_steps
    if run.scheduler is not None and is_turn and not is_at_end and not isinstance(run.scheduler, ReduceLROnPlateau):
        advance_scheduler(run)


def advance_scheduler(run: Run, scheduler: Any = None) -> None:
    """Advance the scheduler by one step, or one of several."""
    scheduler = run.scheduler if scheduler is None else scheduler
    run.snapshot.invalidate()
    for hook in run.hooks.on_before_scheduler_step:
        hook(scheduler=scheduler)
    scheduler.step()
    for hook in run.hooks.on_after_scheduler_step:
        hook(scheduler=scheduler)


def zero_gradients(run: Run) -> None:
    """Begin the next window without gradients."""
    optimizer = run.stepper.optimizer
    for hook in run.hooks.on_before_zero_grad:
        hook(optimizer=optimizer)
    run.actions.zero_grad()
    for hook in run.hooks.on_after_zero_grad:
        hook(optimizer=optimizer)
