"""How long each phase of a run takes: the stopwatch with finer purposes, which also counts their calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from accmt.callbacks.stopwatch import Moment, Stopwatch

PHASES = (
    "data",
    "training_step",
    "backward",
    "update",
    "evaluation",
    "saving",
    "checkpoint",
    "logging",
    "callbacks",
    "other",
)

_OPENS_UPDATE = Moment("update", after="update", callbacks="callbacks")
_IN_UPDATE = Moment("update", callbacks="callbacks")
_OTHER = Moment("other", callbacks="callbacks")

PHASE_MOMENTS: dict[str, Moment] = {
    "on_fit_start": _OTHER,
    "on_epoch_start": _OTHER,
    "on_before_training_step": Moment("data", after="training_step", callbacks="callbacks"),
    "on_before_backward": Moment("training_step", after="backward", callbacks="callbacks"),
    "on_after_backward": Moment("backward", after="training_step", callbacks="callbacks"),
    "on_after_training_step": Moment("training_step", callbacks="callbacks"),
    "on_before_optimizer_step": _OPENS_UPDATE,
    "on_after_optimizer_step": _IN_UPDATE,
    "on_before_scheduler_step": _OPENS_UPDATE,
    "on_after_scheduler_step": _IN_UPDATE,
    "on_before_zero_grad": _OPENS_UPDATE,
    "on_after_zero_grad": _IN_UPDATE,
    "on_update_end": _IN_UPDATE,
    "on_log": Moment("logging", callbacks="logging", interrupts=True),
    "on_evaluation_start": Moment("other", after="evaluation", callbacks="callbacks"),
    "on_evaluation_end": Moment("evaluation", callbacks="callbacks"),
    "on_save_model": Moment("saving", callbacks="callbacks", is_certain=True, interrupts=True),
    "on_save_checkpoint": Moment("checkpoint", callbacks="callbacks", is_certain=True, interrupts=True),
    "on_epoch_end": _OTHER,
    "on_fit_end": _OTHER,
}

_ENDS_CALL = frozenset(
    {
        "on_before_training_step",
        "on_after_backward",
        "on_after_training_step",
        "on_update_end",
        "on_log",
        "on_evaluation_end",
        "on_save_model",
        "on_save_checkpoint",
    }
)
"""The hooks at which a call of the phase before them is done."""


@dataclass(frozen=True)
class Phase:
    """What one phase took.

    Attributes:
        seconds: All of it together.
        share: Its part of the run, from 0 to 1.
        calls: How often it was done; 0 of what is not counted: callbacks, and what is in no other phase.
        mean_s: Seconds of a call in the mean; None without calls.
        slowest_s: Seconds of the slowest call; None without calls.
    """

    seconds: float
    share: float
    calls: int
    mean_s: float | None
    slowest_s: float | None


class PhaseTimes(Stopwatch):
    """Adds up the time of each phase of a run, and counts its calls. As text it is a table of those that there were.

    The device is waited for at the end of each phase, so that what it works on counts where it was asked for.

    Attributes:
        seconds: Since the start of the run, by phase.
        calls: The calls that are done, by phase.
    """

    def __init__(self) -> None:
        super().__init__(PHASE_MOMENTS, PHASES)
        self.calls = dict.fromkeys(PHASES, 0)
        self._slowest = dict.fromkeys(PHASES, 0.0)
        self._in_call = dict.fromkeys(PHASES, 0.0)
        self._wait: Callable[[], Any] | None = None

    def lap(self, purpose: str) -> float:
        """Give the time since the last lap a phase, when the device is done with its work."""
        if self._wait is None:
            self._wait = torch.get_device_module(self.trainer.device).synchronize
        self._wait()
        passed = super().lap(purpose)
        self._in_call[purpose] += passed
        return passed

    def leave(self, hook: str) -> None:
        """End the callbacks of a hook, and the call that is done there."""
        super().leave(hook)
        if hook in _ENDS_CALL:
            phase = self.moments[hook].before
            self.calls[phase] += 1
            self._slowest[phase] = max(self._slowest[phase], self._in_call[phase])
            self._in_call[phase] = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    @property
    def phases(self) -> dict[str, Phase]:
        """What each phase took until now."""
        total = self.total_s or 1.0
        return {
            name: Phase(
                seconds=seconds,
                share=seconds / total,
                calls=self.calls[name],
                mean_s=(seconds - self._in_call[name]) / self.calls[name] if self.calls[name] else None,
                slowest_s=self._slowest[name] if self.calls[name] else None,
            )
            for name, seconds in self.seconds.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Return all times, as `profile/phases.json` has them."""
        return {"total_s": self.total_s, "phases": {name: asdict(phase) for name, phase in self.phases.items()}}

    def __str__(self) -> str:
        lines = [f"{'phase':<14}{'seconds':>11}{'share':>9}{'calls':>9}{'mean ms':>11}{'slowest ms':>13}"]
        for name, phase in self.phases.items():
            if not phase.calls and not phase.seconds:
                continue
            own = f"{name.replace('_', ' '):<14}{phase.seconds:>11,.3f}{phase.share:>9.1%}"
            lines.append(own + _write_calls(phase))
        return "\n".join([*lines, f"{'all':<14}{self.total_s:>11,.3f}"])


def _write_calls(phase: Phase) -> str:
    if phase.mean_s is None or phase.slowest_s is None:
        return ""
    return f"{phase.calls:>9,}{phase.mean_s * 1000:>11,.3f}{phase.slowest_s * 1000:>13,.3f}"
