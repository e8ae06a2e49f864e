"""The parts of a run and of an evaluation, in frozen objects that the loop's functions share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accmt.attributes import Attributes
from accmt.cadence import Cadence, RunLength
from accmt.callbacks import Callback, Hooks
from accmt.callbacks.callback import find_hooks
from accmt.checkpoint.state_dicts import class_name_of
from accmt.data import Loader, MicroBatch, count_samples
from accmt.engine.base import Engine
from accmt.errors import ReplicasDifferError
from accmt.loaders import Loaders
from accmt.metrics import Metric, RunningAverages
from accmt.module import AcceleratorModule
from accmt.optimization.stepper import Stepper
from accmt.options import Settings
from accmt.run.features import Feature, Features
from accmt.run.trained_parameters import TrainedParameters
from accmt.run.weighting import Weighting
from accmt.saving import may_stop
from accmt.state import TrainingState
from accmt.tracking import Tracking

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accmt.failures import Clock, Interruption, Watch
    from accmt.run.checkpoints import Checkpoints
    from accmt.run.model_saver import ModelSaver
    from accmt.run.restart import Recovery
    from accmt.run.run_state import StepSnapshot

TEST_LOSS = "test_loss"
"""The name of the test loss; that of the validation loss is `val_loss_metric_name`."""


@dataclass(frozen=True)
class Actions:
    """The three steps that a subclass of Trainer may replace.

    Attributes:
        backward: Adds the gradients of a loss.
        optimizer_step: Makes the optimizer step; returns False if it was skipped.
        zero_grad: Clears the gradients for the next window.
    """

    backward: Callable[[torch.Tensor], None]
    optimizer_step: Callable[[], bool]
    zero_grad: Callable[[], None]

    @classmethod
    def of(cls, trainer: Any, stepper: Stepper) -> Actions:
        """Use the Trainer's methods if a subclass overrides them; otherwise, directly the functions they call."""

        def pick(method: Any, direct: Any) -> Any:
            return direct if getattr(method, "__func__", None) in trainer.own_steps else method

        return cls(
            pick(trainer.do_backward, stepper.backward),
            pick(trainer.do_opt_step, stepper.step),
            pick(trainer.do_zero_grad, stepper.zero_grad),
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationRun:
    """The parts of an evaluation, within a training run or on its own.

    Attributes:
        engine: The engine that runs the model on the processes.
        accelerator: Device and processes.
        module: The user's module.
        model: The model that the run uses; in training, the wrapper that reduces gradients.
        unwrapped_model: The user's model.
        validation_step: The user's step for these data, as a function of (key, batch).
        val_loaders: The batches to evaluate, by key; the key is "" if there is only one set.
        metrics: The metrics of each set, by key.
        callbacks: The user's callbacks, of Trainer and module.
        hooks: Callbacks by hook.
        seed: The run's seed.
        counts_own_samples: Whether the module defines the number of samples in a batch.
        feature_kinds: The classes of possible features, in order.
    """

    settings: Settings
    engine: Engine
    accelerator: Accelerator
    module: AcceleratorModule
    model: nn.Module
    unwrapped_model: nn.Module
    validation_step: Callable[[str, Any], Any]
    val_loaders: Mapping[str, Loader]
    metrics: Mapping[str, tuple[Metric, ...]]
    callbacks: tuple[Callback, ...]
    hooks: Hooks
    state: TrainingState
    seed: int
    counts_own_samples: bool
    feature_kinds: tuple[type[Feature], ...]

    @cached_property
    def device(self) -> torch.device:
        """The device of model and batches."""
        device: torch.device = self.accelerator.device
        return device

    @cached_property
    def features(self) -> Features:
        """The features of the run, by hook."""
        return Features(self.feature_kinds, self)

    @property
    def loss_name(self) -> str:
        """The name of the loss in the results."""
        return TEST_LOSS if self.state.stage == "test" else self.settings.tracking.val_loss_metric_name

    def place(self, batch: Any) -> Any:
        """Move a batch to the run's device: tensors, objects with a `to` method, containers and dataclasses of these.

        The copy is asynchronous if the batch is in pinned memory.
        """
        if self.device.type == "cpu" or not self.settings.data.data_options.device_placement:
            return batch
        # `send_to_device` returns a dataclass as it is, on the CPU.
        if is_dataclass(batch) and not isinstance(batch, type) and not hasattr(batch, "to"):
            placed = copy.copy(batch)
            for field in fields(batch):
                object.__setattr__(placed, field.name, self.place(getattr(batch, field.name)))  # it may be frozen
            return placed
        from accelerate.utils import send_to_device

        return send_to_device(batch, self.device, non_blocking=True)

    def count_samples(self, micro_batch: MicroBatch, batch: Any, *, has_weight: bool = False) -> int:
        """Return the samples in this process's batch, from the module or from the batch.

        Args:
            has_weight: Whether the step returned the weight of the batch, so that its samples are only counted.

        Raises:
            DataError: The batch does not show the number of samples that were collated, and has no other weight.
        """
        if micro_batch.cut is not None and micro_batch.cut.num_targets is not None:
            return micro_batch.own_samples or 0  # not visible in the shape of a packed row
        samples = self.module.get_batch_size(batch) if self.counts_own_samples else None
        # The weight is the step's own, so a batch that does not show its samples is no error.
        if samples is None and has_weight:
            samples = micro_batch.own_samples
        return count_samples(batch, micro_batch.own_samples) if samples is None else samples


@dataclass(frozen=True, kw_only=True)
class Run(EvaluationRun):
    """A training run: its settings, resources, and stateful parts.

    Attributes:
        training_step: The user's step as a function of the batch.
        loaders: Builds the loaders, including those of validation sets.
        stepper: Backward, clipping and optimizer.
        trained: The currently trained parameters.
        attributes: The attributes of the module besides its model.
        scheduler: The learning-rate scheduler, or None.
        set_by_module: The sections of the hyper-parameters that the module decides: "optim", "scheduler".
        actions: The steps that a subclass of Trainer may replace.
        cadence: The intervals of logging, evaluations and checkpoints.
        weighting: The weights of windows.
        running_averages: Training values to log.
        saver: Saves the best model.
        tracking: Sends rows to trackers.
        checkpoints: Writes checkpoints.
        snapshot: The step snapshot: the state at the last optimizer step.
        clock: The duration of the run.
        recovery: Lessons from failures that the run recovered from.
        watch: Listens for signals and to other processes.
        is_resumed: Whether the run continues from a checkpoint.
        length: The optimizer steps of the run, as planned.
    """

    training_step: Callable[[Any], Any]
    loaders: Loaders
    stepper: Stepper
    trained: TrainedParameters
    attributes: Attributes
    scheduler: Any
    set_by_module: frozenset[str]
    actions: Actions
    cadence: Cadence
    weighting: Weighting
    running_averages: RunningAverages
    saver: ModelSaver
    tracking: Tracking
    checkpoints: Checkpoints
    snapshot: StepSnapshot
    clock: Clock
    recovery: Recovery
    watch: Watch
    is_resumed: bool
    length: RunLength

    @property
    def train_loader(self) -> Loader:
        """The training batches."""
        return self.loaders.train

    def replaced_hps(self) -> dict[str, Any]:
        """Return the sections of the hyper-parameters that the module or a DataLoader decides, with what is used."""
        replaced: dict[str, Any] = {}
        name, optimizer = type(self.module).__name__, self.stepper.optimizer
        if "optim" in self.set_by_module:
            defaults = getattr(optimizer, "defaults", {})  # a ChainedOptimizer has none
            plain = {key: value for key, value in defaults.items() if isinstance(value, int | float | str | tuple)}
            replaced["optim"] = {"type": class_name_of(optimizer), **plain, "set_by": f"{name}.get_optimizer"}
        if "scheduler" in self.set_by_module:
            replaced["scheduler"] = {"type": type(self.scheduler).__qualname__, "set_by": f"{name}.get_scheduler"}
        if self.loaders.takes_user_batches:
            replaced["batch_size"] = self.loaders.user_batch_size
        return replaced

    def samples_per_step(self, epoch: int = 0) -> int | None:
        """Return the samples of a full optimizer step; None if a window maker or a batch sampler decides."""
        return self.loaders.samples_per_step(epoch)

    @property
    def micro_batch_size(self) -> int:
        """The samples of a micro-batch of one process."""
        return self.settings.hps.train_batch_size // self.train_loader.source.micro_batches_per_batch

    @cached_property
    def interruption(self) -> Interruption:
        """Requests to end the run early."""
        return self.watch.interruption

    @property
    def total_steps(self) -> int | None:
        """Planned optimizer steps of the whole run; None if unlimited."""
        return self.length.total

    @property
    def is_finished(self) -> bool:
        """Whether training is complete: epochs or `max_steps` are done, or it ends early."""
        return self.cadence.is_finished(self.state) or self.ends_early

    @property
    def ends_early(self) -> bool:
        """Whether training ends early: patience or time is exhausted, or it was requested."""
        patience = self.saver.patience
        is_exhausted = patience is not None and patience.is_exhausted
        if not (self.interruption.ends_training or is_exhausted):
            return False
        running = self.settings.running
        return may_stop(self.state, min_epochs=running.min_epochs, min_steps=running.min_steps)

    @property
    def ends_here(self) -> bool:
        """Whether training ends after this optimizer step: `max_steps` and the like are done, or it ends early."""
        cadence = self.cadence
        return (cadence.is_limited and cadence.is_out_of_steps(self.state)) or self.ends_early

    @property
    def scheduler_length(self) -> int | None:
        """Scheduler steps of the whole run: optimizer steps, or epochs if it is stepped per epoch."""
        return self.length.epochs if self.settings.hps.step_scheduler_per_epoch else self.total_steps

    def accumulation_at(self, epoch: int) -> int | None:
        """Return the number of micro-batches per optimizer step in `epoch` (from 0); None if a window maker decides."""
        batches = self.settings.optimization.accumulation_at(epoch)
        return None if batches is None else batches * self.train_loader.source.micro_batches_per_batch

    def steps_per_epoch(self, epoch: int) -> int | None:
        """Return the optimizer steps of an epoch; None if its length is unknown."""
        micro_batches, accumulation = self.train_loader.source.num_micro_batches, self.accumulation_at(epoch)
        if micro_batches is None or accumulation is None:
            return None
        return -(-micro_batches // accumulation)  # the last window of an epoch may be shorter

    def require_equal_replicas(self) -> None:
        """Check that processes with the same part of the model have the same weights and optimizer state.

        Processes: collective.

        Raises:
            ModuleContractError: A parameter was frozen or unfrozen within the epoch, which makes them differ.
            ReplicasDifferError: They differ; no checkpoint is written.
        """
        self.trained.require_unchanged()
        try:
            self.trained.require_equal_replicas(self.state.global_step)
        except ReplicasDifferError:  # an emergency checkpoint would keep one of the diverged models
            self.snapshot.invalidate()
            raise

    def user_hooks(self, name: str) -> list[Callable[..., Any]]:
        """Return the functions of the user's callbacks and module for a hook."""
        hooks: list[Callable[..., Any]] = []
        for owner in (*self.callbacks, self.module):
            hooks += find_hooks(owner).get(name, ())
        return hooks
