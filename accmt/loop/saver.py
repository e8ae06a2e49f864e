"""Saves the best model, on the same hooks as a user's callbacks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accmt import huggingface
from accmt.callbacks import Callback
from accmt.loop.reduction import broadcast_buffers
from accmt.loop.run import Run
from accmt.messages import warn
from accmt.processes import run_on_main_process
from accmt.saving import TRAIN_LOSS, VALID_LOSS, Selection, save_weights, write_status


class ModelSaver(Callback):
    """Saves the model when an evaluation is the best, after all other callbacks have seen (or changed) its results.

    Args:
        selection: Decides.
    """

    order = math.inf

    def __init__(self, selection: Selection) -> None:
        self.selection = selection

    def on_evaluation_end(self, metrics: Mapping[str, float]) -> None:
        """Save the model if this evaluation is the best so far."""
        is_before_training = self.state.last_evaluation_step is None
        if is_before_training or self.selection.rule is None:
            return
        train_loss = self.trainer.run.window.take_since_evaluation()
        if not self.selection.consider(self._values(metrics, train_loss)):
            return
        folder = self.trainer.run.settings.saving.folder
        save_model(self.trainer.run, folder)
        for hook in self.trainer.run.hooks.on_save_model:
            hook(folder=folder)

    def warn_if_nothing_was_saved(self) -> None:
        """Warn at the end of a run that was to save a model by its best value, and never had a finite one."""
        if self.selection.needs is not None and not self.selection.best:
            do = "lower the learning rate, or pass clip_grad=1.0"
            warn(f"no model was saved: {self.selection.needs} was never finite; {do}")

    def check(self, metrics: Mapping[str, float]) -> None:
        """Check, with the results of a trial, that what decides will be there.

        Raises:
            ModuleContractError: It is not among the results.
        """
        self.selection.require(self._values(metrics, train_loss=0.0))

    def _values(self, metrics: Mapping[str, float], train_loss: float | None) -> dict[str, float]:
        loss_name = self.trainer.run.settings.tracking.val_loss_metric_name
        values = {VALID_LOSS if name == loss_name else f"best_{name}": value for name, value in metrics.items()}
        return values | {TRAIN_LOSS: math.nan if train_loss is None else train_loss}


def save_model(run: Run, folder: Path) -> None:
    """Save the weights, what a transformers model needs beside them, and `status.json`.

    Processes: collective: weights are gathered from all, and written by the main process.

    Raises:
        OSError: The folder cannot be written; an older model in it still loads.
    """
    broadcast_buffers(run.unwrapped_model)
    state_dict = run.accelerator.get_state_dict(run.model)
    run_on_main_process(lambda: _write_model(run, folder, state_dict))


def _write_model(run: Run, folder: Path, state_dict: dict[str, Any]) -> None:
    model, saving, state = run.unwrapped_model, run.settings.saving, run.state
    if huggingface.is_transformers_model(model):
        folder.mkdir(parents=True, exist_ok=True)
        huggingface.save_model_files(model, folder, run.module.processor)
        state_dict = huggingface.to_saved_format(model, state_dict)
    saved = save_weights(
        state_dict, folder, max_shard_size=saving.max_shard_size, safe_serialization=saving.safe_serialization
    )
    write_status(
        folder,
        {
            "digest": saved.digest,
            "model_saving": saving.model_saving,
            "best": dict(state.best),
            "metrics": state.metrics,
        }
        | state.state_dict(),
    )
