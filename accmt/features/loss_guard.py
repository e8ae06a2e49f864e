"""Checks that training losses are finite and have no spikes.

Losses stay on the device until something else waits for it: a log row, an evaluation, a checkpoint. So no checkpoint
contains weights broken by a non-finite loss, and the check costs no waiting. Only `"on_nonfinite": "skip"` has to check
before the optimizer step, and waits once per step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import torch

from accmt.checkpoint.contents import read_others
from accmt.errors import ArgumentError, NonFiniteError, fail
from accmt.messages import warn, warn_once
from accmt.metrics.averages import COMPACT_AT, Weight, stack
from accmt.module import AcceleratorModule
from accmt.options import Settings
from accmt.processes import data_index, gather_from_data, num_data_processes, process_index
from accmt.run import EvaluationRun, Run
from accmt.run.features import Feature
from accmt.run.weighting import AccumulationWindow
from accmt.sharded_tensors import total_norm
from accmt.state import Place

_RECENT = 100
_ENOUGH = 20
_MAX_NAMED = 16
MAX_ROLLBACKS = 10
"""Maximum consecutive rollbacks to the same checkpoint."""


@dataclass(frozen=True)
class Finding:
    """A wrong loss.

    Attributes:
        place: The place of its batch.
        what: A description of the problem.
        is_spike: Whether it is finite.
        process: The process that had the batch.
        samples: The indices of the batch's samples in the dataset; None for data without indices.
    """

    place: Place
    what: str
    is_spike: bool
    process: int
    samples: list[int] | None

    def __str__(self) -> str:
        place = self.place
        where = f"step {place.step} (epoch {place.epoch + 1}, batch {place.micro_batch}) on process {self.process}"
        if self.samples is None:
            return f"{self.what} at {where}"
        more = ", ..." if len(self.samples) > _MAX_NAMED else ""
        return f"{self.what} at {where}, samples [{', '.join(map(str, self.samples[:_MAX_NAMED]))}{more}]"


class LossGuard(Feature):
    """The unchecked losses of this process, and recent losses to compare them with.

    Args:
        run: The run.
        policy: The reaction to a wrong loss: "stop", "skip", "rollback"; None only warns.
        spike_guard: Standard deviations above the mean of the last 100 losses that make a spike; None disables it.
    """

    name = "loss_guard"

    def __init__(self, run: Run, policy: str | None, spike_guard: float | None) -> None:
        self._run = run
        self._policy = policy
        self._spike_guard = spike_guard
        self._losses: list[torch.Tensor] = []
        self._chunks: list[torch.Tensor] = []
        self._weights: list[Weight] = []
        self._places: list[Place] = []
        self._harmless: set[int] = set()
        self._recent: deque[float] = deque(maxlen=_RECENT)
        # The steps skipped since the last check, by the number of samples before their windows.
        self._skipped: dict[int, int] = {}

    @classmethod
    def for_run(cls, run: EvaluationRun) -> LossGuard | None:
        if not isinstance(run, Run):
            return None
        failures = run.settings.failures
        checks_steps = failures.on_nonfinite == "skip" or cls.name in run.recovery.lessons
        guard = StepGuard if checks_steps else LossGuard
        return guard(run, failures.on_nonfinite, failures.spike_guard)

    @classmethod
    def check(cls, settings: Settings, module: AcceleratorModule, train_data: Any) -> None:
        policy = settings.failures.on_nonfinite
        where, expected = f'Trainer(failures={{"on_nonfinite": {policy!r}}})', "a run that supports recovery"
        # The module has made its steps before accmt sees their losses.
        if policy in ("skip", "rollback") and module.uses_manual_optimization:
            got, do = "a module with manual optimization", 'failures={"on_nonfinite": "stop"}'
            raise fail(ArgumentError, where, got=got, expected=expected, do=do)
        # There would be nothing to return to.
        if policy == "rollback" and settings.checkpoints.every is None:
            got, do = "checkpoint_every=None", 'checkpoint_every="epoch"'
            raise fail(ArgumentError, where, got=got, expected=expected, do=do)

    def on_training_start(self) -> None:
        """Save a checkpoint to roll back to if the first step fails."""
        if self._policy == "rollback" and not self._run.is_resumed:
            self._run.checkpoints.save_snapshot(self._run)

    def after_batch(self, loss: torch.Tensor, weight: Weight, place: Place) -> None:
        """Record the loss of one batch without waiting for it."""
        self._losses.append(loss)
        self._weights.append(weight)
        self._places.append(place)
        if len(self._losses) >= COMPACT_AT:
            self._chunks.append(stack(self._losses).float())
            self._losses = []

    def on_skipped_step(self, window: AccumulationWindow) -> None:
        """Ignore the losses of a window that the gradient scaler skipped, which handles overflows."""
        if self._run.accelerator.scaler is not None:
            self._harmless.add(window.samples_before)

    def after_row(self, row: Mapping[str, float]) -> None:
        """Check the losses unless the row shows that all are fine; a finite mean may hide a spike."""
        loss = row.get(self._run.settings.tracking.train_loss_metric_name, 0.0)
        if self._spike_guard is not None or self._skipped or not math.isfinite(loss):
            self.before_use()
        else:
            self.forget()

    def before_use(self) -> None:
        """Check the losses since the last check, and handle wrong ones.

        Processes: collective.
        """
        local_findings = []
        for place, loss, what in self.find()[:_MAX_NAMED]:
            samples = self._run.train_loader.samples_of(place.epoch, place.micro_batch)
            local_findings.append(Finding(place, what, math.isfinite(loss), process_index(), samples))
        findings = list(chain.from_iterable(gather_from_data(local_findings)))
        findings.sort(key=lambda finding: finding.place.samples_before)
        skipped, self._skipped = self._skipped, {}
        explained, trained = set(), []
        for finding in findings:
            samples_before = finding.place.samples_before
            if samples_before in skipped:
                explained.add(samples_before)
                warn(f"{finding}: the step is skipped")
            else:
                trained.append(finding)
        for samples_before, step in skipped.items():
            if samples_before not in explained:
                warn(f"the gradients of step {step} are not finite, although its losses are: the step is skipped")
        # The first one is the cause: what follows is trained with the weights that it has broken.
        if trained:
            self._react(trained[0])

    def _react(self, first: Finding) -> None:
        if self._policy in (None, "skip"):  # a spike that was checked against fewer losses before the step
            warn_once(f"{first}: reduce the learning rate, or pass clip_grad=1.0", about="wrong losses")
            return
        self._run.snapshot.invalidate()  # no checkpoint of this
        if self._policy == "rollback":
            self._roll_back(first)
        skipping = 'failures={"on_nonfinite": "skip"} or "rollback"'
        do = f"reduce the learning rate, pass clip_grad=1.0, or skip such steps: {skipping}"
        expected = "finite losses; the newest checkpoint was written before this step"
        raise fail(NonFiniteError, "the training loss", got=str(first), expected=expected, do=do)

    def _roll_back(self, first: Finding) -> NoReturn:
        """End the run, to continue from its newest checkpoint and skip a step.

        A non-finite loss may result from non-finite gradients of the previous step. So the windows up to this one are
        trained again, and each is checked before the optimizer step.

        Processes: collective; the same window on all.
        """
        run, recovery, window = self._run, self._run.recovery, first.place.samples_before
        checkpoint = run.checkpoints.newest()
        step = read_others(checkpoint)["parts"]["state"]["global_step"]
        if step != recovery.rolled_back_to:  # a newer checkpoint: the run has made progress since
            recovery.rollbacks, recovery.rolled_back_to = 0, step
        recovery.rollbacks += 1
        # Otherwise a diverging run would go back and forth until its time is over.
        if recovery.rollbacks > MAX_ROLLBACKS:
            got = f"{first}, after {MAX_ROLLBACKS} rollbacks to step {step}"
            do = "check the data and the learning rate: skipping single steps does not help"
            expected = "finite losses after skipping a few steps"
            raise fail(NonFiniteError, "the training loss", got=got, expected=expected, do=do)
        skipped = set(recovery.lessons.get(self.name, {}).get("skipped_windows", ()))
        # A spike comes from its own window, NaN perhaps from the step before, which the checks will then find.
        if first.is_spike:
            skipped.add(window)
        recovery.lessons[self.name] = {"skipped_windows": sorted(skipped), "check_until": window + 1}
        warn(f"{first}: rolling back to the checkpoint of step {step} to skip the bad step")
        recovery.restart(checkpoint)

    def find(self) -> list[tuple[Place, float, str]]:
        """Return the wrong losses since the last call, with their places.

        Waits for the device.
        """
        losses = [loss for chunk in self._chunks for loss in chunk.tolist()]
        if self._losses:
            losses += stack(self._losses).tolist()
        findings: list[tuple[Place, float, str]] = []
        for loss, weight, place in zip(losses, _read(self._weights), self._places, strict=True):
            # The NaN of a batch without targets has weight 0, and is not trained on.
            if not weight or place.samples_before in self._harmless:
                continue
            if not math.isfinite(loss):
                findings.append((place, loss, f"loss {loss}"))
            elif loss > (highest := self._highest()):
                findings.append((place, loss, f"loss {loss:.4g}, a spike above {highest:.4g}"))
            elif self._spike_guard is not None:
                self._recent.append(loss)
        self.forget()
        return findings

    def forget(self) -> None:
        """Drop the unchecked losses: a row with a finite mean shows that all are finite."""
        self._losses, self._chunks, self._weights, self._places, self._harmless = [], [], [], [], set()

    def _highest(self) -> float:
        if self._spike_guard is None or len(self._recent) < _ENOUGH:
            return math.inf
        mean = math.fsum(self._recent) / len(self._recent)
        variance = math.fsum((loss - mean) ** 2 for loss in self._recent) / len(self._recent)
        return mean + self._spike_guard * math.sqrt(variance)

    def state_dict(self) -> dict[str, Any]:
        """Return the recent losses of all processes.

        Processes: collective if there is a spike guard.
        """
        return {"recent": None if self._spike_guard is None else gather_from_data(list(self._recent))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the recent losses; on a different number of processes, start with none."""
        if state["recent"] is not None and len(state["recent"]) == num_data_processes():
            self._recent.extend(state["recent"][data_index()])


