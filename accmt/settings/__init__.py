"""The Trainer's arguments, grouped by the part that reads them. Each argument is documented once: in its class."""

from accmt.settings.data import DataSettings, Limits
from accmt.settings.evaluation import EvaluationSettings, MetricOptions
from accmt.settings.handlers import Handler
from accmt.settings.monitor import Monitor
from accmt.settings.optimization import Clipping, OptimizationSettings
from accmt.settings.running import Failures, FailureSettings, RunningSettings, TorchFlags
from accmt.settings.saving import Checkpointer, CheckpointSettings, SavingSettings
from accmt.settings.settings import Settings
from accmt.settings.tracking import Delivery, TrackingSettings

__all__ = [
    "CheckpointSettings",
    "Checkpointer",
    "Clipping",
    "DataSettings",
    "Delivery",
    "EvaluationSettings",
    "FailureSettings",
    "Failures",
    "Handler",
    "Limits",
    "MetricOptions",
    "Monitor",
    "OptimizationSettings",
    "RunningSettings",
    "SavingSettings",
    "Settings",
    "TorchFlags",
    "TrackingSettings",
]
