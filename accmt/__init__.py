"""accmt: train transformers and PyTorch models on Accelerate.

Importing has no effect: no Accelerator, no environment read, no CUDA, no tracker; names are loaded when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from accmt.version import __version__

if TYPE_CHECKING:
    from accmt.callbacks import EMA as EMA
    from accmt.callbacks import Callback as Callback
    from accmt.callbacks import LambdaCallback as LambdaCallback
    from accmt.callbacks import MainProcessCallback as MainProcessCallback
    from accmt.config import HyperParameters as HyperParameters
    from accmt.data import RangeCurriculum as RangeCurriculum
    from accmt.data import RatioCurriculum as RatioCurriculum
    from accmt.data import StepsCurriculum as StepsCurriculum
    from accmt.data import TemperatureSampler as TemperatureSampler
    from accmt.data import set_seed as set_seed
    from accmt.decorators import on_last_process as on_last_process
    from accmt.decorators import on_local_main_process as on_local_main_process
    from accmt.decorators import on_main_process as on_main_process
    from accmt.metrics import Accuracy as Accuracy
    from accmt.metrics import Metric as Metric
    from accmt.metrics import OutputCollector as OutputCollector
    from accmt.metrics import gather_on_cpu as gather_on_cpu
    from accmt.module import AcceleratorModule as AcceleratorModule
    from accmt.module import ExtendedAcceleratorModule as ExtendedAcceleratorModule
    from accmt.precision import allow_tf32 as allow_tf32
    from accmt.settings.handlers import Handler as Handler
    from accmt.settings.monitor import Monitor as Monitor
    from accmt.settings.saving import Checkpointer as Checkpointer
    from accmt.state import TrainingState as TrainingState
    from accmt.tracking import Aim as Aim
    from accmt.tracking import ClearML as ClearML
    from accmt.tracking import CometML as CometML
    from accmt.tracking import DVCLive as DVCLive
    from accmt.tracking import MLFlow as MLFlow
    from accmt.tracking import SwanLab as SwanLab
    from accmt.tracking import TensorBoard as TensorBoard
    from accmt.tracking import Trackio as Trackio
    from accmt.tracking import WandB as WandB
    from accmt.tracking import read_history as read_history
    from accmt.trainer import Trainer as Trainer

_HOMES = {
    "AcceleratorModule": "accmt.module",
    "Accuracy": "accmt.metrics",
    "Aim": "accmt.tracking",
    "Callback": "accmt.callbacks",
    "Checkpointer": "accmt.settings.saving",
    "ClearML": "accmt.tracking",
    "CometML": "accmt.tracking",
    "DVCLive": "accmt.tracking",
    "EMA": "accmt.callbacks",
    "ExtendedAcceleratorModule": "accmt.module",
    "Handler": "accmt.settings.handlers",
    "HyperParameters": "accmt.config",
    "LambdaCallback": "accmt.callbacks",
    "MLFlow": "accmt.tracking",
    "MainProcessCallback": "accmt.callbacks",
    "Metric": "accmt.metrics",
    "Monitor": "accmt.settings.monitor",
    "OutputCollector": "accmt.metrics",
    "RangeCurriculum": "accmt.data",
    "RatioCurriculum": "accmt.data",
    "StepsCurriculum": "accmt.data",
    "SwanLab": "accmt.tracking",
    "TemperatureSampler": "accmt.data",
    "TensorBoard": "accmt.tracking",
    "Trackio": "accmt.tracking",
    "Trainer": "accmt.trainer",
    "TrainingState": "accmt.state",
    "WandB": "accmt.tracking",
    "allow_tf32": "accmt.precision",
    "gather_on_cpu": "accmt.metrics",
    "on_last_process": "accmt.decorators",
    "on_local_main_process": "accmt.decorators",
    "on_main_process": "accmt.decorators",
    "read_history": "accmt.tracking",
    "set_seed": "accmt.data",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - names of strings


def __getattr__(name: str) -> Any:
    if name == "accelerator":
        from accmt.setup.accelerator import current_accelerator

        return current_accelerator()
    if name == "seed_everything":
        name = "set_seed"
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "accelerator", "seed_everything"])