class StepGuard(LossGuard):
    """A loss guard that checks losses and gradients before the optimizer step, and skips known bad windows.

    With the policy "skip", it checks every window; after a rollback, those up to the wrong loss.
    """

    def __init__(self, run: Run, policy: str | None, spike_guard: float | None) -> None:
        super().__init__(run, policy, spike_guard)
        lessons = run.recovery.lessons.get(self.name, {})
        self._skipped_windows = set(lessons.get("skipped_windows", ()))
        self._check_until = math.inf if policy == "skip" else lessons.get("check_until", 0)

    def skips_window(self, samples_before: int) -> bool:
        return samples_before in self._skipped_windows

    def scale_loss(self, window: AccumulationWindow, loss: torch.Tensor, factor: Weight) -> Weight:
        """Return the factor of a loss; NaN for a wrong loss, so that all processes see it in the gradients."""
        # A factor of 0 is that of a borrowed batch or of one without targets, whose loss counts nowhere.
        if window.samples_before >= self._check_until or (isinstance(factor, float) and factor == 0.0):
            return factor
        highest = min(self._highest(), torch.finfo(loss.dtype).max)
        return torch.where(loss.detach() <= highest, factor, math.nan)

    def allows_step(self, window: AccumulationWindow) -> bool:
        """Return whether the gradients are finite; always True with a gradient scaler, which checks them itself.

        Waits for the device.
        """
        run = self._run
        if window.samples_before >= self._check_until or run.accelerator.scaler is not None:
            return True
        gradients = [parameter.grad for parameter in run.stepper.parameters if parameter.grad is not None]
        is_finite = bool(torch.isfinite(total_norm(gradients)))
        if not is_finite:
            self._skipped[window.samples_before] = run.state.global_step + 1
        return is_finite


def _read(weights: list[Weight]) -> list[float]:
    """Return the values of weights; those on the device are read together."""
    on_device = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    values = iter(stack(on_device).tolist() if on_device else ())
    return [next(values) if isinstance(weight, torch.Tensor) else weight for weight in weights]
