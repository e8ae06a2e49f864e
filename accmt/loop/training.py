"""One epoch of training: rounds of batches, gathered in windows, each of which ends in one update."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from accmt.data import Round, derive_seed, seed_generators
from accmt.errors import DataError, ModuleContractError, explain
from accmt.loop.evaluation import evaluate_and_count
from accmt.loop.outputs import TrainingOutput, read_training_output
from accmt.loop.reduction import average_gradients
from accmt.loop.run import Run
from accmt.loop.weighting import Weight, Window
from accmt.processes import num_processes, process_index


def train_epoch(run: Run) -> None:
    """Train until the epoch, or the run, ends."""
    state = run.state
    _begin_epoch(run)
    window: Window | None = None
    for round_ in run.train_loader.rounds(state.epoch, first=state.train_step):
        window = window or _open_window(run, round_)
        state.now.is_last_training_batch = round_.is_last
        ends_window = round_.is_last or window.rounds_done + 1 == window.num_rounds
        train_round(run, window, round_, ends_window=ends_window)
        if not ends_window:
            continue
        finish_window(run, window)
        window = None
        after_update(run)
        if run.cadence.is_out_of_steps(state):
            break
    if state.train_step == 0:
        expected, do = "at least one batch", "look at the data, at the sampler, or at dataloader_drop_last"
        raise DataError(explain("the training data", "an epoch without a batch", expected, do))


def _begin_epoch(run: Run) -> None:
    state = run.state
    state.grad_accum_steps = run.settings.optimization.accumulation_at(state.epoch)
    state.now.stage = "train"
    state.now.is_last_epoch = run.cadence.is_last_epoch(state, run.updates_per_epoch(state.epoch))
    run.unwrapped_model.train()
    for hook in run.hooks.on_epoch_start:
        hook()


def _open_window(run: Run, first: Round) -> Window:
    loader, accumulation = run.train_loader, run.state.grad_accum_steps
    end = first.index + accumulation
    if loader.num_rounds is not None:
        end = min(end, loader.num_rounds)
    samples = loader.samples_in(first.index, end)
    if samples is None and accumulation == 1:
        samples = first.num_samples
    return Window(num_rounds=end - first.index, known_samples=None if run.counts_own_samples else samples)


def train_round(run: Run, window: Window, round_: Round, *, ends_window: bool) -> None:
    """Run forward and backward of one batch on every process.

    Gradients are reduced over processes in the last round of a window only. A round in which some process has no batch
    runs without any communication; its window's gradients are reduced by hand afterwards.
    """
    if round_.is_partial:
        window.is_unreduced = True
        with run.using_unwrapped_model():
            _train_own_batch(run, window, round_)
    elif ends_window or num_processes() == 1:
        _train_own_batch(run, window, round_)
    else:
        with run.accelerator.no_sync(run.model):
            _train_own_batch(run, window, round_)
    window.rounds_done += 1
    run.state.count_batch()


def _train_own_batch(run: Run, window: Window, round_: Round) -> None:
    if round_.batch is not None:
        _train_batch(run, window, round_)
    elif run.weighting.is_explicit is None:
        run.weighting.decide(None, is_explicit=False)


def _train_batch(run: Run, window: Window, round_: Round) -> None:
    hooks = run.hooks
    batch = run.place(round_.batch)
    seed_generators(derive_seed(run.seed, "step", run.state.epoch, round_.index, process_index()), run.device)
    for hook in hooks.on_before_training_step:
        hook(batch=batch)
    with run.autocast():
        outputs = run.training_step(batch)
    output = read_training_output(outputs)
    weight = _weigh(run, window, round_, batch, output)
    for hook in hooks.on_before_backward:
        hook(loss=output.loss)
    factor = run.weighting.loss_factor(window, weight)
    is_one = isinstance(factor, float) and factor == 1.0
    run.actions.backward(output.loss if is_one else output.loss * factor)
    for hook in hooks.on_after_backward:
        hook(loss=output.loss)
    run.window.add(output.loss.detach(), weight, output.others)
    for hook in hooks.on_after_training_step:
        hook(batch=batch, outputs=outputs)


def _weigh(run: Run, window: Window, round_: Round, batch: Any, output: TrainingOutput) -> Weight:
    samples = run.count_samples(round_, batch)
    has_weight = output.weight is not None
    weight = samples if output.weight is None else output.weight
    if run.weighting.is_explicit is None:
        run.weighting.decide(weight, is_explicit=has_weight)
    if has_weight != run.weighting.is_explicit:
        got = (
            '"weight" in this batch but not in the first'
            if has_weight
            else '"weight" in the first batch but not in this one'
        )
        do = 'return {"loss": loss, "weight": weight} from every training_step, or from none'
        raise ModuleContractError(explain("training_step", got, "weights for all batches or for none", do))
    window.add(weight, samples)
    return weight


def finish_window(run: Run, window: Window) -> None:
    """Make the update of a window: reduce, scale, clip, step, and count it."""
    stepper = run.stepper
    stepper.unscale()
    if window.is_unreduced:
        average_gradients(stepper.parameters)
    factor, samples = run.weighting.close(window)
    is_done = False
    if factor > 0:
        stepper.multiply_gradients(factor)
        stepper.clip()
        is_done = _step_optimizer(run)
    if is_done:
        step_schedule(run, at_epoch_end=False)
    for hook in run.hooks.on_before_zero_grad:
        hook(optimizer=stepper.optimizer)
    run.actions.zero_grad()
    for hook in run.hooks.on_after_zero_grad:
        hook(optimizer=stepper.optimizer)
    run.state.count_update(samples, is_skipped=not is_done)
    for hook in run.hooks.on_update_end:
        hook()


def _step_optimizer(run: Run) -> bool:
    optimizer = run.stepper.optimizer
    for hook in run.hooks.on_before_optimizer_step:
        hook(optimizer=optimizer)
    is_done = run.actions.optimizer_step()
    for hook in run.hooks.on_after_optimizer_step:
        hook(optimizer=optimizer)
    return is_done


def step_schedule(run: Run, *, at_epoch_end: bool) -> None:
    """Advance the schedule if its turn is now: after an update, or after an epoch where the hyper-parameters say so."""
    scheduler = run.scheduler
    is_turn = run.settings.hps.step_scheduler_per_epoch == at_epoch_end
    if scheduler is None or not is_turn or isinstance(scheduler, ReduceLROnPlateau):
        return
    for hook in run.hooks.on_before_scheduler_step:
        hook(scheduler=scheduler)
    scheduler.step()
    for hook in run.hooks.on_after_scheduler_step:
        hook(scheduler=scheduler)


def after_update(run: Run) -> None:
    """Do what is due after an update: a row of the log, an evaluation."""
    state = run.state
    if run.cadence.is_log_due(state):
        log_row(run)
    if run.cadence.is_evaluation_due(state, run.updates_per_epoch(state.epoch)):
        evaluate_and_count(run)


def log_row(run: Run) -> None:
    """Log the training values since the last row.

    Processes: collective.
    """
    row = run.window.take_row(run.settings.tracking.train_loss_metric_name)
    if row:
        for hook in run.hooks.on_log:
            hook(values=row, step=run.state.global_step)
