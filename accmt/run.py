"""Everything a run consists of, in one frozen object that the loop's functions share; and what an evaluation needs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from accmt.callbacks import Callback, Hooks
from accmt.callbacks.callback import find_hooks
from accmt.data import Loader, MicroBatch, find_batch_size
from accmt.data.lengths import LargestBatch
from accmt.engine.base import Engine
from accmt.engine.replicas import Replicas
from accmt.errors import DataError, ReplicasDifferError, explain
from accmt.features.hooks import Feature, Features
from accmt.loop.cadence import Cadence, RunLength
from accmt.loop.trained_parameters import TrainedParameters
from accmt.loop.weighting import Weighting
from accmt.messages import say_once, warn_once
from accmt.metrics import Metric, RunningAverages
from accmt.module import AcceleratorModule
from accmt.optimization.stepper import Stepper
from accmt.options import Settings
from accmt.processes import num_processes
from accmt.saving import Patience, Selection, may_stop
from accmt.state import TrainingState
from accmt.tracking import Tracking

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accmt.failures import Clock, Interruption, Watch

TEST_LOSS = "test_loss"
"""The name of a test set's loss; that of a validation set is `val_loss_metric_name`."""


@dataclass(frozen=True)
class Actions:
    """The three steps that a subclass of Trainer may replace.

    Attributes:
        backward: Adds the gradients of a loss.
        optimizer_step: Makes the optimizer step; False if it was skipped.
        zero_grad: Begins the next window without gradients.
    """

    backward: Callable[[torch.Tensor], None]
    optimizer_step: Callable[[], bool]
    zero_grad: Callable[[], None]

    @classmethod
    def of(cls, trainer: Any, stepper: Stepper) -> Actions:
        """Take the Trainer's methods where a subclass replaces them; else, at once, what its own methods call."""

        def pick(method: Any, direct: Any) -> Any:
            return direct if getattr(method, "__func__", None) in trainer.own_steps else method

        return cls(
            pick(trainer.do_backward, stepper.backward),
            pick(trainer.do_opt_step, stepper.step),
            pick(trainer.do_zero_grad, stepper.zero_grad),
        )


def require_planned(micro_batch: MicroBatch, samples: int) -> None:
    """Check that a batch holds the samples that were planned, where their number weighs the batches of others too.

    Raises:
        DataError: It holds more or fewer.
    """
    if samples != micro_batch.own_samples:
        got = (
            f"a batch of {samples} samples, made of {micro_batch.own_samples}, where the weights of batches are planned"
        )
        do = "def get_batch_size(self, batch) in the module, or a collate_fn of your own, whose batches are counted"
        raise DataError(explain("the training data", got, "as many samples in a batch as were read for it", do))


