"""What the Trainer was told about updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accmt.settings.checks import require_choice, require_flags, require_int, require_positive


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings:
    """How gradients become updates.

    Args:
        grad_accumulation_steps: Batches of each process that make one update: a number, or `{epoch: number}` with the
            epoch (from 0) at which each begins. None is 1.
        clip_grad: Largest norm (or value) of the gradient of an update; None or 0 is off.
        clip_grad_type: "norm" scales the whole gradient, "value" cuts each entry.
        set_to_none: Whether gradients are dropped after an update instead of filled with zeros.
        auto_micro_batch: Whether running out of memory in a training step halves the micro-batch, doubles the
            accumulation and trains on: the effective batch, the order of samples and the schedule stay. Several
            processes then reduce gradients after a window's last backward, not during it.
    """

    grad_accumulation_steps: int | Mapping[int, int] | None = None
    clip_grad: float | None = None
    clip_grad_type: str = "norm"
    set_to_none: bool = True
    auto_micro_batch: bool = False

    def __post_init__(self) -> None:
        require_flags(self)
        require_choice("clip_grad_type", self.clip_grad_type, ("norm", "value"))
        if self.clip_grad is not None and self.clip_grad != 0:
            require_positive("clip_grad", self.clip_grad)
        steps = self.grad_accumulation_steps
        if isinstance(steps, Mapping):
            for epoch, number in steps.items():
                require_int("grad_accumulation_steps (epoch)", epoch, at_least=0)
                require_int(f"grad_accumulation_steps[{epoch}]", number, at_least=1)
        elif steps is not None:
            require_int("grad_accumulation_steps", steps, at_least=1, also=", or {epoch: number}")

    def accumulation_at(self, epoch: int) -> int:
        """Return how many batches of each process make one update in `epoch` (from 0)."""
        steps = self.grad_accumulation_steps
        if isinstance(steps, Mapping):
            begun = [start for start in steps if start <= epoch]
            return steps[max(begun)] if begun else 1
        return steps or 1
