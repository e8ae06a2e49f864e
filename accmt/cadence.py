"""When things are due: pure functions of settings and counters, equal on all processes without communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

from accmt.options import Settings
from accmt.options.units import Every
from accmt.state import TrainingState

StepsPerEpoch: TypeAlias = Callable[[int], int | None]
"""Returns the optimizer steps of an epoch, or None if its length is unknown; only fractions of an epoch need them."""


@dataclass(frozen=True)
class Cadence:
    """The intervals and limits of a run.

    Attributes:
        epochs: Epochs of the run; None if only one of the following limits ends it.
        max_steps: Optimizer steps of the run; None for no limit.
        max_samples: Training samples of the run; None for no limit.
        max_target_tokens: Target tokens of the run; None for no limit.
        log_every: Optimizer steps between log rows; -1 logs at the end of each epoch.
        evaluate_every: Optimizer steps between evaluations, over all epochs, or a fraction of an epoch, or None.
        evaluate_every_n_epochs: Epochs between evaluations if `evaluate_every` is None.
        evaluate_at_end: Whether to evaluate after the last step if `evaluate_every` is set.
        checkpoint_every: Interval between checkpoints; None writes none. If it is a time, a feature decides.
    """

    epochs: int | None
    max_steps: int | None
    log_every: int = 1
    evaluate_every: int | float | None = None
    evaluate_every_n_epochs: int = 1
    evaluate_at_end: bool = True
    checkpoint_every: Every | None = None
    max_samples: int | None = None
    max_target_tokens: int | None = None

    @classmethod
    def of(cls, settings: Settings) -> Cadence:
        """Read the intervals from the settings."""
        evaluation, epochs = settings.evaluation, settings.hps.epochs
        every_n_steps: float | None = evaluation.every.number
        every_n_epochs = 1
        if evaluation.every.unit == "epoch" and isinstance(evaluation.every.number, int):
            every_n_steps, every_n_epochs = None, evaluation.every.number
        return cls(
            epochs=None if epochs in (None, -1) else epochs,
            max_steps=None if settings.hps.max_steps in (None, -1) else settings.hps.max_steps,
            log_every=settings.tracking.log_steps,
            evaluate_every=every_n_steps,
            evaluate_every_n_epochs=every_n_epochs,
            evaluate_at_end=evaluation.eval_when_finish and not evaluation.is_off,
            checkpoint_every=settings.checkpoints.every,
            max_samples=settings.hps.max_samples,
            max_target_tokens=settings.hps.max_target_tokens,
        )

    @cached_property
    def is_limited(self) -> bool:
        """Whether a limit other than epochs can end the run."""
        return (self.max_steps, self.max_samples, self.max_target_tokens) != (None, None, None)

    def is_out_of_steps(self, state: TrainingState) -> bool:
        """Return whether the run has reached its limit of steps, samples or target tokens."""
        return (
            (self.max_steps is not None and state.global_step >= self.max_steps)
            or (self.max_samples is not None and state.samples_seen >= self.max_samples)
            or (self.max_target_tokens is not None and state.target_tokens_seen >= self.max_target_tokens)
        )

    def is_finished(self, state: TrainingState) -> bool:
        """Return whether the run is complete."""
        return self.is_out_of_steps(state) or (self.epochs is not None and state.epoch >= self.epochs)

    def is_last_epoch(self, state: TrainingState, steps_per_epoch: int | None) -> bool:
        """Return whether the current epoch is the last one planned."""
        if self.epochs is not None and state.epoch >= self.epochs - 1:
            return True
        if self.max_steps is None or steps_per_epoch is None:
            return False
        return state.global_step + steps_per_epoch - state.epoch_step >= self.max_steps

    def is_log_due(self, state: TrainingState) -> bool:
        """Return whether to log after the current step."""
        return self.log_every > 0 and state.global_step > 0 and state.global_step % self.log_every == 0

    def is_evaluation_due(self, state: TrainingState, steps_per_epoch: StepsPerEpoch) -> bool:
        """Return whether to evaluate after the current step; a window may have been skipped."""
        interval = self.evaluate_every
        if interval is None or state.epoch_step == 0 or state.last_evaluation_step == state.global_step:
            return False
        if isinstance(interval, int):
            return state.global_step % interval == 0
        return _is_fraction_done(state, interval, steps_per_epoch)

    def is_evaluation_due_at_epoch_end(self, state: TrainingState) -> bool:
        """Return whether to evaluate at the end of the current epoch, which is not counted yet."""
        if self.evaluate_every is not None or state.last_evaluation_step == state.global_step:
            return False
        return (state.epoch + 1) % self.evaluate_every_n_epochs == 0 or self.is_out_of_steps(state)

    def is_evaluation_due_at_end(self, state: TrainingState) -> bool:
        """Return whether to evaluate at the end of the run; never twice on the same weights."""
        is_new = state.last_evaluation_step != state.global_step and state.global_step > 0
        return is_new and self.evaluate_at_end and self.evaluate_every is not None

    def is_checkpoint_due(
        self, state: TrainingState, steps_per_epoch: StepsPerEpoch, *, epoch_ended: bool, evaluated: bool
    ) -> bool:
        """Return whether to write a checkpoint here.

        Args:
            steps_per_epoch: The optimizer steps of each epoch.
            epoch_ended: Whether an epoch was just counted, not a step.
            evaluated: Whether there was an evaluation since the step.
        """
        interval = self.checkpoint_every
        if interval is None or interval.unit in (
            "second",
            "auto",
        ):  # those are no functions of counters: a feature decides
            return False
        if isinstance(interval.number, float):
            return (
                not epoch_ended and state.epoch_step > 0 and _is_fraction_done(state, interval.number, steps_per_epoch)
            )
        due = {
            "step": not epoch_ended and state.global_step % interval.number == 0,
            "epoch": epoch_ended and state.epoch % interval.number == 0,
            "eval": evaluated and state.evaluations_done % interval.number == 0,
        }
        return due[interval.unit]


def _is_fraction_done(state: TrainingState, fraction: float, steps_per_epoch: StepsPerEpoch) -> bool:
    steps = steps_per_epoch(state.epoch)
    return steps is not None and state.epoch_step % max(1, int(round(fraction * steps, 6))) == 0


@dataclass(frozen=True)
class RunLength:
    """The optimizer steps of a run, as planned.

    Attributes:
        total: Steps of the whole run, including those before an interruption; None if unlimited.
        per_epoch: Steps of a full epoch; None if unknown.
        done: Steps before the run was resumed, including accumulation windows without a step, which were planned too.
        basis: The settings behind the plan: epochs, `max_steps`, `max_samples`, and the samples per step.
        epochs: Epochs of the whole run, including one cut short by `max_steps`; None if unknown. Epochs before an
            interruption may have had a different number of steps.
    """

    total: int | None
    per_epoch: int | None
    done: int = 0
    basis: list[int | None] = field(default_factory=list)
    epochs: int | None = None

    def plan(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON values."""
        return {"total": self.total, "per_epoch": self.per_epoch, "basis": self.basis, "epochs": self.epochs}

    def keep(self, plan: Mapping[str, Any] | None) -> RunLength:
        """Return the length planned before the interruption, unless the settings have changed.

        If loaders are reloaded, epochs may differ in length; the plan for the first one is kept.
        """
        return self if plan is None or plan["basis"] != self.basis else replace(self, **plan)