@dataclass(frozen=True, kw_only=True)
class EvaluationRun:
    """What an evaluation needs, in a run that trains or without one.

    Attributes:
        engine: How the processes work with one model.
        accelerator: Device and processes.
        module: The user's module.
        model: The model that the run works with; in training the one that reduces gradients.
        unwrapped_model: The user's model itself.
        validation_step: The user's step for these data, as a function of (key, batch).
        val_loaders: The batches to evaluate, by key; the key is "" where there is one set only.
        metrics: The metrics of each set, by its key.
        callbacks: The user's callbacks, of Trainer and module.
        hooks: Callbacks by hook.
        seed: Seed of everything random.
        counts_own_samples: Whether the module tells how many samples a batch has.
        feature_kinds: The features that the run may have, in their order.
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
        """Where model and batches are."""
        device: torch.device = self.accelerator.device
        return device

    @cached_property
    def features(self) -> Features:
        """The features that the run has, by hook."""
        return Features(self.feature_kinds, self)

    @property
    def loss_name(self) -> str:
        """The name of the current data's loss among the results."""
        return TEST_LOSS if self.state.stage == "test" else self.settings.tracking.val_loss_metric_name

    def place(self, batch: Any) -> Any:
        """Return the batch on the run's device: tensors, what has a method `to`, containers and dataclasses of these.

        The copy is queued without waiting; from pinned memory, as loaders give it, the device takes it by itself.
        """
        if self.device.type == "cpu" or not self.settings.data.batch_device_placement:
            return batch
        if is_dataclass(batch) and not isinstance(batch, type) and not hasattr(batch, "to"):
            placed = copy.copy(batch)
            for one in fields(batch):
                object.__setattr__(placed, one.name, self.place(getattr(batch, one.name)))  # it may be a frozen one
            return placed
        from accelerate.utils import send_to_device

        return send_to_device(batch, self.device, non_blocking=True)

    def count_samples(self, micro_batch: MicroBatch, batch: Any, *, has_weight: bool = False) -> int:
        """Return the samples in this process's batch: as the module says, or as the batch shows.

        Args:
            has_weight: Whether the step has said what the batch weighs, so that its samples are only counted.

        Raises:
            DataError: The number cannot be found, and nothing else says what the batch weighs.
        """
        if micro_batch.cut is not None and micro_batch.cut.num_targets is not None:
            return micro_batch.own_samples or 0  # of which the shape of a packed row says nothing
        samples = self.module.get_batch_size(batch) if self.counts_own_samples else None
        if samples is not None:
            return samples
        try:
            samples = find_batch_size(batch, micro_batch.own_samples)
        except DataError:
            if not has_weight:
                raise
            samples = micro_batch.own_samples
            what = "the shapes of a batch do not show how many samples it holds, so samples_seen counts those collated"
            say_once(f"{what}; get_batch_size(self, batch) in the module can count otherwise")
        if samples is None:
            what = "the number of samples in a batch is unknown, so each batch weighs 1"
            say_once(f"{what}; define get_batch_size(self, batch) in the module")
            return 1
        if micro_batch.own_samples not in (None, samples):
            warn_once(
                f"a batch counts the samples that it holds: here {samples}, which the collate function made of "
                f"{micro_batch.own_samples}; get_batch_size(self, batch) in the module can count otherwise",
                about="samples of batches",
            )
        return samples


# What the rooms above ask of the parts of a run that are made there: a run imports none of its users.


class LoadersProtocol(Protocol):
    """The parts of `accmt.setup.datasets.Loaders` that a run uses."""

    train: Loader

    def reload_if_due(self) -> None: ...
    def build_train_again(self) -> Loader: ...
    def make_largest_batch(self) -> LargestBatch | str: ...


class SaverProtocol(Protocol):
    """The parts of `accmt.recovery.model_saver.ModelSaver` that a run uses."""

    selection: Selection
    patience: Patience | None
    run_id: str

    def claim(self, run: Run) -> None: ...
    def release(self) -> None: ...
    def check(self, run: Run, metrics: Mapping[str, float]) -> None: ...
    def forget_missing(self, model_path: Path, run_id: str) -> None: ...
    def update_patience_left(self) -> None: ...
    def save_last(self, run: Run) -> None: ...
    @property
    def lacks_best(self) -> bool: ...
    def require_saved(self, model_folder: Path) -> None: ...
    def warn_if_nothing_was_saved(self) -> None: ...


class CheckpointsProtocol(Protocol):
    """The parts of `accmt.recovery.checkpoints.Checkpoints` that a run uses."""

    folder: Path
    began_elsewhere: bool
    requests: list[Path | None]
    is_prepared: bool

    @property
    def are_written(self) -> bool: ...
    @property
    def has_saved(self) -> bool: ...
    def begin(self, run: Run) -> None: ...
    def continue_from(self, folder: Path) -> None: ...
    def owns(self, folder: Path) -> bool: ...
    def find_newest_known(self) -> Path | None: ...
    def try_collecting(self, run: Run) -> None: ...
    def request(self, folder: Path | None) -> None: ...
    def save_requested(self, run: Run, *, is_due: bool) -> None: ...
    def save_last(self, run: Run) -> None: ...
    def save_snapshot(self, run: Run, *, is_alone: bool = False) -> None: ...
    def save(self, run: Run, folder: Path | None = None) -> None: ...
    def wait(self) -> None: ...
    def newest(self) -> Path: ...
    def close(self, *, has_result: bool) -> None: ...


class SnapshotProtocol(Protocol):
    """The parts of `accmt.recovery.run_state.StepSnapshot` that a run uses."""

    next_stage: int
    made_step: bool
    may_change_in_step_hooks: bool
    state: dict[str, Any] | None

    @property
    def can_be_saved(self) -> bool: ...
    def capture(self, run: Run, next_stage: int) -> None: ...
    def invalidate(self) -> None: ...
    def restored(self, run: Run) -> AbstractContextManager[None]: ...


