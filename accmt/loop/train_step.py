"""Forward and backward of micro-batches in accumulation windows, each of which ends in an optimizer step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accmt.data import MicroBatch, Window, derive_seed, seed_generators
from accmt.engine.base import Engine
from accmt.engine.model_calls import require_call
from accmt.errors import ModuleContractError, fail
from accmt.loop.step_outputs import TrainingOutput, may_return_none, read_training_output, read_weight
from accmt.messages import say_once
from accmt.metrics.averages import Weight
from accmt.precisions import autocast, is_reduced
from accmt.processes import data_index, num_data_processes
from accmt.run import Run
from accmt.run.weighting import AccumulationWindow
from accmt.state import Place

# ---- The optimizer step: reduce, scale, clip, step, scheduler, zero_grad; each with its hooks


def finish_window(run: Run, window: AccumulationWindow) -> tuple[int, bool]:
    """Make the optimizer step of a finished window.

    The step is skipped if all weights are 0 or the gradient scaler found inf.

    Processes: collective.

    Returns:
        The samples of the window on all processes, and whether the step was made.

    Raises:
        Restart: A feature restarts the run.
    """
    stepper = run.stepper
    for before_optimizer_step in run.features.before_optimizer_step:
        before_optimizer_step(window)
    run.engine.reduce_gradients()  # before unscaling, so that all processes find the same inf
    scaler = run.accelerator.scaler
    # Before clipping and hooks, which see gradients of the true size.
    if scaler is not None:
        stepper.unscale()
    factor, samples = run.weighting.close(window)
    if factor != 1.0:
        stepper.multiply_gradients(factor)
    for on_gradients in run.features.on_gradients:
        on_gradients()
    allowing = run.features.allows_step
    if factor > 0 and (not allowing or all(allows_step(window) for allows_step in allowing)):
        made_step = step_optimizer(run)
    else:
        run.snapshot.invalidate()
        made_step = stepper.skip()
    if not made_step:
        for on_skipped_step in run.features.on_skipped_step:
            on_skipped_step(window)
    # A skipped step keeps its learning rate: torch warns if a scheduler steps before its optimizer.
    if made_step and run.scheduler is not None:
        step_scheduler(run, at_epoch_end=False)
    zero_gradients(run)
    if run.weighting.is_explicit:
        run.state.count_target_tokens(round(window.total_weight))
    if window.skipped_batches:
        run.state.count_skipped_batches(window.skipped_batches)
    return samples, made_step


def step_optimizer(run: Run) -> bool:
    """Clip the unscaled gradients and make the optimizer step.

    Returns:
        Whether the step was made.
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
    """Advance the scheduler if it is due: after a step, or after an epoch with `step_scheduler_per_epoch`.

    It stays at its end: with reloaded loaders, a run may have more steps than planned.
    """
    is_turn = run.settings.hps.step_scheduler_per_epoch == at_epoch_end
    is_at_end = not at_epoch_end and run.total_steps is not None and run.state.global_step >= run.total_steps
    if run.scheduler is not None and is_turn and not is_at_end and not isinstance(run.scheduler, ReduceLROnPlateau):
        advance_scheduler(run)


def advance_scheduler(run: Run, scheduler: Any = None) -> None:
    """Advance the scheduler, or one of several, by one step."""
    scheduler = run.scheduler if scheduler is None else scheduler
    run.snapshot.invalidate()
    for hook in run.hooks.on_before_scheduler_step:
        hook(scheduler=scheduler)
    scheduler.step()
    for hook in run.hooks.on_after_scheduler_step:
        hook(scheduler=scheduler)


def zero_gradients(run: Run) -> None:
    """Clear the gradients for the next window."""
    optimizer = run.stepper.optimizer
    for hook in run.hooks.on_before_zero_grad:
        hook(optimizer=optimizer)
    run.actions.zero_grad()
    for hook in run.hooks.on_after_zero_grad:
        hook(optimizer=optimizer)


