"""The Trainer's arguments, grouped by the part that reads it. Each argument is documented once: in its class."""

from accmt.settings.data import DataSettings
from accmt.settings.evaluation import EvaluationSettings
from accmt.settings.optimization import OptimizationSettings
from accmt.settings.running import FailureSettings, RunningSettings
from accmt.settings.saving import CheckpointSettings, SavingSettings
from accmt.settings.settings import Settings
from accmt.settings.tracking import TrackingSettings

__all__ = [
    "CheckpointSettings",
    "DataSettings",
    "EvaluationSettings",
    "FailureSettings",
    "OptimizationSettings",
    "RunningSettings",
    "SavingSettings",
    "Settings",
    "TrackingSettings",
]
