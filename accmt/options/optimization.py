"""Trainer arguments about optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from accmt.options.checks import (
    Expected,
    Group,
    Off,
    Options,
    Range,
    raise_wrong_value,
    require_choice,
    write_argument,
)
from accmt.registry import names

_ACCUMULATION = Expected(
    "a whole number of at least 1, or {epoch: number} with epochs of at least 0 and numbers of at least 1", "2"
)
_LIMIT = Expected("a number above 0", "1.0")

Limit: TypeAlias = Annotated[float, Range(ge=0)]
"""A limit of the gradient; 0 is off."""


def _require_window_maker(name: str, value: Any) -> None:
    """Look up a name only if there are any: otherwise a string is a number in quotes."""
    if not isinstance(value, str):
        return
    makers = names("accmt.window_makers")
    if makers:
        require_choice(name, value, makers)
    else:
        number = int(value) if value.isdecimal() else 0
        raise_wrong_value(name, value, _ACCUMULATION.text, write_argument(name, number or 2))


@dataclass(frozen=True, kw_only=True)
class Clipping(Options):
    """Gradient clipping for `clip_grad`: by norm or by value.

    Args:
        norm: Maximum norm of the whole gradient; a larger gradient is scaled down.
        value: Maximum absolute value of each entry; larger entries are clamped.
    """

    norm: Annotated[Limit | None, _LIMIT, Off()] = None
    value: Annotated[Limit | None, _LIMIT, Off()] = None

    def check(self, name: str) -> None:
        """Reject both at once; neither is off."""
        # A step clips once: one of the two would be ignored.
        if self.norm is not None and self.value is not None:
            raise_wrong_value(name, self.to_dict(), "either norm or value", "clip_grad=Clipping(value=0.5)")


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings(Group):
    """Gradient accumulation and clipping.

    Args:
        grad_accumulation_steps: Batches per process and optimizer step: a number; `{epoch: number}` with the epoch
            (from 0) at which each number starts to apply; or the name of another package's window maker (entry-point
            group `accmt.window_makers`). None means 1.
        clip_grad: Maximum gradient norm of an optimizer step. `Clipping(value=0.5)` clamps each entry instead. None or
            0 disables clipping. For sparse gradients, only the stored values count.
        set_to_none: Whether to free gradients after a step instead of setting them to zero.
        same_bits: Computes each batch in this many units, a power of two, so that weights, metrics and checkpoints have
            the same bits on any number of processes that divides it. `batch_size` then counts the samples of all
            processes together. None: the last bits depend on the number of processes.
    """

    grad_accumulation_steps: Annotated[
        Annotated[int, Range(ge=1)] | Mapping[Annotated[int, Range(ge=0)], Annotated[int, Range(ge=1)]] | str | None,
        _ACCUMULATION,
        _require_window_maker,
        Off(),
    ] = None
    clip_grad: Annotated[Limit | Clipping | Mapping[str, float] | None, _LIMIT, Off()] = None
    set_to_none: bool = True
    same_bits: Annotated[int, Range(ge=1)] | None = None

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