class AutomaticSteps:
    """Trains the micro-batches of one epoch.

    What cannot change within an epoch is looked up once: with small models, every look-up matters.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._engine = engine = run.engine
        self._is_alone = num_data_processes() == 1
        self._data_index = data_index()
        self._no_sync = engine.no_sync
        self._begins_windows = type(engine).begin_window is not Engine.begin_window
        self._ends_micro_batches = type(engine).end_micro_batch is not Engine.end_micro_batch
        self._train_unit = self._try_batch if run.features.recovers_from else self._train_batch
        self._is_on_device = run.device.type != "cpu"
        self._needs_context = is_reduced(run.accelerator) or not self._is_alone
        self._check_backward = engine.first_backward_check()
        self._may_leave_out = may_return_none(run.module)
        self._varies = run.accumulation_at(run.state.epoch) is None
        if run.settings.hps.max_tokens is not None:
            engine.require_accumulating("max_tokens, which splits")
        elif self._varies:
            engine.require_accumulating(f"as many batches as {run.settings.optimization.window_maker!r} decides")
        elif run.state.grad_accum_steps > 1:
            engine.require_accumulating(f"{run.state.grad_accum_steps} micro-batches")

    def train(self, planned: Window) -> bool:
        """Run forward and backward of a window's micro-batches on every process, and make its optimizer step.

        Every process runs equally many, so the wrapper of the model reduces gradients in the last one as in any other
        window. A sharded model reduces them in each. A process without samples runs another's batch with a loss of 0.

        Processes: collective.

        Returns:
            True: the window is finished.
        """
        run, state, num_units = self._run, self._run.state, planned.num_units
        if self._begins_windows:
            self._engine.begin_window()
        if self._varies:
            state.grad_accum_steps = num_units
        samples_before, skips_window = state.samples_seen, run.features.skips_window
        window = AccumulationWindow(
            known_samples=None if run.counts_own_samples or self._may_leave_out else planned.num_samples,
            is_one_batch=self._is_alone and num_units == 1,
            samples_before=samples_before,
            is_skipped=bool(skips_window) and any(skips(samples_before) for skips in skips_window),
        )
        for number, micro_batch in enumerate(planned.units, 1):
            is_full = number == num_units or micro_batch.is_last  # in this order: `is_last` may read on
            state.now.is_last_training_batch = micro_batch.ending
            state.now.ends_step = is_full if self._varies or micro_batch.cut is not None else None
            for before_batch in run.features.before_batch:
                before_batch(micro_batch)
            if window.is_skipped:
                if micro_batch.batch is not None:
                    window.add(0.0, run.count_samples(micro_batch, micro_batch.batch))
            elif is_full or self._no_sync is None:
                self._train_unit(window, micro_batch)
            else:
                with self._no_sync():  # the last micro-batch of the window reduces all gradients
                    self._train_unit(window, micro_batch)
            if self._ends_micro_batches:
                self._engine.end_micro_batch(micro_batch)
            state.count_batch(micro_batch.num_finished)
        if window.is_skipped:  # counts as one without an optimizer step
            samples, made_step = run.weighting.close(window)[1], False
        else:
            samples, made_step = finish_window(run, window)
        state.count_samples(samples)
        state.count_step(is_skipped=not made_step)
        run.snapshot.made_step = made_step
        for after_window in run.features.after_window:
            after_window(made_step=made_step)
        return True

    def _try_batch(self, window: AccumulationWindow, micro_batch: MicroBatch) -> None:
        """Train on a batch; after a failure from which the run recovers, this process waits for the window's end."""
        try:
            if window.has_failed:
                self._decide_without_weight()
            else:
                self._train_batch(window, micro_batch)
        except Exception as error:
            if not any(recovers_from(error) for recovers_from in self._run.features.recovers_from):
                raise
            # The other processes need this one in each collective of the window: it goes on without training.
            window.has_failed = True
            self._decide_without_weight()  # the other processes decide at their first batch

    def _train_batch(self, window: AccumulationWindow, micro_batch: MicroBatch) -> None:
        if micro_batch.batch is None:
            self._train_without_samples(micro_batch)
            return
        run, hooks = self._run, self._run.hooks
        batch = run.place(micro_batch.batch) if self._is_on_device else micro_batch.batch
        seed = micro_batch.seed_of_step(run.seed, "step", run.state.epoch, data_index=self._data_index)
        seed_generators(seed, run.device)
        for hook in hooks.on_before_training_step:
            hook(batch=batch)
        step = run.training_step
        if self._needs_context:
            step = partial(self._run_in_context, context=self._engine.running(micro_batch))
        outputs = run.features.call_training_step(step, batch, read=micro_batch.batch)
        if outputs is None and self._may_leave_out:
            self._leave_out(window, micro_batch, batch)
            return
        output = read_training_output(outputs)
        loss, detached = output.loss, output.loss.detach()
        weight, values_weight = _weigh(run, window, micro_batch, batch, output)
        for hook in hooks.on_before_backward:
            hook(loss=loss)
        factor = 1.0 if window.is_one_batch else run.weighting.loss_factor(window, weight)
        for scale_loss in run.features.scale_loss:
            factor = scale_loss(window, loss, factor)
        is_known = not isinstance(factor, torch.Tensor)  # without waiting for the device
        is_zero = is_known and factor == 0.0
        if is_zero:
            if not self._is_alone:  # the other processes reduce gradients now, so this one must too
                self._backward_of_zero(loss)
        else:
            run.actions.backward(loss if is_known and factor == 1.0 else loss * factor)
        made_backward = not (is_zero and self._is_alone)
        if made_backward and self._check_backward is not None and self._check_backward():
            self._check_backward = None  # checked before hooks, which may drop gradients
        for hook in hooks.on_after_backward:
            hook(loss=loss)
        state = run.state
        place = Place(state.global_step + 1, state.epoch, micro_batch.index, window.samples_before)
        run.running_averages.add(detached, weight, output.values, values_weight)
        for after_batch in run.features.after_batch:
            after_batch(detached, weight, place)
        for hook in hooks.on_after_training_step:
            hook(batch=batch, outputs=outputs)

    def _run_in_context(self, batch: Any, context: AbstractContextManager[None]) -> Any:
        with autocast(self._run.accelerator), context:
            try:
                outputs = self._run.training_step(batch)
            except Exception as error:
                self._run.trained.require_unchanged()  # torch would blame unused parameters
                self._engine.add_note(error)
                raise
        # A step that calls `self.unwrapped_model` leaves gradients of this process only: nothing would be averaged.
        if self._engine.calls is not None and outputs is not None:
            require_call(self._engine.calls)
        return outputs

    def _train_without_samples(self, micro_batch: MicroBatch) -> None:
        """Run another process's batch in place of an own one, without hooks; it counts nothing.

        If no process has a batch, because none of its samples could be read, all of them only reduce gradients.
        """
        run = self._run
        if micro_batch.borrowed is None:
            self._engine.calls = None
            self._finish_without_weight(None)
            return
        seed = micro_batch.seed_of_step(run.seed, "step", run.state.epoch, data_index=self._data_index)
        seed_generators(seed, run.device)
        outputs = self._run_in_context(run.place(micro_batch.borrowed.batch), self._engine.running(micro_batch))
        run.module.logs.of_training.drop_batch()  # hooks of the step may log
        is_left_out = outputs is None and self._may_leave_out
        self._finish_without_weight(None if is_left_out else read_training_output(outputs).loss)

    def _leave_out(self, window: AccumulationWindow, micro_batch: MicroBatch, batch: Any) -> None:
        """Count a batch for which the step returned no loss: it has weight 0 and no gradients."""
        run = self._run
        self._finish_without_weight(None)
        window.own_samples += run.count_samples(micro_batch, batch, has_weight=True)
        window.skipped_batches += 1
        run.module.logs.of_training.drop_batch()  # hooks of the step may log
        say_once("training_step returned None: such batches are skipped, and counted in skipped_batches")
        for hook in run.hooks.on_after_training_step:
            hook(batch=batch, outputs=None)

    def _finish_without_weight(self, loss: torch.Tensor | None) -> None:
        """Take part in the others' backward with 0 times the loss of a step, if it has one."""
        self._decide_without_weight()
        self._backward_of_zero(loss)

    def _backward_of_zero(self, loss: torch.Tensor | None) -> None:
        if loss is None or not torch.isfinite(loss):  # as a mean over no targets is: 0 * NaN is NaN
            loss = self._engine.zero_loss()
        if loss is not None:
            self._run.actions.backward(loss * 0.0)

    def _decide_without_weight(self) -> None:
        if self._run.weighting.is_explicit is None:
            self._run.weighting.decide(None, is_explicit=False)


