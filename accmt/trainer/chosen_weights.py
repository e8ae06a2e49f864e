"""The saved weights that an evaluation asks for, in place of the module's own while it lasts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from accmt.checkpoint.engine import load_state
from accmt.checkpoint.store import CheckpointStore
from accmt.errors import NoCheckpointError, explain
from accmt.messages import say
from accmt.module import AcceleratorModule
from accmt.options import Settings
from accmt.processes import run_on_main_process
from accmt.recovery.resume import find_checkpoint
from accmt.saving.layout import find_entry
from accmt.setup.user_data import Evaluation
from accmt.sharded_tensors import is_dtensor

CheckpointPath = str | PathLike[str]

_SHOWN = 4


@contextmanager
def using_weights(
    module: AcceleratorModule, settings: Settings, ckpt_path: CheckpointPath | None, function: Evaluation
) -> Iterator[None]:
    """Load saved weights into the module's model, and put its own back afterwards.

    Processes: collective.

    Args:
        module: The module.
        settings: The Trainer's: where models and checkpoints are.
        ckpt_path: "best" for the model folder, "last" for the newest checkpoint (or `<model_path>/last`), or the path
            of a model folder or checkpoint; None leaves the weights as they are.
        function: The Trainer's method that asks, for messages.

    Raises:
        NoCheckpointError: There are no weights.
        WeightsError: The weights of a model folder are incomplete, or another model's.
        CheckpointError: The checkpoint is damaged, or another model's.
    """
    if ckpt_path is None:
        yield
        return
    model = module.unwrapped_model
    folder = _find(settings, ckpt_path, function)
    own = {name: _copy(value) for name, value in model.state_dict().items()}
    try:
        _load(module, model, folder)
        say(f"{function}: the weights are those of {folder}")
        yield
    finally:
        model.load_state_dict(own)


def _copy(value: Any) -> Any:
    is_tensor = isinstance(value, torch.Tensor)
    if is_dtensor(value):  # a part of the weight, which stays where it is
        return value.detach().clone()
    return value.detach().to("cpu", copy=True) if is_tensor else copy.deepcopy(value)


def _load(module: AcceleratorModule, model: nn.Module, folder: Path) -> None:
    if _has_weights(folder):
        module.load_weights(folder)
    else:
        load_state(model, None, folder)


def _find(settings: Settings, ckpt_path: CheckpointPath, function: Evaluation) -> Path:
    """Return a model folder, or a checkpoint."""
    where = f"{function}(ckpt_path={str(ckpt_path)!r})"
    if ckpt_path == "last":
        return _find_last(settings, where)
    folder = settings.model_folder if ckpt_path == "best" else Path(ckpt_path)
    if run_on_main_process(partial(_has_weights, folder)):
        return folder
    if ckpt_path != "best":
        return _find_checkpoint(folder, where)
    return _reject_path(where, folder)


def _has_weights(folder: Path) -> bool:
    return find_entry(folder) is not None


def _find_checkpoint(path: Path, where: str) -> Path:
    try:
        return find_checkpoint(path).folder
    except NoCheckpointError:
        return _reject_path(where, path)


def _find_last(settings: Settings, where: str) -> Path:
    checkpoints, saved_last = settings.checkpoints, settings.model_folder / "last"
    newest: Path | None = None
    if checkpoints.checkpointer is not None:
        newest = checkpoints.checkpointer.load()
    elif checkpoints.every is not None:
        checkpoint = CheckpointStore(settings.checkpoint_folder).newest()
        newest = None if checkpoint is None else checkpoint.folder
    if newest is not None:
        return newest
    return saved_last if run_on_main_process(partial(_has_weights, saved_last)) else _reject_path(where, saved_last)


def _reject_path(where: str, folder: Path) -> NoReturn:
    """Say that there are no weights, and where there are some.

    Raises:
        NoCheckpointError: Always.
    """
    near = sorted(str(entry.parent) for entry in map(find_entry, _subfolders(folder)) if entry is not None)
    do = f"ckpt_path={' or '.join(map(repr, near[:_SHOWN]))}" if near else "look at the path, and at model_saving"
    raise NoCheckpointError(explain(where, f"no weights in {folder}", "a model folder, or a checkpoint", do))


def _subfolders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
