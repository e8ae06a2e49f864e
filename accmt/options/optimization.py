"""The Trainer's arguments about optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

from accmt.options.checks import raise_wrong_value, require_flags, require_int, require_options, require_positive


class Clipping(TypedDict, total=False):
    """What `clip_grad` may limit: the norm of the whole gradient, or each of its entries."""

    norm: float
    value: float


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings:
    """How gradients become optimizer steps.

    Args:
        grad_accumulation_steps: Batches of each process that make one optimizer step: a number, or `{epoch: number}`
            with the epoch (from 0) at which each begins. None is 1.
        clip_grad: Largest norm of the gradient of an optimizer step: the whole gradient is scaled. `{"value": 0.5}`
            cuts each of its entries instead. None or 0 is off. Of a sparse gradient the values count.
        set_to_none: Whether gradients are dropped after a step instead of filled with zeros.
        auto_micro_batch: Whether running out of memory in a training step halves the micro-batch, doubles the
            accumulation and trains on: the effective batch, the order of samples and the scheduler stay. Several
            processes then reduce gradients after a window's last backward, not during it.
    """

    grad_accumulation_steps: int | Mapping[int, int] | None = None
    clip_grad: float | Clipping | None = None
    set_to_none: bool = True
    auto_micro_batch: bool = False

    def __post_init__(self) -> None:
        require_flags(self)
        if isinstance(self.clip_grad, Mapping):
            require_options("clip_grad", self.clip_grad, Clipping)
            if len(self.clip_grad) != 1:
                raise_wrong_value("clip_grad", self.clip_grad, "either norm or value", 'clip_grad={"value": 0.5}')
        if self.clip_limit is not None and self.clip_limit != 0:
            require_positive("clip_grad.value" if self.clip_type == "value" else "clip_grad", self.clip_limit)
        steps = self.grad_accumulation_steps
        if isinstance(steps, Mapping):
            for epoch, number in steps.items():
                require_int("grad_accumulation_steps (epoch)", epoch, at_least=0)
                require_int(f"grad_accumulation_steps[{epoch}]", number, at_least=1)
        elif steps is not None:
            require_int("grad_accumulation_steps", steps, at_least=1, also=", or {epoch: number}")

    @property
    def clip_type(self) -> Literal["norm", "value"]:
        """Whether the norm of the gradient is limited, or each entry."""
        return "value" if isinstance(self.clip_grad, Mapping) and "value" in self.clip_grad else "norm"

    @property
    def clip_limit(self) -> float | None:
        """The largest norm, or entry; None or 0 is off."""
        clip = self.clip_grad
        return clip.get(self.clip_type) if isinstance(clip, Mapping) else clip

    def accumulation_at(self, epoch: int) -> int:
        """Return how many batches of each process make one optimizer step in `epoch` (from 0)."""
        steps = self.grad_accumulation_steps
        if isinstance(steps, Mapping):
            begun = [start for start in steps if start <= epoch]
            return steps[max(begun)] if begun else 1
        return steps or 1
