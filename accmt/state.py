"""The counters of a run, what it is doing, and the protocol of parts with a state of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

Function = Literal["fit", "validate", "test", "predict", "tune"]
Stage = Literal["train", "sanity_check", "validate", "test", "predict", "tune"]
Progress = Literal["initializing", "running", "finished", "interrupted", "preempted", "failed"]


@runtime_checkable
class Stateful(Protocol):
    """A part whose state must survive a crash."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: JSON values and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class Place(NamedTuple):
    """Where a batch was in training.

    Attributes:
        step: The optimizer step that its accumulation window was to make, from 1.
        epoch: The epoch, from 0.
        micro_batch: The micro-batch in it, from 0.
        samples_before: Samples of all processes seen before its accumulation window.
    """

    step: int
    epoch: int
    micro_batch: int
    samples_before: int


@dataclass
class Status:
    """What the Trainer is doing at this moment, as `TrainingState` documents it; nothing of it outlives the process."""

    fn: Function | None = None
    stage: Stage | None = None
    status: Progress = "initializing"
    is_last_training_batch: bool = False
    ends_step: bool | None = None  # of the current micro-batch; None where the number of micro-batches says it
    is_evaluating: bool = False  # from `on_evaluation_start` to `on_evaluation_end`
    is_last_epoch: bool = False
    in_evaluation_batches: bool = False  # of a set that is evaluated or predicted: nothing else can be, in between
    interrupted: bool = False
    sample_indices: list[int] | None = None  # of the current batch of an evaluation or a prediction


@dataclass
class Counters:
    """Finished things, each counted once and the same on every process.

    Attributes:
        epoch: Finished epochs, which is also the index of the current epoch.
        train_step: Batches, not optimizer steps, finished in this epoch; also the index of the current batch. With
            `max_tokens` those as they were read: the micro-batches cut from those of a step are counted with its last.
        epoch_step: Optimizer steps finished in this epoch.
        batch_iteration: Batches finished since the start.
        global_step: Optimizer steps finished since the start.
        skipped_steps: Accumulation windows without an optimizer step: the scaler met inf, or all weights were 0.
        samples_seen: Training samples of all processes, each counted as often as it was trained on.
        target_tokens_seen: What training batches weighed where they weigh target tokens: those of a transformers
            model's own loss, of packed rows, or the weights that steps return. 0 where batches weigh samples.
        bad_samples: Training samples that could not be read and were skipped, each as often as that happened.
        skipped_batches: Training batches of all processes that the step left out, by returning None.
        val_step: Batches finished in the current evaluation, or in the last one.
        eval_global_step: Batches of all evaluations.
        evaluations_done: Finished evaluations; the sanity evaluation does not count.
        last_evaluation_step: `global_step` of the last evaluation, None before the first.
    """

    epoch: int = 0
    train_step: int = 0
    epoch_step: int = 0
    batch_iteration: int = 0
    global_step: int = 0
    skipped_steps: int = 0
    samples_seen: int = 0
    target_tokens_seen: int = 0
    bad_samples: int = 0
    skipped_batches: int = 0
    val_step: int = 0
    eval_global_step: int = 0
    evaluations_done: int = 0
    last_evaluation_step: int | None = None


_COUNTERS = tuple(Counters.__dataclass_fields__)
_read_counters = attrgetter(*_COUNTERS)


