"""What a model folder says about the run that made the model, and the Trainer that it was."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import torch

from accmt import huggingface
from accmt.data.options import length_of
from accmt.metrics import Metric
from accmt.metrics.building import BUILTIN
from accmt.run import Run
from accmt.saving import write_command, write_model_card
from accmt.settings import Settings
from accmt.tracking.specs import resolve_trackers, tracker_names
from accmt.version import __version__


def write_card(run: Run, folder: Path) -> None:
    """Write `README.md` into a model folder, unless the user's own is there.

    Processes: main only.
    """
    state, model = run.state, run.unwrapped_model
    write_model_card(
        folder,
        head={**huggingface.describe_model(model), "tags": ["accmt"]},
        sections={
            "Results": {**_describe_loss(run), **state.metrics, **state.best},
            "Model": {"model": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())},
            "Samples": _count_samples(run),
            "Hyper-parameters": run.settings.hps.get_config(),
            "Training": _describe_training(run),
            "Command": write_command(sys.argv),
        },
    )


def describe_trainer(settings: Settings) -> dict[str, Any]:
    """Return the arguments of the Trainer, with metrics and trackers by name where a name makes an equal one.

    Trackers are left out where one is the user's own.
    """
    arguments, told = settings.to_arguments(), settings.tracking
    if "metrics" in arguments:
        arguments["metrics"] = _name_metrics(arguments["metrics"])
    trackers = resolve_trackers(arguments.pop("log_with", None))
    if all(tracker.name in tracker_names() for tracker in trackers):
        own = {tracker.name: tracker.init_kwargs for tracker in trackers if tracker.init_kwargs}
        return arguments | own | ({"log_with": [tracker.name for tracker in trackers]} if trackers else {})
    return {name: value for name, value in arguments.items() if name not in told.tracker_kwargs}


def _name_metrics(given: Any) -> Any:
    if isinstance(given, list | tuple):
        return [_name_metrics(item) for item in given]
    if isinstance(given, dict):
        return {name: _name_metrics(item) for name, item in given.items()}
    kind: Any = BUILTIN.get(given.name) if isinstance(given, Metric) else None
    is_told_by_name = kind is type(given) and list(inspect.signature(kind).parameters) == ["name"]
    return given.name if is_told_by_name else given


def _count_samples(run: Run) -> dict[str, Any]:
    loaders = {"training": run.train_loader}
    loaders |= {f"validation {name}".strip(): loader for name, loader in run.val_loaders.items()}
    counted = {name: length_of(loader.dataloader.dataset) for name, loader in loaders.items()}
    return {name: number for name, number in counted.items() if number is not None}


def _describe_loss(run: Run) -> dict[str, float]:
    loss = run.running_averages.epoch_loss
    return {} if loss is None else {run.settings.tracking.train_loss_metric_name: loss}


def _describe_training(run: Run) -> dict[str, Any]:
    state, settings = run.state, run.settings
    accumulation = settings.optimization.accumulation_at(state.epoch)
    return {
        "updates": state.global_step,
        "epochs finished": state.epoch,
        "training samples seen": state.samples_seen,
        "samples of an update": settings.hps.train_batch_size * accumulation * state.num_processes,
        "processes": state.num_processes,
        "mixed precision": str(run.accelerator.mixed_precision),
        "seed": run.seed,
        "accmt": __version__,
        "torch": torch.__version__,
    }
