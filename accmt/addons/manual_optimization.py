"""Manual optimization: an `ExtendedAcceleratorModule` calls backward and the steps itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accmt.data import MicroBatch, Window, derive_seed, seed_generators
from accmt.engine.model_calls import require_call
from accmt.engine.reduction import names_without_gradient
from accmt.errors import ModuleContractError, fail
from accmt.libraries.private_names import note_optimizer_step
from accmt.loop.evaluation import call_hooks
from accmt.loop.step_outputs import read_further_values, read_weight
from accmt.loop.train_step import advance_scheduler, step_optimizer, zero_gradients
from accmt.messages import warn, warn_once
from accmt.module import ExtendedAcceleratorModule
from accmt.optimization import needs_closure
from accmt.options.optimizer_and_scheduler_arguments import members_of, weights_of
from accmt.precisions import autocast
from accmt.processes import data_index, num_data_processes, sum_over_data
from accmt.run import EvaluationRun, Run
from accmt.run.features import Feature
from accmt.sharded_tensors import dense_values
from accmt.state import Place

_NOT_DROPPED = (
    "backward adds to gradients that were already used in an optimizer step: call zero_grad after step_optimizer, or "
    "before the next backward. Checkpoints contain no gradients, so no more checkpoints are written from now on"
)
_NOT_WEIGHTED = (
    "an optimizer uses gradients that self.backward did not compute. loss.backward() and accelerator.backward(loss) "
    "weight the batches of all processes equally, regardless of their samples, and do not average over processes if "
    "self.model is a container such as an nn.ModuleDict: call self.backward(loss)"
)
_NO_STEP = (
    "no optimizer of self.optimizers() has stepped: such a run has no steps to count, log or save at. Return what "
    "training_step steps from get_optimizer (several as a list), and access it with self.optimizers()"
)


class ManualOptimization(Feature):
    """Supports modules with manual optimization."""

    name = "manual_optimization"

    def __init__(self, run: Run, module: ExtendedAcceleratorModule) -> None:
        self._run, self._module = run, module
        self._steps = ManualSteps(run, module)
        module.manual_steps = self._steps

    @classmethod
    def for_run(cls, run: EvaluationRun) -> ManualOptimization | None:
        if isinstance(run, Run) and isinstance(run.module, ExtendedAcceleratorModule):
            return cls(run, run.module)
        return None

    @contextmanager
    def during(self) -> Iterator[None]:
        """Count calls of the `step` of the module's optimizers like those of `step_optimizer`."""
        optimizers: dict[Any, None] = dict.fromkeys([self._module.optimizer, *self._module.optimizers()])
        counted_as = {id(optimizer): (optimizer, optimizer) for optimizer in optimizers}
        for optimizer in optimizers:
            # The second step of a SAM is its base's: it counts as one of the SAM, unless that is stepping.
            for part in vars(optimizer).values():
                if isinstance(part, Optimizer):
                    counted_as.setdefault(id(part), (part, optimizer))
        steps = [(stepped, vars(stepped).get("step")) for stepped, _ in counted_as.values()]
        for stepped, counted in counted_as.values():
            stepped.step = MethodType(self._steps.counted(stepped.step), counted)
        try:
            yield
        finally:
            for stepped, step in steps:
                del stepped.step
                if step is not None:  # which a scheduler has set
                    stepped.step = step

    def make_steps(self) -> ManualSteps:
        return self._steps

    def has_unfinished_step(self) -> bool:
        """Return whether there are gradients without an optimizer step yet."""
        return self._steps.has_waiting_gradients()

    def on_training_end(self) -> None:
        # The module steps an optimizer of its own making: nothing is counted, so nothing was saved.
        if self._run.state.global_step == 0 and self._run.state.batch_iteration > 0:
            warn(_NO_STEP)
        self._steps.warn_of_idle_schedulers()

    def why_not_tried(self) -> str:
        return "the module uses manual optimization"