def _reject_own_backward(run: Run, window: AccumulationWindow) -> None:
    """Reject a step that calls backward itself if its gradients would be neither averaged nor scaled.

    DistributedDataParallel averages in the first backward after a forward: a second one adds unaveraged gradients.
    """
    # A single batch needs no factor, so a backward of the step itself changes nothing.
    if window.is_one_batch and run.accelerator.scaler is None:
        return
    # Gradients are None or 0 before the first backward of a run.
    for name, weight in run.unwrapped_model.named_parameters():
        gradient = weight.grad
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.coalesce().values()
        if gradient is not None and bool(gradient.any()):
            got = f"a step that calls backward itself: {name} has a gradient before the loss is returned"
            expected = "a loss: accmt calls backward, and averages gradients over processes and accumulated batches"
            do = "return the whole loss; or derive from ExtendedAcceleratorModule, and call self.backward and self.step"
            raise fail(ModuleContractError, "training_step", got=got, expected=expected, do=do)


def _weigh(
    run: Run, window: AccumulationWindow, micro_batch: MicroBatch, batch: Any, output: TrainingOutput
) -> tuple[Weight, Weight]:
    """Count a batch, and return the weight of its loss, and of the other values that its step returned or logged."""
    loss_weight, targets = output.weight, None
    num_targets = None if micro_batch.cut is None else micro_batch.cut.num_targets
    # A micro-batch without targets has a mean of NaN, whatever weight the step returned.
    if num_targets is not None and (loss_weight is None or not num_targets):
        loss_weight = float(num_targets)  # known without waiting for the device
    if run.features.weigh and run.weighting.is_explicit is not False:
        weight_of_feature = run.features.find_weight(output.loss, is_given=loss_weight is not None)
        targets = read_weight("training_step", weight_of_feature)
        if targets is not None:
            loss_weight = targets
    has_weight = loss_weight is not None
    samples = run.count_samples(micro_batch, batch, has_weight=has_weight)
    weight = samples if loss_weight is None else loss_weight
    if run.weighting.is_explicit is None:
        _reject_own_backward(run, window)
        run.weighting.decide(weight, is_explicit=has_weight)
        for on_first_batch in run.features.on_first_batch:
            on_first_batch(micro_batch.batch, is_hint_wanted=not (has_weight or window.is_one_batch))
    if has_weight != run.weighting.is_explicit:
        # Tokens of some batches and samples of others cannot be added to the total of a window.
        got = '"weight" in the first batch but not in this one'
        if has_weight:
            got = '"weight" in this batch but not in the first'
        do = 'return {"loss": loss, "weight": weight} for every batch or for none'
        raise fail(ModuleContractError, "training_step", got=got, expected="weights for all batches or for none", do=do)
    window.add(weight, samples)
    return weight, weight if targets is None else samples
