"""The counters and status of a run, and the protocol of stateful parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from accmt.registry import FormerNames

Function = Literal["fit", "validate", "test", "predict", "tune"]
Stage = Literal["train", "sanity_check", "validate", "test", "predict", "tune"]
Progress = Literal["initializing", "running", "finished", "interrupted", "preempted", "failed"]


@runtime_checkable
class Stateful(Protocol):
    """Something whose state is saved in checkpoints.

    The same as `torch.distributed.checkpoint.stateful.Stateful`, whose package loads sympy with every `import accmt`.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state: JSON values and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`."""


class Place(NamedTuple):
    """The position of a batch in training.

    Attributes:
        step: The optimizer step of its accumulation window, starting at 1.
        epoch: The epoch, starting at 0.
        micro_batch: The micro-batch within the epoch, starting at 0.
        samples_before: Samples of all processes seen before its accumulation window.
    """

    step: int
    epoch: int
    micro_batch: int
    samples_before: int


@dataclass
class Status:
    """What the Trainer is currently doing, as documented in `TrainingState`; not saved in checkpoints."""

    fn: Function | None = None
    stage: Stage | None = None
    status: Progress = "initializing"
    is_last_training_batch: bool | Callable[[], bool] = False  # a function reads on, to see
    ends_step: bool | None = None  # of the current micro-batch; None if derived from `grad_accum_steps`
    is_evaluating: bool = False  # from `on_evaluation_start` to `on_evaluation_end`
    is_last_epoch: bool = False
    in_evaluation_batches: bool = False  # of an evaluation or prediction, during which no other can start
    interrupted: bool = False
    sample_indices: list[int] | None = None  # of the current batch of an evaluation or prediction


@dataclass
class Counters:
    """What a run has finished, counted once and identical on every process.

    Attributes:
        epoch: Finished epochs, which is also the index of the current epoch.
        train_step: Batches, not optimizer steps, finished in this epoch; also the index of the current batch. With
            `max_tokens`, batches as loaded: the micro-batches that a step's batches are split into count with the last.
        epoch_step: Optimizer steps finished in this epoch.
        batch_iteration: Batches finished since the start.
        global_step: Optimizer steps finished since the start.
        skipped_steps: Accumulation windows without an optimizer step: the scaler found inf, or all weights were 0.
        samples_seen: Training samples of all processes, counted each time they are trained on.
        target_tokens_seen: Total weight of training batches that are weighted by target tokens: those of a transformers
            model's own loss, of packed rows, or the weights that steps return. 0 if batches are weighted by samples.
        bad_samples: Training samples that could not be read and were skipped, counted each time.
        skipped_batches: Training batches of all processes that the step skipped by returning None.
        val_step: Batches finished in the current or last evaluation.
        eval_global_step: Batches of all evaluations.
        evaluations_done: Finished evaluations, not counting the sanity evaluation.
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
class TrainingState(FormerNames, Counters):
    """The counters of a run and read-only views of its status. Module, Trainer and callbacks share this object.

    The counters change only through the `count_*` methods, which only the loop calls.

    Attributes:
        now: What the Trainer is currently doing.
        grad_accum_steps: Micro-batches in an accumulation window of the current epoch; those of the current window if a
            window maker decides.
        num_processes: Processes that train together.
        best: Best value so far of each quantity that models are saved by.
        metrics: Results of the last evaluation, by name.
        best_metrics: Best value so far of each result with a known direction: losses and metrics.
        patience_left: Evaluations without a better value that are still allowed, by name if there are several; None
            without early stopping.
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
        """The Trainer's running method: fit, validate, test, predict or tune."""
        return self.now.fn

    @property
    def stage(self) -> Stage | None:
        """The running part of it: train, sanity_check, validate, test, predict or tune."""
        return self.now.stage

    @property
    def status(self) -> Progress:
        """Its progress: initializing, running, finished, interrupted, preempted or failed."""
        return self.now.status

    @property
    def is_last_training_batch(self) -> bool:
        """Whether the current batch is the last of its epoch; within a step on a stream, this reads the next batch.

        Processes: all, within a step on a stream or on separate data of each process.
        """
        is_last = self.now.is_last_training_batch
        return is_last() if callable(is_last) else is_last

    @property
    def is_last_epoch(self) -> bool:
        """Whether the current epoch is the last planned one."""
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
        """The data indices of the samples in the current batch of an evaluation or prediction.

        None in training, and for data whose samples have no index, such as streams.
        """
        return self.now.sample_indices

    @property
    def batch_idx(self) -> int:
        """Alias of `train_step`."""
        return self.train_step

    @property
    def optimizer_step(self) -> int:
        """Alias of `global_step`."""
        return self.global_step

    @property
    def best_train_loss(self) -> float | None:
        """Lowest training loss at an evaluation so far, if models are saved by it."""
        return self.best.get("best_train_loss")

    @property
    def best_valid_loss(self) -> float | None:
        """Lowest validation loss so far, if models are saved by it."""
        return self.best.get("best_valid_loss")

    def is_grad_accum_boundary(self, *, is_last_batch: bool = False) -> bool:
        """Return whether the current batch ends an accumulation window."""
        if self.now.ends_step is not None:
            return self.now.ends_step
        return is_last_batch or (self.train_step + 1) % self.grad_accum_steps == 0

    def count_batch(self, number: int = 1) -> None:
        """Count finished batches; several, or none yet, if micro-batches are split by a token budget."""
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
        """Count the batches, over all processes, that the training step skipped."""
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
