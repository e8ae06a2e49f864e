"""Keeps several of the best models of a run."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from accmt.callbacks.callback import Callback
from accmt.errors import ArgumentError, ModuleContractError, fail
from accmt.messages import say, warn
from accmt.processes import run_on_main_process


class KeptModel(NamedTuple):
    """A saved model.

    Attributes:
        value: The value of the monitored metric.
        step: The optimizer step at which it was saved.
    """

    value: float
    step: int


class BestModels(Callback):
    """Keeps the models of the best evaluations, each in a folder like `<model_path>/top/step-00000120`.

    This is in addition to the model that `model_saving` keeps. Of equal values, the first is kept. If a folder cannot
    be written, accmt warns and training continues.

    Args:
        monitor: The evaluation result to compare: "val_loss", "accuracy", "accuracy__en".
        top_k: The number of models to keep.
        mode: Whether lower ("min") or higher ("max") is better. None works for losses and results of metrics.
        folder: The folder for the models; default `<model_path>/top`.

    Raises:
        ArgumentError: `top_k` is less than 1, or accmt cannot tell whether lower or higher is better.
        ModuleContractError: An evaluation has no such result.

    Attributes:
        kept: The kept models, best first.

    Processes: all.
    """

    order = sys.float_info.max  # with the averaged weights in place, as the best model is saved

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        top_k: int = 3,
        mode: Literal["min", "max"] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise fail(
                ArgumentError, "BestModels(top_k=...)", got=repr(top_k), expected="an integer >= 1", do="top_k=3"
            )
        if mode not in (None, "min", "max"):
            raise fail(
                ArgumentError, "BestModels(mode=...)", got=repr(mode), expected='"min", "max" or None', do='mode="max"'
            )
        self.monitor = monitor
        self.top_k = top_k
        self.mode = mode
        self.kept: list[KeptModel] = []
        self._folder = folder

    def folder_of(self, model: KeptModel) -> Path:
        """Return the folder of a model."""
        top = self.trainer.settings.model_folder / "top" if self._folder is None else Path(self._folder)
        return top / f"step-{model.step:08}"

    def on_fit_start(self) -> None:
        """Log that the folder has models of an earlier run, which this run does not delete."""
        top = self.folder_of(KeptModel(0.0, 0)).parent
        if not self.trainer.run.is_resumed and top.is_dir() and any(top.iterdir()):
            say(f"{top} contains models of an earlier run: they are kept alongside the best models of this run")

    def on_evaluation_end(self, metrics: Mapping[str, float]) -> None:
        """Save the model if it is among the best, and delete the worst one."""
        # Before training, or in `trainer.test` and `trainer.validate`, whose results are not those of the run.
        if self.state.last_evaluation_step is None or self.state.fn != "fit":
            return
        if self.monitor not in metrics:
            got, expected = f"an evaluation with the results {sorted(metrics)}", f"a result named {self.monitor!r}"
            raise fail(
                ModuleContractError,
                "BestModels(monitor=...)",
                got=got,
                expected=expected,
                do="monitor one of these results",
            )
        model = KeptModel(metrics[self.monitor], self.state.global_step)
        sign = -1 if self._is_rising() else 1
        # The sort is stable: of equal values, the first is kept.
        ranked = sorted([*self.kept, model], key=lambda kept: sign * kept.value)
        if not math.isfinite(model.value) or model not in ranked[: self.top_k]:
            return
        try:
            self.trainer.save_model(self.folder_of(model))
        except OSError as error:
            warn(f"one of the best models could not be saved to {self.folder_of(model)}: {error}")
            return
        self.kept = ranked[: self.top_k]
        for worse in ranked[self.top_k :]:
            run_on_main_process(partial(shutil.rmtree, self.folder_of(worse), ignore_errors=True))

    def _is_rising(self) -> bool:
        if self.mode is not None:
            return self.mode == "max"
        base, run = self.monitor.split("__")[0], self.trainer.run
        if base == run.loss_name:
            return False
        is_better = run.saver.selection.directions.get(base)
        if is_better is None:
            got, do = f"None for {self.monitor!r}, which is not a result of a metric", 'mode="max" or mode="min"'
            raise fail(
                ArgumentError, "BestModels(mode=...)", got=got, expected="whether higher or lower is better", do=do
            )
        return bool(is_better(1.0, 0.0))

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [list(model) for model in self.kept]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = [KeptModel(*values) for values in state["kept"]]
