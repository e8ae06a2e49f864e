"""The weighted window: makes batch x accumulation x processes give the gradient of one big batch.

Let g_i be the gradient of a batch's mean loss, w_i its weight (its samples, or the weight from the step) and W the sum
of all weights of a window over all processes. The optimizer step needs sum(w_i g_i) / W. The engine adds up the
gradients of all processes and divides them by R: usually their number, because torch averages.

- W known beforehand (sized data, samples as weights): each loss is multiplied by w_i R / W, and nothing else is
  communicated.
- W unknown: each loss is multiplied by w_i / w_ref; at the end W is summed over processes and the gradients are
  multiplied by R w_ref / W. w_ref, the mean weight of a batch in the previous window, or that of the first batch, keeps
  the losses near their original size, so that fp16 scaling works.

Source of the problem: https://unsloth.ai/blog/gradient, and https://github.com/huggingface/transformers/pull/34191.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from accmt.errors import ModuleContractError, fail
from accmt.metrics.averages import Weight, sum_exactly
from accmt.processes import gather_numbers


class Reading:
    """An asynchronous copy of a number from the device to pinned host memory.

    The copy is queued on the device after the forward pass that computes the number and before the backward pass. So
    reading it waits for the forward pass at most: the device still runs the backward pass while the host queues the
    optimizer step.
    """

    def __init__(self, number: torch.Tensor) -> None:
        self._copied = number.to("cpu", non_blocking=True)  # torch copies to pinned memory
        self._is_done = torch.Event(number.device)
        self._is_done.record()

    def read(self) -> float:
        """Wait for the number and return it."""
        self._is_done.synchronize()
        return float(self._copied)


@dataclass(slots=True)
class AccumulationWindow:
    """The micro-batches of one optimizer step, on all processes.

    Attributes:
        known_samples: Samples of all its batches on all processes; None if they are counted during the window.
        is_one_batch: Whether it is a single batch of a single process, whose mean loss is that of the window.
        samples_before: Samples of all processes before it.
        is_skipped: Whether it is not trained on.
        has_failed: Whether this process could not finish one of its batches, and skips the rest.
        own_weights: The weights of this process's batches so far, without pending readings.
        readings: Weights still being copied from the device.
        own_samples: Samples in those batches.
        skipped_batches: Batches skipped by the step, on this process; once the window is closed, on all processes.
        total_weight: The total weight on all processes once the window is closed, if weights are not samples.
    """

    known_samples: int | None
    is_one_batch: bool = False
    samples_before: int = 0
    is_skipped: bool = False
    has_failed: bool = False
    own_weights: list[float] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    own_samples: int = 0
    skipped_batches: int = 0
    total_weight: float = 0.0

    def add(self, weight: Weight, samples: int) -> None:
        """Count one batch of this process."""
        if isinstance(weight, torch.Tensor):
            self.readings.append(Reading(weight))
        else:
            self.own_weights.append(weight)
        self.own_samples += samples

    def read_weights(self) -> None:
        """Add the pending weights.

        Raises:
            ModuleContractError: A weight is invalid.
        """
        for reading in self.readings:
            weight = reading.read()
            require_weight("training_step", weight, f"{type(weight).__name__} {weight!r}")
            self.own_weights.append(weight)
        self.readings = []


class Weighting:
    """Scales losses and gradients of windows.

    Args:
        divisor: By what the engine divides the sum of the gradients of all processes.

    Attributes:
        is_explicit: Whether steps return weights; None before the first batch.
        reference: The mean weight of a batch in the last window whose total was not known beforehand.
    """

    def __init__(self, divisor: int) -> None:
        self._divisor = divisor
        self.is_explicit: bool | None = None
        self.reference = 1.0

    def decide(self, weight: Weight | None, *, is_explicit: bool) -> None:
        """Agree, at the first batch, on the kind and the scale of weights.

        Processes: collective, at the first batch of a run only.

        Args:
            weight: The weight of this process's first batch; None if it has none.
            is_explicit: Whether the step returned that weight.
        """
        numbers = (float(weight or 0.0), float(weight is not None), float(is_explicit))
        weights, has_batch, explicit = zip(*gather_numbers(numbers), strict=True)
        self.is_explicit = any(explicit) if any(has_batch) else None  # then the next batch decides
        # A power of two: gradients do not depend on which process had the first batch, because it rounds nothing.
        first = next(filter(None, weights), 1.0)
        self.reference = 2.0 ** round(math.log2(first))

    def uses_plan(self, window: AccumulationWindow) -> bool:
        """Return whether the total weight of a window is its planned number of samples."""
        return window.known_samples is not None and not self.is_explicit and not window.is_one_batch

    def loss_factor(self, window: AccumulationWindow, weight: Weight) -> Weight:
        """Return the factor for the mean loss of a batch before backward."""
        if window.is_one_batch:
            return 1.0
        if self.uses_plan(window):
            return weight * self._divisor / (window.known_samples or 1)
        return weight / self.reference

    def close(self, window: AccumulationWindow) -> tuple[float, int]:
        """Return the factor for the reduced gradients of a finished window, and its samples over all processes.

        Processes: collective if the sum of weights was not known beforehand.

        Returns:
            The factor, which is 0 if all weights are 0; and the number of samples.
        """
        if window.readings:
            window.read_weights()
        if window.is_one_batch:
            [window.total_weight] = window.own_weights or [0.0]
            return float(bool(window.total_weight)), window.own_samples
        if window.known_samples is not None and self.uses_plan(window):
            return float(window.known_samples > 0), window.known_samples
        weights = window.own_weights
        sums = sum_exactly(weights, [len(weights)], [window.own_samples], [window.skipped_batches])
        total, batches, samples, window.skipped_batches = sums[0], *map(int, sums[1:])
        window.total_weight = total
        # A window in which every target is masked: dividing by it would make all weights NaN.
        if total <= 0:
            return 0.0, samples
        factor = self._divisor * self.reference / total
        self.reference = total / batches
        return factor, samples

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next window depends on."""
        return {"is_explicit": self.is_explicit, "reference": self.reference}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore state from `state_dict`."""
        self.is_explicit = state["is_explicit"]
        self.reference = state["reference"]


def require_weight(step: str, number: float, shown: str) -> None:
    """Check the weight of a step's loss.

    Raises:
        ModuleContractError: It is not a finite non-negative number.
    """
    if not 0 <= number < math.inf:
        do = "return the weight of the loss, such as (labels != -100).sum()"
        raise fail(
            ModuleContractError,
            step,
            got=f'"weight": {shown}',
            expected="a finite number of at least 0",
            do=do,
        )