class ManualSteps:
    """Implements the module's `backward`, `step_optimizer`, `step_scheduler` and `zero_grad`.

    Hooks, clipping, precision and the weights of batches on several processes are as in the automatic loop.

    Args:
        module: Its module.
    """

    def __init__(self, run: Run, module: ExtendedAcceleratorModule) -> None:
        self._run, self._module = run, module
        self._optimizers = module.optimizers()
        self._needs_closure = any(map(needs_closure, self._optimizers))
        # Those that have stepped since their gradients were dropped, and those of them that a backward has added to.
        self._used: set[Any] = set()
        self._stale: set[Any] = set()
        self._adds_to_used = False
        self._counts_steps = False  # within training_step, but not within a step
        self._is_borrowed = False  # whether the batch is another process's, which counts nothing
        self._has_stepped = False
        self._stepped: list[Any] = []  # in this batch, by their own `step`
        self._positions: dict[Any, Any] = {}  # of schedulers after the last batch
        self._began: tuple[int, dict[Any, Any]] | None = None  # the step before the first batch, and those positions
        self._advanced_by: dict[Any, Literal["accmt", "module"]] = {}  # who advances each scheduler
        self._factor = self._last_factor = 1.0  # of a loss that weighs samples, and of the last loss
        self._weighs_samples = False  # whether a backward of this batch did
        self._has_called_backward = False
        self._place_in_epoch = 0, 0, 0  # of the batch: epoch, micro-batch, part of the data
        self._num_acts = 0

    def train(self, window: Window) -> bool:
        """Train on a window of one micro-batch, and count the optimizer step if the module made one.

        Returns:
            Whether it did.
        """
        [micro_batch] = window.units
        run = self._run
        if run.state.train_step == 0:  # an epoch and its hooks are over
            self.warn_of_idle_schedulers()
        run.state.now.is_last_training_batch = micro_batch.ending
        for before_batch in run.features.before_batch:
            before_batch(micro_batch)
        self._has_stepped = False
        self._train_batch(micro_batch)
        if self._has_stepped:
            run.state.count_step()
            run.snapshot.made_step = True
        for after_window in run.features.after_window:
            after_window(made_step=self._has_stepped)
        return self._has_stepped

    def _train_batch(self, micro_batch: MicroBatch) -> None:
        """Run the training step on every process; it calls backward and the optimizer itself.

        A process without samples runs another's batch, without hooks and with weight 0.
        """
        run = self._run
        self._is_borrowed = micro_batch.batch is None
        read = (micro_batch.borrowed or micro_batch).batch
        if read is None:  # none of its samples could be read, on any process
            if not micro_batch.is_last:  # where data continue, they are counted
                run.state.count_batch()
            return
        run.engine.begin_window()
        batch = run.place(read)
        num_local = 0
        if not self._is_borrowed:
            num_local = run.count_samples(micro_batch, batch)
        if micro_batch.num_samples is None or run.counts_own_samples or num_data_processes() == 1:
            num_samples = int(sum_over_data((float(num_local),))[0])  # not planned: the sum of what the batches hold
        else:
            num_samples = micro_batch.num_samples
        # Gradients are averaged over processes, so that a loss is weighted by this process's share of the samples.
        self._factor = self._last_factor = num_local * num_data_processes() / num_samples
        self._weighs_samples = False
        self._positions = self._positions or self._find_positions()
        self._began = self._began or (run.state.global_step, dict(self._positions))
        self._place_in_epoch, self._num_acts = (run.state.epoch, micro_batch.index, data_index()), 0
        seed_generators(derive_seed(run.seed, "step", *self._place_in_epoch), run.device)
        if not self._is_borrowed:
            call_hooks(run.hooks.on_before_training_step, batch=batch)
        outputs = self._call_training_step(batch, micro_batch, read)
        is_mapping = isinstance(outputs, Mapping)
        loss = outputs.get("loss") if is_mapping else outputs
        if self._is_borrowed:
            run.module.logs.of_training.begin_batch()  # drops the values logged by the step
        elif isinstance(loss, torch.Tensor):
            step_weight = read_weight("training_step", outputs.get("weight")) if is_mapping else None
            # The gradients are already averaged, by the numbers of samples.
            if step_weight is not None and self._weighs_samples:
                got = '"weight" in the output of the step, after self.backward(loss): too late on several processes'
                expected, do = "the weight in the call of backward", "self.backward(loss, weight=weight)"
                raise fail(ModuleContractError, "training_step", got=got, expected=expected, do=do)
            target_weight = run.features.find_weight(loss, is_given=step_weight is not None)
            further_values = read_further_values(outputs) if is_mapping else None
            weight = further_weight = num_local if step_weight is None else step_weight
            if step_weight is None and target_weight is not None:
                weight = target_weight
            run.running_averages.add(loss.detach(), weight, further_values, further_weight)
            place = Place(run.state.global_step + 1, run.state.epoch, micro_batch.index, run.state.samples_seen)
            for after_batch in run.features.after_batch:
                after_batch(loss.detach(), weight, place)
        if not self._is_borrowed:
            call_hooks(run.hooks.on_after_training_step, batch=batch, outputs=outputs)
        self._advance_schedulers()
        run.state.count_batch()
        run.state.count_samples(num_samples)

    def has_waiting_gradients(self) -> bool:
        """Return whether gradients wait for a step of a later batch, which a checkpoint would lose."""
        waiting = [optimizer for optimizer in self._optimizers if optimizer not in self._used]
        return self._adds_to_used or any(map(_has_gradients, waiting))

    def _call_training_step(self, batch: Any, micro_batch: MicroBatch, read: Any) -> Any:
        run = self._run
        self._counts_steps = True
        try:
            with autocast(run.accelerator), run.engine.running(micro_batch):
                return run.features.call_training_step(run.training_step, batch, read=read)
        except Exception as error:
            run.trained.require_unchanged()  # torch would blame unused parameters
            run.engine.add_note(error)
            raise
        finally:
            self._counts_steps = False

    def counted(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the `step` of an optimizer with clipping, hooks and seeds as in `step_optimizer`."""

        def call(optimizer: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            is_counted = self._counts_steps  # else it is outside of training_step, or within another step
            if is_counted:
                closure = self._begin_step(optimizer, closure)
            self._counts_steps = False
            try:
                result = step(**kwargs) if closure is None else step(closure, **kwargs)
            finally:
                self._counts_steps = is_counted
            if is_counted:
                for hook in self._run.hooks.on_after_optimizer_step:
                    hook(optimizer=optimizer)
                self._seed_for_batch()
                note_optimizer_step(optimizer)  # also where the optimizer inside has stepped
                self._stepped += [optimizer, *members_of(optimizer)]
                self._note_step(optimizer)
            return result

        vars(call).update(getattr(step, "__dict__", {}))  # torch's schedulers mark the steps that they have seen
        return call

    def _begin_step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Do what `step_optimizer` does before a step, and return the closure to step with."""
        run = self._run
        # Clipping and the step itself would see gradients that are thousands of times too large.
        if run.accelerator.scaler is not None:
            got = f"{type(optimizer).__name__}.step() with gradients that are scaled for fp16"
            expected, do = "a step of unscaled gradients", 'self.step_optimizer(optimizer), or mixed_precision="bf16"'
            raise fail(ModuleContractError, "training_step", got=got, expected=expected, do=do)
        self._warn_of_gradients(optimizer)
        if closure is None and run.stepper.clips:
            run.stepper.clip(weights_of(optimizer))
        for hook in run.hooks.on_before_optimizer_step:
            hook(optimizer=optimizer)
        run.snapshot.invalidate()
        if closure is None:
            seed_generators(derive_seed(run.seed, "optimizer_step", run.state.global_step, self._num_acts), run.device)
            return None
        self._seed_for_batch()  # which the closure computes
        return self._agreeing(closure, optimizer)

    def _agreeing(self, closure: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
        """Return a closure whose loss is the mean over processes: a line search has to decide alike on all of them."""
        run = self._run

        def evaluate() -> Any:
            loss = closure()
            if run.stepper.clips:
                run.stepper.clip(weights_of(optimizer))
            if loss is None or num_data_processes() == 1:  # a closure that only calls backward returns nothing
                return loss
            mean = sum_over_data((float(loss) * self._last_factor,))[0] / num_data_processes()
            return torch.tensor(mean, device=run.device)

        return evaluate

    def _warn_of_gradients(self, optimizer: Any) -> None:
        """Warn of a step with gradients that were used before, or that processes have not weighted."""
        if not self._adds_to_used and not self._stale.isdisjoint(members_of(optimizer)):
            self._adds_to_used = True
            warn(_NOT_DROPPED)
        # With a single process, or after self.backward, the gradients are right however they were computed.
        if num_data_processes() == 1 or self._has_called_backward:
            return
        if any(parameter.grad is not None for parameter in weights_of(optimizer)):
            warn_once(_NOT_WEIGHTED, about="gradients that are not weighted")

    def _note_step(self, optimizer: Any) -> None:
        self._has_stepped = True
        self._used.update(members_of(optimizer))

    def warn_of_idle_schedulers(self) -> None:
        """Warn of schedulers that nobody has advanced in several steps: the rates would stay as they are, unnoticed."""
        first_step, first_positions = self._began or (0, {})
        num_steps = self._run.state.global_step - first_step
        names = []
        for scheduler, position in self._find_positions().items():
            is_idle = position is not None and position == first_positions.get(scheduler)
            if is_idle and not isinstance(scheduler, ReduceLROnPlateau):  # which evaluations step
                names.append(type(scheduler).__name__)
        if names and num_steps > 1 and not self._run.settings.hps.step_scheduler_per_epoch:
            warn_once(
                f"{', '.join(names)} has not advanced in {num_steps} optimizer steps: call self.step_scheduler() "
                "after self.step_optimizer(), or self.step() in place of both",
                about="idle schedulers",
            )

    def _find_positions(self) -> dict[Any, Any]:
        return {scheduler: getattr(scheduler, "last_epoch", None) for scheduler in self._module.schedulers()}

    def _advance_schedulers(self) -> None:
        """After a batch, advance the schedulers of optimizers that stepped by themselves, unless the module does."""
        run, stepped = self._run, self._stepped
        self._stepped = []
        is_at_end = run.total_steps is not None and run.state.global_step >= run.total_steps
        if not stepped or is_at_end or run.settings.hps.step_scheduler_per_epoch:
            return
        for scheduler, position in self._find_positions().items():
            if isinstance(scheduler, ReduceLROnPlateau):  # which evaluations step
                continue
            is_moved = position != self._positions.get(scheduler, position)
            # A single scheduler counts the steps of any optimizer, one of several those of its own.
            is_due = scheduler is run.scheduler or scheduler.optimizer in stepped
            # It would advance twice per step from here on.
            if is_moved and self._advanced_by.setdefault(scheduler, "module") == "accmt":
                got = "a scheduler step, although accmt has advanced it after each optimizer.step() until now"
                do = "call self.step_optimizer(optimizer) and self.step_scheduler() instead of optimizer.step()"
                expected = "scheduler steps from one place only"
                raise fail(ModuleContractError, "training_step", got=got, expected=expected, do=do)
            if is_due and not is_moved and self._advanced_by.setdefault(scheduler, "accmt") == "accmt":
                advance_scheduler(run, scheduler)
        self._positions = self._find_positions()

    def backward(self, loss: torch.Tensor, weight: Any = None) -> None:
        """Add the gradients of a batch's mean loss, weighted by this process's share of the micro-batch.

        Args:
            weight: What the loss weighs; None is its target tokens, where a transformers model computed it, or samples.
        """
        run = self._run
        factor = self._last_factor = self._find_factor(loss, weight)
        is_first, self._has_called_backward = not self._has_called_backward, True
        used = [optimizer for optimizer in self._optimizers if optimizer in self._used]  # in one order: may communicate
        self._stale = set(filter(_has_gradients, used))
        self._used = set(self._stale)  # the module has dropped the gradients of the others
        for hook in run.hooks.on_before_backward:
            hook(loss=loss)
        if run.engine.calls is not None:
            require_call(run.engine.calls)
        weighted_loss = loss if factor == 1.0 else loss * factor
        run.actions.backward(weighted_loss)
        if is_first:  # FSDP2 may have gathered some: one part of them with a gradient is enough
            parameters = {*run.unwrapped_model.parameters(), *run.stepper.parameters}
            trained: dict[str, torch.nn.Parameter] = {}
            for parameter in parameters:
                if parameter.requires_grad:
                    trained[str(len(trained))] = parameter
            names_without_gradient(trained)
        # Whichever optimizer steps next; what was averaged before stays as it is.
        run.engine.reduce_gradients(list(run.unwrapped_model.parameters()))
        for hook in run.hooks.on_after_backward:
            hook(loss=loss)

    def _find_factor(self, loss: torch.Tensor, weight: Any) -> float:
        """Return what a loss is multiplied by on this process.

        Processes: collective where it weighs something else than samples.
        """
        weight = read_weight("self.backward(loss, weight=...)", weight)
        if num_data_processes() == 1:
            return 1.0
        if weight is None:
            weight = self._run.features.find_weight(loss, is_given=False)
        if weight is None:
            self._weighs_samples = True
            return self._factor
        local_weight = 0.0
        if not self._is_borrowed:
            local_weight = float(weight)
        total = sum_over_data((local_weight,))[0]
        if total <= 0:
            return 0.0
        return local_weight * num_data_processes() / total

    def step_optimizer(self, optimizer: Any = None) -> bool:
        """Unscale, clip and make the optimizer step.

        Args:
            optimizer: The only one of several with gradients; None for all.
        """
        if self._needs_closure:  # LBFGS and the like evaluate the loss several times within one step
            got = "an optimizer that needs a closure"
            do = "self.optimizer.step(closure); closure calls self.zero_grad and self.backward, and returns the loss"
            expected = "an optimizer without a closure"
            raise fail(ModuleContractError, "self.step_optimizer", got=got, expected=expected, do=do)
        stepped = optimizer
        if optimizer is None:
            stepped = self._run.stepper.optimizer
        self._run.stepper.unscale()
        self._warn_of_gradients(stepped)
        counts, self._counts_steps = self._counts_steps, False
        try:
            is_done = step_optimizer(self._run)
        finally:
            self._counts_steps = counts
        self._seed_for_batch()
        if is_done:
            self._note_step(stepped)
        return is_done

    def step_scheduler(self, scheduler: Any = None) -> None:
        """Advance the scheduler, if there is one, or one of several."""
        if self._run.scheduler is not None:
            schedulers = self._module.schedulers() if scheduler is None else [scheduler]
            for advanced in schedulers:
                self._advanced_by.setdefault(advanced, "module")
            advance_scheduler(self._run, scheduler)
            self._seed_for_batch()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        zero_gradients(self._run)
        self._seed_for_batch()

    def _seed_for_batch(self) -> None:
        """Seed by the batch again: hooks and optimizers draw the same on every process, what follows must not."""
        self._num_acts += 1
        place = (*self._place_in_epoch, self._num_acts)
        seed_generators(derive_seed(self._run.seed, "step", *place), self._run.device)


def _has_gradients(optimizer: Any) -> bool:
    for parameter in weights_of(optimizer):
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = dense_values(gradient)
        if gradient is not None and bool(gradient.any()):
            return True
    return False
