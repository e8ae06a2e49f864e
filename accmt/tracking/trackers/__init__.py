"""One file per tracker, named like the tracker: how it is installed, built, ended and shown.

A new one is a file with a `TrackerSpec` and a `TrackerRun`, and its name here, in `accmt.tracking` and in `accmt`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accmt.tracking.trackers.aim import Aim
from accmt.tracking.trackers.clearml import ClearML
from accmt.tracking.trackers.comet_ml import CometML
from accmt.tracking.trackers.dvclive import DVCLive
from accmt.tracking.trackers.mlflow import MLFlow
from accmt.tracking.trackers.swanlab import SwanLab
from accmt.tracking.trackers.tensorboard import TensorBoard
from accmt.tracking.trackers.trackio import Trackio
from accmt.tracking.trackers.wandb import WandB

if TYPE_CHECKING:
    from accmt.tracking.spec import TrackerSpec

_TRACKERS: tuple[type[TrackerSpec], ...] = (
    TensorBoard,
    MLFlow,
    WandB,
    CometML,
    Aim,
    ClearML,
    DVCLive,
    Trackio,
    SwanLab,
)
TRACKERS = {tracker.name: tracker for tracker in _TRACKERS}
"""The trackers by the names that stand for them in `log_with`."""

__all__ = [
    "TRACKERS",
    "Aim",
    "ClearML",
    "CometML",
    "DVCLive",
    "MLFlow",
    "SwanLab",
    "TensorBoard",
    "Trackio",
    "WandB",
]
