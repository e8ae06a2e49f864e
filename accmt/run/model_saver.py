"""Saves the best models with information about their run, on the same hooks as a user's callbacks."""

from __future__ import annotations

import inspect
import math
import operator
import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from accmt import huggingface
from accmt.callbacks import Callback
from accmt.errors import AccmtError, SavingError, fail
from accmt.files import current_folder
from accmt.messages import say, warn
from accmt.metrics import Metric, ReportedValue
from accmt.options import Settings
from accmt.options.saving import LAST
from accmt.processes import run_on_main_process
from accmt.registry import addon, find
from accmt.run.run import Run
from accmt.saving import (
    RUN_KEY,
    ModelFolderClaim,
    Patience,
    Selection,
    holds_model_of,
    keep_previous,
    name_by_rules,
    remove_surplus,
    write_hps,
    write_status,
    write_trainer_config,
)
from accmt.saving.selection import METRIC_NAMES
from accmt.saving.weights import ShardedState


class _NotSavedError(Exception):
    """A model could not be written; the error has been logged and recorded."""


class ModelSaver(Callback):
    """Saves the model at the best evaluations, after all other callbacks have seen (or changed) the results.

    Args:
        selection: Decides which evaluations are best.
        patience: Counts the others for early stopping; None for none.

    Attributes:
        run_id: Identifies the run, across all its interruptions, in its model folders.
    """

    order = sys.float_info.max  # after all other callbacks, but before averaged weights are swapped back

    def __init__(self, selection: Selection, patience: Patience | None = None) -> None:
        self.selection = selection
        self.patience = patience
        self.run_id = secrets.token_hex(8)
        self._claim: ModelFolderClaim | None = None

    def claim(self, run: Run) -> None:
        """Lock the model folder against other runs until `release` or the end of this process.

        Processes: collective; the main process holds the lock.
        """
        if self.selection.names or run.settings.saving.saves_last:
            run_on_main_process(lambda: self._take(run.settings.model_folder.absolute()))

    def _take(self, folder: Path) -> None:
        self._claim = ModelFolderClaim.take(folder)

    def release(self) -> None:
        """Release the lock of `claim`, if there is one. Not collective."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def on_evaluation_end(self, metrics: Mapping[str, float]) -> None:
        """Save the model for every rule whose best evaluation this is."""
        is_before_training = self.state.last_evaluation_step is None
        # The model before training would be the best one of a run that gets worse.
        if is_before_training:
            return
        # Update `state.best_metrics` for each result with a known direction.
        best = self.state.best_metrics
        directions = {**self.selection.directions, self.trainer.run.loss_name: operator.lt}
        for name, value in metrics.items():
            is_better = directions.get(name.split("__")[0])
            # NaN is neither better nor worse than a number: it would stay the best forever.
            if is_better is not None and math.isfinite(value) and (name not in best or is_better(value, best[name])):
                best[name] = value
        values = self._values(metrics, self.trainer.run.running_averages.take_since_evaluation())
        before = self.selection.state_dict()
        rules = self.selection.consider(values, step=self.state.global_step)
        try:
            self._save(rules)
        except BaseException as error:
            unsaved = self.selection.unsaved
            self.selection.load_state_dict(before)  # no folder contains the model of the new best value
            self.selection.unsaved = unsaved  # the end of the run reports it
            if not isinstance(error, _NotSavedError):
                raise
        if self.patience is not None:
            self.patience.consider(values)
        self.update_patience_left()

    def update_patience_left(self) -> None:
        """Update `state.patience_left`: evaluations without a better value that are still allowed."""
        self.state.patience_left = None if self.patience is None else self.patience.remaining

    def _save(self, rules: list[str]) -> None:
        run = self.trainer.run
        folders = {rule: self.selection.folder(run.settings.model_folder, rule) for rule in rules}
        self._try_saving(run, folders)
        for folder in folders.values():
            for hook in run.hooks.on_save_model:
                hook(folder=folder)

    def save_last(self, run: Run) -> None:
        """Save the weights at the end of the run: those used for evaluation, which may be an average.

        Processes: collective.
        """
        with suppress(_NotSavedError), ExitStack() as stack:
            for saving_last in run.features.saving_last:
                stack.enter_context(saving_last())
            self._try_saving(run, {LAST: run.settings.model_folder / "last"})

    def _try_saving(self, run: Run, folders: Mapping[str, Path]) -> None:
        """Save, and record a failure: training, checkpoints and logs continue, and the end of the run reports it."""
        unsaved = self.selection.unsaved
        try:
            with run.features.doing("saving"):
                save_model(run, *folders.values())
        except OSError as error:
            # The reason alone: our error about a file has its own location and advice, which would be repeated.
            reason: BaseException = error
            where = f" in {', '.join(map(str, folders.values()))}"
            if isinstance(error, AccmtError):
                reason = error.__cause__ or error
                where = ""
            for name in folders:
                unsaved.setdefault(name, {})[self.state.global_step] = str(reason)
            warn(
                f"could not save the model{where}: {error}\n"
                "Training continues; saving will be attempted again at the next best model."
            )
            raise _NotSavedError from error
        for name in folders:
            unsaved.pop(name, None)

    @property
    def lacks_best(self) -> bool:
        """Whether a best model could not be written, and another evaluation of its weights could save it."""
        return bool(self.selection.unsaved.keys() - {LAST}) and self.selection.needs_validation

    def require_saved(self, model_folder: Path) -> None:
        """Check at the end of a run that every best model, or a later one in its place, was saved."""
        if not self.selection.unsaved:
            return
        name, failures = next(iter(self.selection.unsaved.items()))
        folder = model_folder / "last"
        if name != LAST:
            folder = self.selection.folder(model_folder, name)
        *_, reason = failures.values()
        got = f"the model of step {', '.join(map(str, failures))} could not be written: {reason}"
        do = "free space there; if a checkpoint of such a step exists, `accmt get` extracts its weights"
        raise fail(SavingError, f"model folder {folder}", got=got, expected="every best model saved", do=do) from None

    def forget_missing(self, model_path: Path, run_id: str) -> None:
        """Forget the best values of a resumed run if their models are not in the folder.

        Processes: collective.
        """

        def find_missing() -> list[str]:
            missing = []
            for rule in self.selection.names:
                if not holds_model_of(self.selection.folder(model_path, rule), run_id):
                    missing.append(rule)
            return missing

        missing = run_on_main_process(find_missing)
        for best in self.selection.forget(lambda rule: rule not in missing):
            warn(f"{model_path} does not contain the best model by {best}: the next evaluation counts as the best")

    def warn_if_nothing_was_saved(self) -> None:
        """Warn at the end of a run that was to save a best model and never did."""
        reasons = self.selection.explain_unsaved()
        if reasons and self.state.evaluations_done == 0:
            warn("no model was saved: there was no evaluation; evaluate more often, or at the end (eval_when_finish)")
            return
        for reason in reasons:
            do = "check the thresholds"
            if "finite" in reason:
                do = "lower the learning rate, or pass clip_grad=1.0"
            warn(f"no model was saved: {reason}; {do}")

    def check(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Check, with the results of the preflight, that all required values are available."""
        values = self._values(metrics, train_loss=0.0)
        # The preflight calls no hooks, so what they report is missing here.
        if run.user_hooks("on_evaluation_end") or run.user_hooks("on_validation_end"):
            for metric in chain.from_iterable(run.metrics.values()):
                if isinstance(metric, ReportedValue):  # rules may use these
                    values.setdefault(f"best_{metric.main_metric}", math.nan)
        self.selection.require(values)
        if self.patience is not None:
            self.patience.require(values)

    def _values(self, metrics: Mapping[str, float], train_loss: float | None) -> dict[str, float]:
        loss_name = self.trainer.settings.tracking.val_loss_metric_name
        return name_by_rules(metrics, loss_name=loss_name, train_loss=train_loss)


