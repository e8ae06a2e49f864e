"""Hands rows of the log to the trackers, on the same hooks as a user's callbacks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from accmt.callbacks import MainProcessCallback
from accmt.tracking import Tracking


class RowLogger(MainProcessCallback):
    """Hands every row to the trackers.

    Args:
        tracking: The trackers of the run.
    """

    order = math.inf

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking

    def on_log(self, values: Mapping[str, float], step: int) -> None:
        """Log one row."""
        self._tracking.log(values, step)
