"""Where the numbers of a run go: `history.jsonl` always, and the trackers that the user asked for."""

from accmt.tracking.history import read_history
from accmt.tracking.log_with import find_specs, resolve_trackers
from accmt.tracking.run_folder import RunPlace, default_run_name, default_track_name, is_url
from accmt.tracking.spec import TrackerSpec
from accmt.tracking.sync_run import Synced, sync_run
from accmt.tracking.trackers import Aim, ClearML, CometML, DVCLive, MLFlow, SwanLab, TensorBoard, Trackio, WandB
from accmt.tracking.tracking import RunStatus, Tracking

__all__ = [
    "Aim",
    "ClearML",
    "CometML",
    "DVCLive",
    "MLFlow",
    "RunPlace",
    "RunStatus",
    "SwanLab",
    "Synced",
    "TensorBoard",
    "TrackerSpec",
    "Trackio",
    "Tracking",
    "WandB",
    "default_run_name",
    "default_track_name",
    "find_specs",
    "is_url",
    "read_history",
    "resolve_trackers",
    "sync_run",
]