def save_model(run: Run, *folders: Path) -> None:
    """Save the weights, a transformers model's other files, and `status.json`; keep the model of another run.

    Processes: collective: weights are gathered from all processes, and written by the main process.
    """
    if not folders:
        return
    with run.stepper.evaluating():
        run.engine.share_buffers()
        weights = run.engine.weights()
        for folder in folders:
            weights.run_on_main(partial(_write_model, run, folder, weights))


def _write_model(run: Run, folder: Path, state_dict: dict[str, Any] | ShardedState) -> None:
    saving, state = run.settings.saving, run.state
    _keep_previous(run, folder)
    saved = huggingface.save_model(
        run.unwrapped_model,
        state_dict,
        folder,
        processor=run.module.processor,
        max_shard_size=saving.max_shard_size,
        safe_serialization=saving.safe_serialization,
    )
    status = {
        RUN_KEY: run.saver.run_id,
        "run_folder": os.path.relpath(current_folder() / run.tracking.run_folder, folder.absolute()),
        "attempt": run.tracking.attempt,
        "digest": saved.digest,
        "files": list(saved.files),
        "model_saving": saving.model_saving,
        "best": dict(state.best),
        "metrics": state.metrics,
    }
    write_status(folder, status | state.state_dict())
    replaced = run.replaced_hps()
    left_out: dict[str, Any] = dict.fromkeys(run.set_by_module)  # the module decides them again
    hps = {**run.settings.hps.to_dict()["hps"], **left_out}
    if replaced.get("batch_size"):
        hps["batch_size"] = replaced["batch_size"]
    write_hps(folder, {"hps": hps})
    write_trainer_config(folder, describe_trainer(run.settings))
    addon("write_card")(run, folder)


def _keep_previous(run: Run, folder: Path) -> None:
    keep = run.settings.checkpoints.checkpoint_options.max_previous_runs
    if holds_model_of(folder, run.saver.run_id):
        return
    try:
        previous = None
        if keep != 0:
            previous = keep_previous(folder, run.saver.run_id)
        removed = remove_surplus(folder, keep)
    except OSError as error:
        warn(f"the model of an earlier run in {folder} could not be kept and is replaced: {error}")
        return
    if previous is not None:
        say(f"the model of an earlier run in {folder} was moved to {previous}")
    for place in removed:
        say(f"deleted the model of an earlier run in {place} (max_previous_runs={keep})")


def describe_trainer(settings: Settings) -> dict[str, Any]:
    """Return the arguments of the Trainer, with metrics and trackers by name if the name recreates an equal one.

    Custom trackers are omitted.
    """
    arguments = settings.to_arguments()
    if "metrics" in arguments:
        arguments["metrics"] = _name_metrics(arguments["metrics"])
    trackers: dict[str, Any] | None = addon("describe_trackers")(arguments.pop("log_with", None))
    if trackers is not None:
        return arguments | trackers
    return {name: value for name, value in arguments.items() if name not in settings.tracking.tracker_kwargs}


def _name_metrics(metrics: Any) -> Any:
    match metrics:
        case list() | tuple():
            return list(map(_name_metrics, metrics))
        case dict():
            return {name: _name_metrics(item) for name, item in metrics.items()}
        case Metric() if metrics.name in METRIC_NAMES:
            kind: Any = find("accmt.metrics", metrics.name)
            # A class with other arguments, which its name alone would not pass again.
            if kind is type(metrics) and list(inspect.signature(kind).parameters) == ["name"]:
                return metrics.name
    return metrics