@dataclass(repr=False)
class TrainingState(Counters):
    """The counters of a run, with read-only views of the rest. Module, Trainer and callbacks see this one object.

    The counters change only through the `count_*` methods, which only the loop calls.

    Attributes:
        now: What the Trainer is doing.
        grad_accum_steps: Micro-batches in an accumulation window of the current epoch.
        num_processes: Processes that train together.
        best: Best value so far of each quantity that a model is saved by.
        metrics: Results of the last evaluation, by name.
        best_metrics: Best value so far of each result whose better direction is known: losses, and those of metrics.
        patience_left: Evaluations without a better value that are still allowed, by name where several are counted;
            None where none is.
    """

    now: Status = field(default_factory=Status)
    grad_accum_steps: int = 1
    num_processes: int = 1
    best: Mapping[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    best_metrics: dict[str, float] = field(default_factory=dict)
    patience_left: int | dict[str, int] | None = None

    def __repr__(self) -> str:
        values = [f"{name} {value:.5g}" for name, value in {**self.metrics, **self.best}.items()]
        done = f"{self.global_step:,} steps, {self.epoch:,} epochs, {self.samples_seen:,} samples"
        return f"<TrainingState: {', '.join([self.status, done, *values])}>"

    @property
    def fn(self) -> Function | None:
        """The Trainer's method that runs: fit, validate, test, predict or tune."""
        return self.now.fn

    @property
    def stage(self) -> Stage | None:
        """The part of it that runs: train, sanity_check, validate, test, predict or tune."""
        return self.now.stage

    @property
    def status(self) -> Progress:
        """How far it got: initializing, running, finished, interrupted, preempted or failed."""
        return self.now.status

    @property
    def is_last_training_batch(self) -> bool:
        """Whether the current batch is the last of its epoch."""
        return self.now.is_last_training_batch

    @property
    def is_last_epoch(self) -> bool:
        """Whether the current epoch is the last one planned."""
        return self.now.is_last_epoch

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return self.now.status == "finished"

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the run."""
        return self.now.interrupted

    @property
    def sample_indices(self) -> list[int] | None:
        """The positions in the data of the samples in the current batch of an evaluation or a prediction.

        None in training, and for data whose samples have no index, such as streams.
        """
        return self.now.sample_indices

    @property
    def batch_idx(self) -> int:
        """Another name for `train_step`."""
        return self.train_step

    @property
    def optimizer_step(self) -> int:
        """Another name for `global_step`."""
        return self.global_step

    @property
    def best_train_loss(self) -> float | None:
        """Lowest training loss so far at an evaluation, where models are saved by it."""
        return self.best.get("best_train_loss")

    @property
    def best_valid_loss(self) -> float | None:
        """Lowest validation loss so far, where models are saved by it."""
        return self.best.get("best_valid_loss")

    def is_grad_accum_boundary(self, *, is_last_batch: bool = False) -> bool:
        """Return whether the current batch ends an accumulation window."""
        if self.now.ends_step is not None:
            return self.now.ends_step
        return is_last_batch or (self.train_step + 1) % self.grad_accum_steps == 0

    def count_batch(self, number: int = 1) -> None:
        """Count finished batches; several, or none yet, where micro-batches are cut by a token budget."""
        self.train_step += number
        self.batch_iteration += number

    def count_samples(self, num_samples: int) -> None:
        """Count the samples of finished batches, over all processes."""
        self.samples_seen += num_samples

    def count_target_tokens(self, number: int) -> None:
        """Count the target tokens of finished batches, over all processes."""
        self.target_tokens_seen += number

    def count_bad_samples(self, num_samples: int) -> None:
        """Count the samples, over all processes, that could not be read."""
        self.bad_samples += num_samples

    def count_skipped_batches(self, number: int) -> None:
        """Count the batches, over all processes, that the training step left out."""
        self.skipped_batches += number

    def count_step(self, *, is_skipped: bool = False) -> None:
        """Count one finished accumulation window: an optimizer step, or a skipped one."""
        if is_skipped:
            self.skipped_steps += 1
            return
        self.global_step += 1
        self.epoch_step += 1

    def count_epoch(self) -> None:
        self.epoch += 1
        self.train_step = 0
        self.epoch_step = 0

    def count_validation_batch(self, number: int = 1) -> None:
        self.val_step += number
        self.eval_global_step += number

    def count_evaluation(self) -> None:
        self.evaluations_done += 1
        self.last_evaluation_step = self.global_step

    def begin_evaluation(self) -> None:
        self.val_step = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(zip(_COUNTERS, _read_counters(self), strict=True))  # once a step, for the step snapshot

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in Counters.__dataclass_fields__:
            setattr(self, name, state[name])