class RecoveryProtocol(Protocol):
    """The parts of `accmt.recovery.restart.Recovery` that a run uses."""

    lessons: dict[str, dict[str, Any]]
    rollbacks: int
    rolled_back_to: int | None
    checkpoint: Path | None
    is_temporary: bool


@dataclass(frozen=True, kw_only=True)
class Run(EvaluationRun):
    """A run that trains: its settings, what it works with, and the parts that have a state of their own.

    Attributes:
        training_step: The user's step as a function of the batch.
        loaders: Makes the loaders, those of the validation sets too.
        stepper: Backward, clipping and optimizer.
        trained: Which parameters are trained at the moment.
        scheduler: The learning-rate scheduler, or None.
        actions: What a Trainer's subclass may replace.
        cadence: What is due when.
        weighting: Weights of windows.
        running_averages: Training values to be logged.
        saver: Saves the best model.
        tracking: Where rows go.
        checkpoints: Writes what an interrupted run continues from.
        snapshot: The run as its last optimizer step left it.
        clock: How long the run has taken.
        recovery: What the run has learned from failures that it went on from.
        interruption: What asks the run to end before its time.
        watch: Listens to signals and to other processes; None where a process is alone.
        is_resumed: Whether the run continues from a checkpoint.
        length: The optimizer steps of the run, as planned.
        replicas: Compares what processes hold alike; None where a process is alone.
    """

    training_step: Callable[[Any], Any]
    loaders: LoadersProtocol
    stepper: Stepper
    trained: TrainedParameters
    scheduler: Any
    actions: Actions
    cadence: Cadence
    weighting: Weighting
    running_averages: RunningAverages
    saver: SaverProtocol
    tracking: Tracking
    checkpoints: CheckpointsProtocol
    snapshot: SnapshotProtocol
    clock: Clock
    recovery: RecoveryProtocol
    interruption: Interruption
    watch: Watch | None
    is_resumed: bool
    length: RunLength
    replicas: Replicas | None

    @property
    def train_loader(self) -> Loader:
        """The training batches."""
        return self.loaders.train

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, as planned; None if nothing bounds it."""
        return self.length.total

    @property
    def is_finished(self) -> bool:
        """Whether training is at its end: epochs or `max_steps` are done, or it ends early."""
        return self.cadence.is_finished(self.state) or self.ends_early

    @property
    def ends_early(self) -> bool:
        """Whether training ends before its time: patience or time is exhausted, or somebody asked for it."""
        patience = self.saver.patience
        is_asked = self.interruption.ends_training or (patience is not None and patience.is_exhausted)
        if not is_asked:
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
        """Steps of the scheduler over the whole run: optimizer steps, or epochs where it is stepped per epoch."""
        return self.length.epochs if self.settings.hps.step_scheduler_per_epoch else self.total_steps

    def accumulation_at(self, epoch: int) -> int:
        """Return how many micro-batches make one optimizer step in `epoch` (from 0)."""
        return self.settings.optimization.accumulation_at(epoch) * self.train_loader.source.micro_batches_per_batch

    def steps_per_epoch(self, epoch: int) -> int | None:
        """Return the optimizer steps of an epoch; None if its length is unknown."""
        micro_batches = self.train_loader.source.num_micro_batches
        return None if micro_batches is None else -(-micro_batches // self.accumulation_at(epoch))

    def require_equal_replicas(self) -> None:
        """Check that processes which hold the same part of the model have the same weights and optimizer state.

        Processes: collective.

        Raises:
            ReplicasDifferError: They differ; no checkpoint is taken of them.
        """
        if self.replicas is not None and num_processes() > 1:
            try:
                self.replicas.require_equal(self.state.global_step)
            except ReplicasDifferError:
                self.snapshot.invalidate()
                raise

    def user_hooks(self, name: str) -> list[Callable[..., Any]]:
        """Return what the user's callbacks and module have at a hook."""
        return [hook for owner in (*self.callbacks, self.module) for hook in find_hooks(owner).get(name, ())]
