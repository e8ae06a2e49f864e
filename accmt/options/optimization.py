"""Trainer arguments about optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from accmt.options.checks import (
    Options,
    raise_wrong_value,
    require_choice,
    require_flags,
    require_int,
    require_positive,
    set_field,
)
from accmt.registry import names


def require_clipping(name: str, value: Any) -> None:
    """Check a gradient limit; 0 and None are off.

    Raises:
        ArgumentError: It is not a number, or below 0.
    """
    if value is not None and (value != 0 or isinstance(value, bool)):
        require_positive(name, value)


@dataclass(frozen=True, kw_only=True)
class Clipping(Options):
    """Gradient clipping for `clip_grad`: by norm or by value.

    Args:
        norm: Maximum norm of the whole gradient; a larger gradient is scaled down.
        value: Maximum absolute value of each entry; larger entries are clamped.
    """

    norm: Annotated[float, require_clipping] | None = None
    value: Annotated[float, require_clipping] | None = None

    def check(self, name: str) -> None:
        """Reject both at once; neither is off."""
        if self.norm is not None and self.value is not None:
            raise_wrong_value(name, self.to_dict(), "either norm or value", "clip_grad=Clipping(value=0.5)")


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings:
    """Gradient accumulation and clipping.

    Args:
        grad_accumulation_steps: Batches per process and optimizer step: a number; `{epoch: number}` with the epoch
            (from 0) at which each number starts to apply; or the name of a window maker from another package
            (entry-point group `accmt.window_makers`), which decides after each batch whether the window is complete.
            None means 1.
        clip_grad: Maximum gradient norm of an optimizer step; the whole gradient is scaled. `Clipping(value=0.5)`
            clamps each entry instead. None or 0 disables clipping. For sparse gradients, only the stored values count.
        set_to_none: Whether to free gradients after a step instead of setting them to zero.
    """

    grad_accumulation_steps: int | Mapping[int, int] | str | None = None
    clip_grad: float | Clipping | Mapping[str, float] | None = None
    set_to_none: bool = True

    def __post_init__(self) -> None:
        require_flags(self)
        if isinstance(self.clip_grad, Mapping):
            set_field(self, "clip_grad", Clipping.read("clip_grad", self.clip_grad))
        elif not isinstance(self.clip_grad, Clipping):
            require_clipping("clip_grad", self.clip_grad)
        steps = self.grad_accumulation_steps
        if isinstance(steps, Mapping):
            for epoch, number in steps.items():
                require_int("grad_accumulation_steps (epoch)", epoch, at_least=0)
                require_int(f"grad_accumulation_steps[{epoch}]", number, at_least=1)
        elif isinstance(steps, str) and (makers := names("accmt.window_makers")):
            require_choice("grad_accumulation_steps", steps, makers)
        elif steps is not None:
            require_int("grad_accumulation_steps", steps, at_least=1, also=", or {epoch: number}")

    @property
    def clip_type(self) -> Literal["norm", "value"]:
        """Whether clipping applies to the gradient's norm or to each entry."""
        return "value" if isinstance(self.clip_grad, Clipping) and self.clip_grad.value is not None else "norm"

    @property
    def clip_limit(self) -> float | None:
        """The largest norm or entry; None or 0 is off."""
        clip: Any = self.clip_grad
        limit: float | None = getattr(clip, self.clip_type) if isinstance(clip, Clipping) else clip
        return limit

    @property
    def window_maker(self) -> str | None:
        """The name of the window maker; None if the number of batches is set."""
        return self.grad_accumulation_steps if isinstance(self.grad_accumulation_steps, str) else None

    def accumulation_at(self, epoch: int) -> int | None:
        """Return the batches per process and optimizer step in `epoch` (from 0); None if a window maker decides."""
        steps = self.grad_accumulation_steps
        if isinstance(steps, str):
            return None
        if isinstance(steps, Mapping):
            begun = [start for start in steps if start <= epoch]
            return steps[max(begun)] if begun else 1
        return steps or 1
