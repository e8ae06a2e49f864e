"""The Trainer's arguments about optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from accmt.options.checks import Options, raise_wrong_value, require_flags, require_int, require_positive, set_field


def require_clipping(name: str, value: Any) -> None:
    """Check a limit of gradients; 0 and None are off.

    Raises:
        ArgumentError: It is no number, or below 0.
    """
    if value is not None and (value != 0 or isinstance(value, bool)):
        require_positive(name, value)


@dataclass(frozen=True, kw_only=True)
class Clipping(Options):
    """What `clip_grad` may limit; one of the two.

    Args:
        norm: The norm of the whole gradient, which is scaled.
        value: Each of its entries, which is cut.
    """

    norm: Annotated[float, require_clipping] | None = None
    value: Annotated[float, require_clipping] | None = None

    def check(self, name: str) -> None:
        """Refuse both at once, and neither."""
        if (self.norm is None) == (self.value is None):
            raise_wrong_value(name, self.to_dict(), "either norm or value", "clip_grad=Clipping(value=0.5)")


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings:
    """How gradients become optimizer steps.

    Args:
        grad_accumulation_steps: Batches of each process that make one optimizer step: a number, or `{epoch: number}`
            with the epoch (from 0) at which each begins. None is 1.
        clip_grad: Largest norm of the gradient of an optimizer step: the whole gradient is scaled.
            `Clipping(value=0.5)` cuts each of its entries instead. None or 0 is off. Of a sparse gradient the values
            count.
        set_to_none: Whether gradients are dropped after a step instead of filled with zeros.
    """

    grad_accumulation_steps: int | Mapping[int, int] | None = None
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
        elif steps is not None:
            require_int("grad_accumulation_steps", steps, at_least=1, also=", or {epoch: number}")

    @property
    def clip_type(self) -> Literal["norm", "value"]:
        """Whether the norm of the gradient is limited, or each entry."""
        return "value" if isinstance(self.clip_grad, Clipping) and self.clip_grad.value is not None else "norm"

    @property
    def clip_limit(self) -> float | None:
        """The largest norm, or entry; None or 0 is off."""
        clip: Any = self.clip_grad
        limit: float | None = getattr(clip, self.clip_type) if isinstance(clip, Clipping) else clip
        return limit

    def accumulation_at(self, epoch: int) -> int:
        """Return how many batches of each process make one optimizer step in `epoch` (from 0)."""
        steps = self.grad_accumulation_steps
        if isinstance(steps, Mapping):
            begun = [start for start in steps if start <= epoch]
            return steps[max(begun)] if begun else 1
        return steps or 1
