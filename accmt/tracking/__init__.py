"""Tracking: logs the values of a run to `history.jsonl`, from where the selected trackers get them."""

from accmt.tracking.history import RunPlace, default_run_name, default_track_name, is_url, read_history
from accmt.tracking.tracking import RunStatus, Tracking

__all__ = [
    "RunPlace",
    "RunStatus",
    "Tracking",
    "default_run_name",
    "default_track_name",
    "is_url",
    "read_history",
]
