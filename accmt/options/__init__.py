"""User options: the hyper-parameters and the Trainer's arguments, each documented once, in its group."""

from accmt.options.data import DataOptions, DataSettings, Limits
from accmt.options.evaluation import EvaluationSettings, MetricOptions
from accmt.options.failures import Failures, FailureSettings, Handler
from accmt.options.hyperparameters import HyperParameters
from accmt.options.optimization import Clipping, OptimizationSettings
from accmt.options.optimizer_and_scheduler_names import Optimizer, Scheduler
from accmt.options.running import RunningSettings, TorchFlags
from accmt.options.saving import Checkpointer, CheckpointOptions, CheckpointSettings, SavingSettings
from accmt.options.settings import Settings
from accmt.options.tracking import Ledger, Monitor, TrackerOptions, TrackingSettings

__all__ = [
    "CheckpointOptions",
    "CheckpointSettings",
    "Checkpointer",
    "Clipping",
    "DataOptions",
    "DataSettings",
    "Ledger",
    "EvaluationSettings",
    "FailureSettings",
    "Failures",
    "Handler",
    "HyperParameters",
    "Limits",
    "MetricOptions",
    "Monitor",
    "OptimizationSettings",
    "Optimizer",
    "RunningSettings",
    "SavingSettings",
    "Scheduler",
    "Settings",
    "TorchFlags",
    "TrackerOptions",
    "TrackingSettings",
]
