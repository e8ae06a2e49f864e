"""Manual optimization: an `ExtendedAcceleratorModule` calls backward and the steps itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accmt.data import MicroBatch, Window, derive_seed, seed_generators
from accmt.engine.model_calls import require_call
from accmt.engine.reduction import names_without_gradient
from accmt.errors import ModuleContractError, explain
from accmt.features.hooks import Feature
from accmt.libraries.private_names import count_writes
from accmt.loop.step_outputs import read_further_values, read_weight
from accmt.loop.train_step import advance_scheduler, step_optimizer, step_scheduler, zero_gradients
from accmt.messages import warn, warn_once
from accmt.module import ExtendedAcceleratorModule
from accmt.optimization import SeveralSchedulers, needs_closure
from accmt.precision import autocast
from accmt.processes import data_index, num_data_processes, sum_over_data
from accmt.run import EvaluationRun, Run, require_planned
from accmt.state import Place

_FOREIGN = (
    "training_step uses an optimizer that get_optimizer did not return: its state is not in checkpoints, so a resumed "
    "run loses it; return it from get_optimizer (several as a list), and access it with self.optimizers()"
)
_NOT_DROPPED = (
    "backward adds to gradients that were already used in an optimizer step: call zero_grad after step_optimizer, or "
    "before the next backward. Checkpoints contain no gradients, so no more checkpoints are written from now on"
)
_NOT_WEIGHTED = (
    "an optimizer uses gradients that self.backward did not compute. loss.backward() and accelerator.backward(loss) "
    "weight the batches of all processes equally, regardless of their samples, and do not average over processes if "
    "self.model is a container such as an nn.ModuleDict: call self.backward(loss)"
)


class ManualOptimization(Feature):
    """Supports modules with manual optimization."""

    name = "manual_optimization"

    def __init__(self, run: Run, module: ExtendedAcceleratorModule) -> None:
        self._run = run
        self._module = module

    @classmethod
    def for_run(cls, run: EvaluationRun) -> ManualOptimization | None:
        if isinstance(run, Run) and isinstance(run.module, ExtendedAcceleratorModule):
            return cls(run, run.module)
        return None

    @contextmanager
    def during(self) -> Iterator[None]:
        """Count calls of an optimizer's `step` in the training step like those of `step_optimizer`."""

        def begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            steps = self._steps
            return None if steps is None else steps.begin_own_step(optimizer, args, kwargs)

        def end(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            steps = self._steps
            if steps is not None:
                steps.end_own_step(optimizer)

        handles = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def make_steps(self) -> ManualSteps:
        return ManualSteps(self._run, self._module)

    def has_unfinished_step(self) -> bool:
        """Return whether there are gradients without an optimizer step yet."""
        return self._steps is not None and self._steps.has_gradients

    def why_not_tried(self) -> str:
        return "the module uses manual optimization"

    @property
    def _steps(self) -> ManualSteps | None:
        steps: ManualSteps | None = vars(self._module).get("manual_steps")  # those of the epoch
        return steps


class ManualSteps:
    """Implements the module's `backward`, `step_optimizer`, `step_scheduler` and `zero_grad`.

    Hooks, clipping, precision and the weights of batches on several processes are as in the automatic loop.

    Args:
        module: Its module, which gets these steps.
    """

    def __init__(self, run: Run, module: ExtendedAcceleratorModule) -> None:
        self._run = run
        self._factor = 1.0  # of a loss that weighs samples
        self._last_factor = 1.0
        self._weighs_samples = False  # whether a backward of this step did
        self._is_borrowed = False  # whether the batch is another process's, which counts nothing
        self._has_stepped = False
        self._module = module
        self._needs_closure = any(map(needs_closure, module.optimizers()))
        self._depth = 1  # optimizer steps within one another; 0 within training_step, outside of any
        self._is_counted = False
        self._place_in_epoch = 0, 0, 0  # of the batch: epoch, micro-batch, part of the data
        self._num_acts = 0
        before: ManualSteps | None = getattr(module, "manual_steps", None)
        if before is None or before._run is not run:
            before = None
        # A step may span two epochs.
        self.has_gradients: bool = before is not None and before.has_gradients
        # Those that an optimizer has stepped on wait for zero_grad only, unless a backward adds to them before it.
        self._has_stepped_on: bool = before is not None and before._has_stepped_on
        self._adds_to_stepped: bool = before is not None and before._adds_to_stepped
        self._own_steps: _OwnSteps = (
            _OwnSteps(getattr(run.scheduler, "last_epoch", None)) if before is None else before._own_steps
        )
        module.manual_steps = self

    def train(self, window: Window) -> bool:
        """Train on a window of one micro-batch, and count the optimizer step if the module made one.

        Returns:
            Whether it did.
        """
        [micro_batch] = window.units
        run = self._run
        run.state.now.is_last_training_batch = micro_batch.is_last
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
        run.trained.update()
        run.engine.begin_window()
        batch = run.place(read)
        own = 0 if self._is_borrowed else run.count_samples(micro_batch, batch)
        if micro_batch.num_samples is None or run.counts_own_samples or num_data_processes() == 1:
            samples = int(sum_over_data((float(own),))[0])  # not planned: the sum of what the batches hold
        else:
            require_planned(micro_batch, own)
            samples = micro_batch.num_samples
        self._factor, self._depth = own * num_data_processes() / samples, 0
        self._last_factor, self._weighs_samples = self._factor, False
        self._place_in_epoch, self._num_acts = (run.state.epoch, micro_batch.index, data_index()), 0
        seed_generators(derive_seed(run.seed, "step", *self._place_in_epoch), run.device)
        for hook in () if self._is_borrowed else run.hooks.on_before_training_step:
            hook(batch=batch)
        try:
            with autocast(run.accelerator), run.engine.running(micro_batch):
                outputs = run.features.call_training_step(run.training_step, batch, read=read)
        except Exception as error:
            run.engine.add_note(error)
            raise
        run.trained.require_unchanged()
        is_mapping = isinstance(outputs, Mapping)
        loss = outputs.get("loss") if is_mapping else outputs
        if self._is_borrowed:
            run.module.logs.of_training.begin_batch()  # drops the values logged by the step
        elif isinstance(loss, torch.Tensor):
            given = read_weight("training_step", outputs.get("weight")) if is_mapping else None
            if given is not None and self._weighs_samples:
                got = '"weight" in the output of the step, after self.backward(loss): too late on several processes'
                expected, do = "the weight in the call of backward", "self.backward(loss, weight=weight)"
                raise ModuleContractError(explain("training_step", got, expected, do))
            targets = run.features.find_weight(loss, is_given=given is not None)
            weight = next(one for one in (given, targets, own) if one is not None)
            others = read_further_values(outputs) if is_mapping else None
            run.running_averages.add(loss.detach(), weight, others, own if given is None else given)
            place = Place(run.state.global_step + 1, run.state.epoch, micro_batch.index, run.state.samples_seen)
            for after_batch in run.features.after_batch:
                after_batch(loss.detach(), weight, place)
        for hook in () if self._is_borrowed else run.hooks.on_after_training_step:
            hook(batch=batch, outputs=outputs)
        self._depth = 1
        if self._own_steps.stepped:
            self._finish_own_steps()
        run.state.count_batch()
        run.state.count_samples(samples)

    def begin_own_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Do what `step_optimizer` does before a step, where the module has called the optimizer's own `step`.

        Returns:
            Other arguments for it, or None.
        """
        self._depth += 1
        if self._depth > 1:  # within `step_optimizer`, or within the step of an optimizer around this one
            return None
        run = self._run
        self._is_counted = self._is_of_model(optimizer)
        if not self._is_counted:
            return None
        if run.accelerator.scaler is not None:
            got = f"{type(optimizer).__name__}.step() with gradients that are scaled for fp16"
            expected, do = "a step of unscaled gradients", 'self.step_optimizer(optimizer), or mixed_precision="bf16"'
            raise ModuleContractError(explain("training_step", got, expected, do))
        if self._own_steps.adds_to_stepped(optimizer) and not self._adds_to_stepped:
            self._adds_to_stepped = True
            warn(_NOT_DROPPED)
        self._warn_if_not_weighted(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None and run.stepper.clips:
            run.stepper.clip(_parameters_of(optimizer))
        for hook in run.hooks.on_before_optimizer_step:
            hook(optimizer=optimizer)
        run.snapshot.invalidate()
        if closure is None:
            seed_generators(derive_seed(run.seed, "optimizer_step", run.state.global_step, self._num_acts), run.device)
            return None
        self._seed_for_batch()  # which the closure computes
        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], self._agreeing(closure, optimizer), *args[2:]), others

    def _is_of_model(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer steps parameters of the model; a module may use others for something else."""
        if optimizer is self._module.optimizer or any(one is optimizer for one in self._module.optimizers()):
            return True
        is_of_model = not set(self._run.unwrapped_model.parameters()).isdisjoint(_parameters_of(optimizer))
        if is_of_model:
            warn_once(_FOREIGN, about="foreign optimizer")
        return is_of_model

    def _agreeing(self, closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        """Return a closure whose loss is the mean over processes: a line search has to decide alike on all of them."""
        run = self._run

        def evaluate() -> Any:
            loss = closure()
            if run.stepper.clips:
                run.stepper.clip(_parameters_of(optimizer))
            if loss is None or num_data_processes() == 1:
                return loss
            is_tensor = isinstance(loss, torch.Tensor)
            value = loss.item() if is_tensor else float(loss)
            mean = sum_over_data((value * self._last_factor,))[0] / num_data_processes()
            return torch.full_like(loss, mean) if is_tensor else mean

        return evaluate

    def end_own_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step that the module made by the optimizer's own `step`."""
        self._depth -= 1
        if self._depth or not self._is_counted:
            return
        for hook in self._run.hooks.on_after_optimizer_step:
            hook(optimizer=optimizer)
        self._seed_for_batch()
        self._has_stepped = True
        self._own_steps.stepped.append(optimizer)

    def _finish_own_steps(self) -> None:
        """After a batch, find gradients that wait for a step, and advance the scheduler unless the module does."""
        run, own = self._run, self._own_steps
        self.has_gradients = own.find_unstepped(self._module.optimizers()) or self._adds_to_stepped
        stepped, own.stepped = own.stepped, []
        if run.scheduler is None or run.settings.hps.step_scheduler_per_epoch:
            return
        if isinstance(run.scheduler, ReduceLROnPlateau):  # which evaluations step
            return
        position = getattr(run.scheduler, "last_epoch", None)
        if own.has_advanced and position != own.position:
            got = "a scheduler step, although accmt has advanced the scheduler after each optimizer.step() until now"
            do = "call self.step_optimizer(optimizer) and self.step_scheduler() instead of optimizer.step()"
            raise ModuleContractError(explain("training_step", got, "scheduler steps from one place only", do))
        own.is_advanced_by_module |= position != own.position
        if own.is_advanced_by_module:
            return
        if isinstance(run.scheduler, SeveralSchedulers):
            for scheduler in run.scheduler.schedulers:
                if any(scheduler.optimizer is one for one in stepped):
                    advance_scheduler(run, scheduler)
        elif not {self._module.optimizer, *self._module.optimizers()}.isdisjoint(stepped):
            step_scheduler(run, at_epoch_end=False)
        own.position, own.has_advanced = getattr(run.scheduler, "last_epoch", None), True

    def backward(self, loss: torch.Tensor, weight: Any = None) -> None:
        """Add the gradients of a batch's mean loss, weighted by this process's share of the micro-batch.

        Args:
            weight: What the loss weighs; None is its target tokens, where a transformers model computed it, or samples.
        """
        run = self._run
        factor = self._last_factor = self._find_factor(loss, weight)
        is_first, self._own_steps.has_called_backward = not self._own_steps.has_called_backward, True
        self.has_gradients = True
        self._own_steps.note_stale()
        if self._has_stepped_on and not self._adds_to_stepped:
            gradients = (parameter.grad for parameter in run.unwrapped_model.parameters())
            # The module may have dropped them by torch's own `zero_grad`.
            if any(gradient is not None and bool(gradient.any()) for gradient in gradients):
                self._adds_to_stepped = True
                warn(_NOT_DROPPED)
        for hook in run.hooks.on_before_backward:
            hook(loss=loss)
        if run.engine.calls is not None:
            require_call(run.engine.calls)
        run.actions.backward(loss if factor == 1.0 else loss * factor)
        if is_first:
            every = {*run.unwrapped_model.parameters(), *run.stepper.parameters}  # FSDP2 may have gathered the first
            trained = (one for one in every if one.requires_grad)
            names_without_gradient({str(number): one for number, one in enumerate(trained)})  # one part is enough
        # Whichever optimizer steps next; what was averaged before stays as it is.
        run.engine.reduce_gradients(list(run.unwrapped_model.parameters()))
        for hook in run.hooks.on_after_backward:
            hook(loss=loss)

    def _warn_if_not_weighted(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn, on several processes, of an optimizer step of a run that has never called `self.backward`."""
        if num_data_processes() == 1 or self._own_steps.has_called_backward:
            return
        if any(parameter.grad is not None for parameter in _parameters_of(optimizer)):
            warn_once(_NOT_WEIGHTED, about="gradients that are not weighted")

    def _find_factor(self, loss: torch.Tensor, weight: Any) -> float:
        """Return what a loss is multiplied by on this process.

        Processes: collective where it weighs something else than samples.
        """
        given = read_weight("self.backward(loss, weight=...)", weight)
        if num_data_processes() == 1:
            return 1.0
        given = self._run.features.find_weight(loss, is_given=False) if given is None else given
        if given is None:
            self._weighs_samples = True
            return self._factor
        own = 0.0 if self._is_borrowed else float(given)
        total = sum_over_data((own,))[0]
        return own * num_data_processes() / total if total > 0 else 0.0

    def step_optimizer(self, *, is_whole: bool = True) -> bool:
        """Unscale, clip and make the optimizer step.

        Args:
            is_whole: Whether there are no gradients of parameters that do not step here.
        """
        if self._needs_closure:
            got = "an optimizer that needs a closure"
            do = "self.optimizer.step(closure); closure calls self.zero_grad and self.backward, and returns the loss"
            raise ModuleContractError(explain("self.step_optimizer", got, "an optimizer without a closure", do))
        self._run.stepper.unscale()
        self._warn_if_not_weighted(self._run.stepper.optimizer)
        self._depth += 1
        try:
            is_done = step_optimizer(self._run)
        finally:
            self._depth -= 1
        self._seed_for_batch()
        self._has_stepped |= is_done
        if is_whole:
            self._has_stepped_on = True
            self.has_gradients = self._adds_to_stepped
        return is_done

    def step_scheduler(self, scheduler: Any = None) -> None:
        """Advance the scheduler, if there is one, or one of several."""
        if self._run.scheduler is not None:
            self._own_steps.is_advanced_by_module = True
            advance_scheduler(self._run, scheduler)
            self._seed_for_batch()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.has_gradients = self._has_stepped_on = False
        zero_gradients(self._run)
        self._seed_for_batch()

    def _seed_for_batch(self) -> None:
        """Seed by the batch again: hooks and optimizers draw the same on every process, what follows must not."""
        self._num_acts += 1
        place = (*self._place_in_epoch, self._num_acts)
        seed_generators(derive_seed(self._run.seed, "step", *place), self._run.device)


class _OwnSteps:
    """What is known of steps that the module makes by the `step` of torch's optimizers.

    torch does not report their `zero_grad`. So the gradients that a step leaves behind are compared with what is there
    later: the same tensor, written as often.

    Attributes:
        stepped: The optimizers that have stepped in this batch.
        position: Where the scheduler was after the last batch.
        has_advanced: Whether it was advanced for the module.
        is_advanced_by_module: Whether the module advances it.
        has_called_backward: Whether the module has called `self.backward`.
    """

    def __init__(self, position: int | None) -> None:
        self.stepped: list[torch.optim.Optimizer] = []
        self.position = position
        self.has_advanced = False
        self.is_advanced_by_module = False
        self.has_called_backward = False
        self._left: dict[torch.optim.Optimizer, list[tuple[torch.Tensor | None, int]]] = {}
        self._stale: set[torch.optim.Optimizer] = set()

    def find_unstepped(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Return, after a batch, whether gradients were added for an optimizer that has not stepped in it."""
        found = False
        for optimizer in optimizers:
            now = _marks_of(optimizer)
            has_stepped = any(one is optimizer or optimizer in getattr(one, "optimizers", ()) for one in self.stepped)
            if has_stepped or all(gradient is None for gradient, _ in now):
                self._left[optimizer] = now
                self._stale.discard(optimizer)
            else:
                found |= not _have_same(now, self._left.get(optimizer, []), quantifier=all)
        return found

    def note_stale(self) -> None:
        """Note, before a backward, which gradients are still those of an earlier batch's step."""
        for optimizer, left in self._left.items():
            is_stale = _have_same(_marks_of(optimizer), left, quantifier=any)
            (self._stale.add if is_stale else self._stale.discard)(optimizer)

    def adds_to_stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the last backward added to gradients that the optimizer had stepped on."""
        return optimizer in self._stale


def _marks_of(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor | None, int]]:
    gradients = [parameter.grad for parameter in _parameters_of(optimizer)]
    return [(gradient, 0 if gradient is None else count_writes(gradient)) for gradient in gradients]


def _have_same(now: Sequence[Any], before: Sequence[Any], quantifier: Callable[[Iterable[bool]], bool]) -> bool:
    pairs = [(one, other) for one, other in zip(now, before, strict=False) if one[0] is not None]
    return len(now) == len(before) and quantifier(one[0] is other[0] and one[1] == other[1] for one, other in pairs)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
