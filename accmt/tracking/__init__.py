"""Tracking: logs the values of a run to `history.jsonl` and to the selected trackers."""

from accmt.tracking.history import RunPlace, default_run_name, default_track_name, is_url, read_history
from accmt.tracking.spec import TrackerSpec, find_specs, resolve_trackers
from accmt.tracking.tracking import RunStatus, Tracking

__all__ = [
    "RunPlace",
    "RunStatus",
    "TrackerSpec",
    "Tracking",
    "default_run_name",
    "default_track_name",
    "find_specs",
    "is_url",
    "read_history",
    "resolve_trackers",
]
