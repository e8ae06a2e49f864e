"""accmt: train transformers and PyTorch models on Accelerate.

Importing has no side effects: no Accelerator, no environment variables, no CUDA, no tracker. Names are loaded lazily.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from accmt.installation import require_own_folder
from accmt.version import __version__

if TYPE_CHECKING:
    from accmt.addons.averaging import EMA as EMA
    from accmt.addons.best_models import BestModels as BestModels
    from accmt.addons.curricula import RangeCurriculum as RangeCurriculum
    from accmt.addons.curricula import RatioCurriculum as RatioCurriculum
    from accmt.addons.curricula import StepsCurriculum as StepsCurriculum
    from accmt.addons.hub import PushToHub as PushToHub
    from accmt.addons.memory_snapshots import MemorySnapshots as MemorySnapshots
    from accmt.addons.merging import merge_adapter as merge_adapter
    from accmt.addons.outputs import OutputCollector as OutputCollector
    from accmt.addons.outputs import gather_on_cpu as gather_on_cpu
    from accmt.addons.prediction_metrics import AUROC as AUROC
    from accmt.addons.prediction_metrics import F1 as F1
    from accmt.addons.prediction_metrics import MAE as MAE
    from accmt.addons.prediction_metrics import MSE as MSE
    from accmt.addons.prediction_metrics import R2 as R2
    from accmt.addons.prediction_metrics import RMSE as RMSE
    from accmt.addons.prediction_metrics import Perplexity as Perplexity
    from accmt.addons.prediction_metrics import Precision as Precision
    from accmt.addons.prediction_metrics import Recall as Recall
    from accmt.addons.prefer.distillation import DistillationModule as DistillationModule
    from accmt.addons.prefer.module import PreferenceModule as PreferenceModule
    from accmt.addons.prefer.reward import RewardModule as RewardModule
    from accmt.addons.process_tools import dist_breakpoint as dist_breakpoint
    from accmt.addons.process_tools import iterbatch as iterbatch
    from accmt.addons.process_tools import on_local_process as on_local_process
    from accmt.addons.process_tools import on_process as on_process
    from accmt.addons.readers.rows import read_files as read_files
    from accmt.addons.sft.module import SFTModule as SFTModule
    from accmt.addons.swa import SWA as SWA
    from accmt.addons.sweep.worker import Sweep as Sweep
    from accmt.addons.temperature import TemperatureSampler as TemperatureSampler
    from accmt.addons.trackers.aim import Aim as Aim
    from accmt.addons.trackers.clearml import ClearML as ClearML
    from accmt.addons.trackers.comet_ml import CometML as CometML
    from accmt.addons.trackers.dvclive import DVCLive as DVCLive
    from accmt.addons.trackers.mlflow import MLFlow as MLFlow
    from accmt.addons.trackers.swanlab import SwanLab as SwanLab
    from accmt.addons.trackers.tensorboard import TensorBoard as TensorBoard
    from accmt.addons.trackers.trackio import Trackio as Trackio
    from accmt.addons.trackers.wandb import WandB as WandB
    from accmt.callbacks import Callback as Callback
    from accmt.callbacks import LambdaCallback as LambdaCallback
    from accmt.callbacks import MainProcessCallback as MainProcessCallback
    from accmt.data import set_seed as set_seed
    from accmt.engine.borrowed import gather_with_gradients as gather_with_gradients
    from accmt.errors import AccmtError as AccmtError
    from accmt.errors import ArgumentError as ArgumentError
    from accmt.errors import ArgumentFileError as ArgumentFileError
    from accmt.errors import CallbackNotFoundError as CallbackNotFoundError
    from accmt.errors import CheckpointCorruptError as CheckpointCorruptError
    from accmt.errors import CheckpointError as CheckpointError
    from accmt.errors import CombinedError as CombinedError
    from accmt.errors import DataError as DataError
    from accmt.errors import DeviceError as DeviceError
    from accmt.errors import HyperParameterError as HyperParameterError
    from accmt.errors import HyperParameterFileError as HyperParameterFileError
    from accmt.errors import HyperParameterTypeError as HyperParameterTypeError
    from accmt.errors import MetricError as MetricError
    from accmt.errors import MissingArgumentError as MissingArgumentError
    from accmt.errors import MissingPackageError as MissingPackageError
    from accmt.errors import ModuleContractError as ModuleContractError
    from accmt.errors import NoCheckpointError as NoCheckpointError
    from accmt.errors import NonFiniteError as NonFiniteError
    from accmt.errors import PackageConflictError as PackageConflictError
    from accmt.errors import Preempted as Preempted
    from accmt.errors import ProcessFailedError as ProcessFailedError
    from accmt.errors import ReplicasDifferError as ReplicasDifferError
    from accmt.errors import SavingError as SavingError
    from accmt.errors import StepDiffersError as StepDiffersError
    from accmt.errors import StoreError as StoreError
    from accmt.errors import TrackerError as TrackerError
    from accmt.errors import UnknownArgumentError as UnknownArgumentError
    from accmt.errors import WeightsError as WeightsError
    from accmt.metrics import Accuracy as Accuracy
    from accmt.metrics import Metric as Metric
    from accmt.module import AcceleratorModule as AcceleratorModule
    from accmt.module import ExtendedAcceleratorModule as ExtendedAcceleratorModule
    from accmt.optimization import ChainedOptimizer as ChainedOptimizer
    from accmt.options import HyperParameters as HyperParameters
    from accmt.options import Optimizer as Optimizer
    from accmt.options import Scheduler as Scheduler
    from accmt.options.data import DataOptions as DataOptions
    from accmt.options.data import Limits as Limits
    from accmt.options.evaluation import MetricOptions as MetricOptions
    from accmt.options.failures import Failures as Failures
    from accmt.options.failures import Handler as Handler
    from accmt.options.optimization import Clipping as Clipping
    from accmt.options.running import ParallelismOptions as ParallelismOptions
    from accmt.options.running import TorchFlags as TorchFlags
    from accmt.options.saving import Checkpointer as Checkpointer
    from accmt.options.saving import CheckpointOptions as CheckpointOptions
    from accmt.options.saving import PatienceOptions as PatienceOptions
    from accmt.options.tracking import Ledger as Ledger
    from accmt.options.tracking import Monitor as Monitor
    from accmt.options.tracking import TrackerOptions as TrackerOptions
    from accmt.precisions import allow_tf32 as allow_tf32
    from accmt.processes import on_last_process as on_last_process
    from accmt.processes import on_local_main_process as on_local_main_process
    from accmt.processes import on_main_process as on_main_process
    from accmt.setup.model import create_optimizer as create_optimizer
    from accmt.state import TrainingState as TrainingState
    from accmt.tracking import read_history as read_history
    from accmt.trainer import Trainer as Trainer

_ERRORS = (
    "AccmtError",
    "ArgumentError",
    "ArgumentFileError",
    "CallbackNotFoundError",
    "CheckpointCorruptError",
    "CheckpointError",
    "CombinedError",
    "DataError",
    "DeviceError",
    "HyperParameterError",
    "HyperParameterFileError",
    "HyperParameterTypeError",
    "MetricError",
    "MissingArgumentError",
    "MissingPackageError",
    "ModuleContractError",
    "NoCheckpointError",
    "NonFiniteError",
    "PackageConflictError",
    "Preempted",
    "ProcessFailedError",
    "ReplicasDifferError",
    "SavingError",
    "StepDiffersError",
    "StoreError",
    "TrackerError",
    "UnknownArgumentError",
    "WeightsError",
)
_HOMES = {
    **dict.fromkeys(_ERRORS, "accmt.errors"),
    "AUROC": "accmt.addons.prediction_metrics",
    "AcceleratorModule": "accmt.module",
    "Accuracy": "accmt.metrics",
    "Aim": "accmt.addons.trackers.aim",
    "BestModels": "accmt.addons.best_models",
    "Callback": "accmt.callbacks",
    "ChainedOptimizer": "accmt.optimization",
    "CheckpointOptions": "accmt.options.saving",
    "Checkpointer": "accmt.options.saving",
    "ClearML": "accmt.addons.trackers.clearml",
    "Clipping": "accmt.options.optimization",
    "CometML": "accmt.addons.trackers.comet_ml",
    "DVCLive": "accmt.addons.trackers.dvclive",
    "DataOptions": "accmt.options.data",
    "DistillationModule": "accmt.addons.prefer.distillation",
    "EMA": "accmt.addons.averaging",
    "ExtendedAcceleratorModule": "accmt.module",
    "F1": "accmt.addons.prediction_metrics",
    "Failures": "accmt.options.failures",
    "Handler": "accmt.options.failures",
    "HyperParameters": "accmt.options",
    "LambdaCallback": "accmt.callbacks",
    "Ledger": "accmt.options.tracking",
    "Limits": "accmt.options.data",
    "MAE": "accmt.addons.prediction_metrics",
    "MLFlow": "accmt.addons.trackers.mlflow",
    "MSE": "accmt.addons.prediction_metrics",
    "MainProcessCallback": "accmt.callbacks",
    "MemorySnapshots": "accmt.addons.memory_snapshots",
    "Metric": "accmt.metrics",
    "MetricOptions": "accmt.options.evaluation",
    "Monitor": "accmt.options.tracking",
    "Optimizer": "accmt.options",
    "OutputCollector": "accmt.addons.outputs",
    "ParallelismOptions": "accmt.options.running",
    "PatienceOptions": "accmt.options.saving",
    "Perplexity": "accmt.addons.prediction_metrics",
    "Precision": "accmt.addons.prediction_metrics",
    "PreferenceModule": "accmt.addons.prefer.module",
    "PushToHub": "accmt.addons.hub",
    "R2": "accmt.addons.prediction_metrics",
    "RMSE": "accmt.addons.prediction_metrics",
    "RangeCurriculum": "accmt.addons.curricula",
    "RatioCurriculum": "accmt.addons.curricula",
    "Recall": "accmt.addons.prediction_metrics",
    "RewardModule": "accmt.addons.prefer.reward",
    "SFTModule": "accmt.addons.sft.module",
    "SWA": "accmt.addons.swa",
    "Scheduler": "accmt.options",
    "StepsCurriculum": "accmt.addons.curricula",
    "SwanLab": "accmt.addons.trackers.swanlab",
    "Sweep": "accmt.addons.sweep.worker",
    "TemperatureSampler": "accmt.addons.temperature",
    "TensorBoard": "accmt.addons.trackers.tensorboard",
    "TorchFlags": "accmt.options.running",
    "TrackerOptions": "accmt.options.tracking",
    "Trackio": "accmt.addons.trackers.trackio",
    "Trainer": "accmt.trainer",
    "TrainingState": "accmt.state",
    "WandB": "accmt.addons.trackers.wandb",
    "allow_tf32": "accmt.precisions",
    "create_optimizer": "accmt.setup.model",
    "dist_breakpoint": "accmt.addons.process_tools",
    "gather_on_cpu": "accmt.addons.outputs",
    "gather_with_gradients": "accmt.engine.borrowed",
    "iterbatch": "accmt.addons.process_tools",
    "merge_adapter": "accmt.addons.merging",
    "on_last_process": "accmt.processes",
    "on_local_main_process": "accmt.processes",
    "on_local_process": "accmt.addons.process_tools",
    "on_main_process": "accmt.processes",
    "on_process": "accmt.addons.process_tools",
    "read_files": "accmt.addons.readers.rows",
    "read_history": "accmt.tracking",
    "set_seed": "accmt.data",
}

require_own_folder(__path__[0])
__path__.append(f"{__path__[0]}/addons/hints/modules")  # the names of the original's modules, behind those of here

_NEEDS_EXTRA = {"Sweep"}  # its package is optional, and a star import imports all names
__all__ = ["__version__", *(name for name in _HOMES if name not in _NEEDS_EXTRA)]  # noqa: PLE0604 - names of strings


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from accmt.registry import addon

        return addon("find_name")(name)
    if _HOMES[name] != "accmt.errors":
        from accmt.libraries.versions import require

        require("torch")  # an older version would fail later with an unclear error
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(["__version__", *_HOMES, "accelerator", "seed_everything"])
