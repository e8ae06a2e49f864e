"""How long a run has taken, not counting interruptions."""

from __future__ import annotations

import time
from collections.abc import Mapping


class Clock:
    """Counts the seconds of a run, over all its parts.

    Args:
        limit_s: How many it may take; None is any number.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self._limit_s = limit_s
        self._before_s = 0.0
        self._began = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds so far, those before an interruption included."""
        return self._before_s + time.monotonic() - self._began

    @property
    def is_used_up(self) -> bool:
        """Whether the run has taken as long as it may."""
        return self._limit_s is not None and self.elapsed_s >= self._limit_s

    def state_dict(self) -> dict[str, float]:
        return {"elapsed_s": self._before_s + time.monotonic() - self._began}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._before_s, self._began = state["elapsed_s"], time.monotonic()
