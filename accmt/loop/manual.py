"""The manual loop: an `ExtendedAcceleratorModule` calls backward and the steps itself, batch by batch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from accmt.data import MicroBatch, derive_seed, seed_generators
from accmt.huggingface.batch_faults import add_note_of_batch
from accmt.loop.optimizer_step import advance_scheduler, step_optimizer, zero_gradients
from accmt.loop.step_outputs import read_further_values
from accmt.messages import say_once, warn
from accmt.module import ExtendedAcceleratorModule
from accmt.parallel.calls import counting_calls, require_call
from accmt.parallel.reduction import average_gradients, broadcast_buffers
from accmt.precision import autocast
from accmt.processes import data_index, num_data_processes, sum_over_data
from accmt.run import Place, Run, require_planned

_NOT_DROPPED = (
    "gradients are added to those that an optimizer has stepped on: call zero_grad after step_optimizer, or before the "
    "next backward. Checkpoints hold no gradients, so none is written from now on; an earlier one resumes without them"
)


class ManualSteps:
    """What the module's `backward`, `step_optimizer`, `step_scheduler` and `zero_grad` do.

    Hooks, clipping, precision and the weights of batches on several processes are those of the automatic loop.

    Args:
        module: Its module, which gets these steps.
    """

    def __init__(self, run: Run, module: ExtendedAcceleratorModule) -> None:
        self._run = run
        self._factor = 1.0
        self._calls: list[None] = []
        self._has_stepped = False
        before: ManualSteps | None = getattr(module, "manual_steps", None)
        if before is None or before._run is not run:
            before = None
        # A step may span two epochs.
        self.has_gradients: bool = before is not None and before.has_gradients
        # Those that an optimizer has stepped on wait for zero_grad only, unless a backward adds to them before it.
        self._has_stepped_on: bool = before is not None and before._has_stepped_on
        self._adds_to_stepped: bool = before is not None and before._adds_to_stepped
        module.manual_steps = self

    def forward_backward(self, micro_batch: MicroBatch) -> bool:
        """Run the training step on every process; it calls backward and the optimizer itself.

        A micro-batch in which some process has no batch is skipped: it could not take part in the others' steps.

        Returns:
            Whether the module made an optimizer step.
        """
        run = self._run
        if micro_batch.is_partial:
            say_once("manual optimization leaves out the last batches of an epoch, which are fewer than the processes")
            if not micro_batch.is_last:  # where data continue, they are counted
                run.state.count_batch()
            return False
        run.trained.update()
        if run.reduces_by_hand:
            broadcast_buffers(run.unwrapped_model)
        run.packing.look(micro_batch.batch)
        batch = run.place(micro_batch.batch)
        own = run.count_samples(micro_batch, batch)
        samples = self._count_over_processes(micro_batch, own)
        self._factor, self._has_stepped = own * num_data_processes() / samples, False
        seed_generators(derive_seed(run.seed, "step", run.state.epoch, micro_batch.index, data_index()), run.device)
        for hook in run.hooks.on_before_training_step:
            hook(batch=batch)
        counting: AbstractContextManager[list[None]]
        counting = counting_calls(run.model) if run.is_wrapped else nullcontext([])
        try:
            with autocast(run.accelerator), counting as self._calls:
                outputs = run.training_step(batch)
        except Exception as error:
            add_note_of_batch(error, run.unwrapped_model, micro_batch.batch)
            raise
        run.packing.require_passed()
        run.trained.require_unchanged()
        is_mapping = isinstance(outputs, Mapping)
        loss = outputs.get("loss") if is_mapping else outputs
        if isinstance(loss, torch.Tensor):
            run.running_averages.add(loss.detach(), own, read_further_values(outputs) if is_mapping else None)
            place = Place(run.state.global_step + 1, run.state.epoch, micro_batch.index, run.state.samples_seen)
            run.guard.add(loss.detach(), own, place)
        for hook in run.hooks.on_after_training_step:
            hook(batch=batch, outputs=outputs)
        run.state.count_batch()
        run.state.count_samples(samples)
        return self._has_stepped

    def optimizer_step(self) -> None:
        """Count the optimizer step that the module has made."""
        self._run.state.count_step()
        self._run.snapshot.made_step = True

    def _count_over_processes(self, micro_batch: MicroBatch, own: int) -> int:
        """Return the samples of a micro-batch: those that were planned, or else the sum of what the batches hold.

        Processes: collective where they were not planned.
        """
        if micro_batch.num_samples is None or self._run.counts_own_samples or num_data_processes() == 1:
            return int(sum_over_data((float(own),))[0])
        require_planned(micro_batch, own)
        return micro_batch.num_samples

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a batch's mean loss, weighted by this process's share of the micro-batch."""
        run = self._run
        self.has_gradients = True
        if self._has_stepped_on and not self._adds_to_stepped:
            self._adds_to_stepped = True
            warn(_NOT_DROPPED)
        for hook in run.hooks.on_before_backward:
            hook(loss=loss)
        if run.is_wrapped:
            require_call(self._calls)
        run.actions.backward(loss if self._factor == 1.0 else loss * self._factor)
        if run.reduces_by_hand:  # whichever optimizer steps next, and what was averaged before stays as it is
            average_gradients(list(run.unwrapped_model.parameters()))
        for hook in run.hooks.on_after_backward:
            hook(loss=loss)

    def step_optimizer(self, *, is_whole: bool = True) -> bool:
        """Unscale, clip and let the optimizer step.

        Args:
            is_whole: Whether there are no gradients of parameters that do not step here.
        """
        self._run.stepper.unscale()
        is_done = step_optimizer(self._run)
        self._has_stepped |= is_done
        if is_whole:
            self._has_stepped_on = True
            self.has_gradients = self._adds_to_stepped
        return is_done

    def step_scheduler(self) -> None:
        """Advance the scheduler, if there is one."""
        if self._run.scheduler is not None:
            advance_scheduler(self._run)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.has_gradients = self._has_stepped_on = False
        zero_gradients(self._run)
