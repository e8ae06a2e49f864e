"""The Trainer: takes settings, checks them, builds a run and lets the loop do the work."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accmt.callbacks import build_callbacks
from accmt.config import HyperParameters
from accmt.errors import AccmtError, UnknownArgumentError, explain
from accmt.module import AcceleratorModule
from accmt.settings import Settings
from accmt.settings.trial_runs import apply_trials
from accmt.state import TrainingState
from accmt.trainer.arguments import TrainerArguments
from accmt.trainer.tuning import TrainerTuning

if TYPE_CHECKING:
    from accmt.recovery.restart import Recovery
    from accmt.setup.inputs import RegisteredSaving
    from accmt.setup.user_data import UserData

ALIASES = {
    "model_saving_aboce": "model_saving_above",
    "callback": "callbacks",
    "hooks": "callbacks",
    "precision": "mixed_precision",
}
"""Other spellings of arguments, from the original's documentation and from other trainers."""

MISSPELT = ("model_saving_aboce",)


class Trainer(TrainerTuning, TrainerArguments):
    """Trains an `AcceleratorModule`.

    The constructor only takes and checks settings: no process group, no file, no network before `fit`. Every argument
    is documented in the class of `accmt.settings` that holds it, and in docs/arguments.md.

    Args:
        hps_config: The hyper-parameters: a YAML or JSON file, a dict, or a `HyperParameters` object.
        model_path: Folder in which the model is saved.
        **kwargs: For the trackers' start; `mlflow={...}` goes to that one only.

    Raises:
        HyperParameterError: Faults in the hyper-parameters, all at once.
        ArgumentError: An argument with a value that cannot be.
        UnknownArgumentError: Arguments that do not exist; the message names what there is instead.
        SeveralFaultsError: Faults in the hyper-parameters and in arguments, all at once.
    """

    def __init__(
        self,
        hps_config: str | PathLike[str] | Mapping[str, Any] | HyperParameters,
        model_path: str | PathLike[str],
        track_name: str | None = None,
        checkpoint: str | PathLike[str] | None = None,
        resume: Any = False,
        model_saving: Any = "best_valid_loss",
        evaluate_every_n_steps: float | None = None,
        checkpoint_every: str | None = "epoch",
        logging_dir: str | PathLike[str] = "logs",
        log_with: Any = None,
        log_every: int = 1,
        grad_accumulation_steps: int | Mapping[int, int] | None = None,
        clip_grad: float | None = None,
        set_to_none: bool = True,
        shuffle_train: bool = True,
        shuffle_validation: bool = False,
        sampler: Any = None,
        model_saving_below: float | Mapping[str, float] | None = None,
        model_saving_above: float | Mapping[str, float] | None = None,
        collate_fn: Any = None,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        compile: bool = False,  # noqa: A002 - the documented name
        train_loss_metric_name: str = "train_loss",
        val_loss_metric_name: str = "val_loss",
        dataloader_pin_memory: bool = True,
        dataloader_num_workers: int = 0,
        report_loss_after_eval: bool = True,
        handlers: Any = None,
        eval_when_finish: bool = True,
        eval_when_start: bool = False,
        verbose: bool = True,
        monitor: Any = None,
        *,
        sampler_val: Any = None,
        batch_sampler: Any = None,
        collate_fn_train: Any = None,
        collate_fn_val: Any = None,
        dataloader_persistent_workers: bool = False,
        dataloader_drop_last: bool = False,
        shard_dataloaders: bool = True,
        reload_dataloaders_every_n_epochs: int = 0,
        limit_train_batches: float = 1.0,
        limit_val_batches: float = 1.0,
        limit_test_batches: float = 1.0,
        limit_predict_batches: float = 1.0,
        overfit_batches: float = 0.0,
        fast_dev_run: bool | int = False,
        batch_device_placement: bool = True,
        on_bad_sample: str = "raise",
        min_epochs: int | None = None,
        min_steps: int | None = None,
        max_time: Any = None,
        evaluate_every_n_epochs: int = 1,
        num_sanity_val_steps: int = 2,
        clip_grad_type: str = "norm",
        patience: Any = None,
        seed: int | None = None,
        deterministic: Any = False,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        detect_anomaly: bool = False,
        gradient_checkpointing: Any = False,
        sync_batchnorm: bool = False,
        auto_micro_batch: bool = False,
        max_checkpoints: int | None = None,
        max_previous_runs: int | None = 3,
        checkpointer: Any = None,
        async_checkpointing: bool = True,
        enable_checkpointing: bool = True,
        reset_optimizer_on_resume: bool = False,
        save_last: bool = False,
        metrics: Any = None,
        consolidate_metrics: Mapping[str, Any] | None = None,
        additional_metric_consolidation: Callable[[dict[str, list[float]]], dict[str, float]] | None = None,
        report_all_metrics: bool = False,
        gather_chunk_size: int | str | None = "32MB",
        callbacks: Any = None,
        run_name: str | None = None,
        additional_tracker_config: Mapping[str, Any] | None = None,
        tracker_offline: Any = "auto",
        tracker_flush_s: float = 30,
        profiler: Any = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | int = False,
        accelerator: Any = None,
        mixed_precision: str | None = None,
        ddp_kwargs: Mapping[str, Any] | None = None,
        compile_kwargs: Mapping[str, Any] | None = None,
        on_nonfinite: str | None = "stop",
        spike_guard: float | None = None,
        hang_timeout_s: float | None = None,
        preempt_exit_code: int = 143,
        preflight: bool = True,
        **kwargs: Any,
    ) -> None:
        # What only checks and runs need is imported by the functions that use it: `import accmt` is to be quick.
        given = dict(locals())  # the one place that names every argument is the signature above
        tracker_kwargs = given.pop("kwargs")
        arguments = {name: value for name, value in given.items() if name not in ("self", "__class__")}
        arguments = _resolve_aliases(arguments, tracker_kwargs)
        from accmt.setup.inputs import check_metrics
        from accmt.tracking import find_specs

        try:
            self.settings = apply_trials(Settings.from_arguments(arguments | {"tracker_kwargs": tracker_kwargs}))
            build_callbacks(self.settings.running.callbacks)
            check_metrics(self.settings)
            find_specs(self.settings.tracking.log_with)
        except AccmtError as error:  # it says where; the frames of the checks, on each process, would bury that
            raise error.with_traceback(None) from error.__cause__
        self.registered_savings: list[RegisteredSaving] = []
        self.state = TrainingState()

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: settings and counters. What a run works with stays with this object."""
        return {name: value for name, value in vars(self).items() if name not in ("_run", "_given")}

    def fit(
        self,
        module: AcceleratorModule | str | tuple[Any, ...],
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        datamodule: Any = None,
        **kwargs: Any,
    ) -> TrainingState:
        """Train a module. May be called again, for another run.

        Processes: collective.

        Args:
            module: An `AcceleratorModule`; or a transformers model: its path, or `(path, type)` as in `from_hf`.
            train_dataset: A dataset, an iterable dataset, a `datasets` dataset or a DataLoader; None where the module
                has `get_train_dataloader`.
            val_dataset: The same for validation; None trains without.
            datamodule: Makes both instead: an object as Lightning's `LightningDataModule`, or of another class with
                `train_dataloader()`. `prepare_data()`, `setup(stage)` and `teardown(stage)` are called if there.
            **kwargs: For `from_pretrained`, where `module` is a path.

        Returns:
            The counters of the finished run.

        Raises:
            ModuleContractError: The module, a callback or a step does not keep the contract.
            DataError: There are no training data, or they are empty.
            SavingError: `model_path` or `logging_dir` cannot be written.
            NoCheckpointError: There is no checkpoint to continue from, where `resume` asks for one.
            CheckpointError: The checkpoint is damaged, or that of another model or optimizer.
            ArgumentError: Settings that contradict each other, or keywords that nobody reads.
            KeyboardInterrupt: After Ctrl-C; `Preempted` after SIGTERM or SIGUSR1.
        """
        from accmt.recovery.restart import Recovery
        from accmt.setup.torch_flags import running, working
        from accmt.setup.user_data import UserData

        module, recovery = _as_module(module, kwargs), Recovery()
        given = UserData("fit", {"train": train_dataset, "validate": val_dataset}, datamodule)
        try:
            with running(self, module), working(self.settings.running), given.ending("fit"):
                self._given = given
                self._fit_once(module, given, recovery)
                while recovery.checkpoint is not None:
                    self._fit_once(module, given, recovery)
        except KeyboardInterrupt as error:
            if self._run is not None and self._run.interruption.is_left_in_order:
                # Between two updates the frames say nothing, and would push away what was said about going on.
                raise error.with_traceback(None) from None
            raise
        return self.state

    def _fit_once(self, module: Any, given: UserData, recovery: Recovery) -> None:
        from accmt.loop.fit import fit
        from accmt.setup.build import build_run
        from accmt.setup.setup_errors import reporting_failed_setup

        self.state = TrainingState()
        self._run = None  # what an earlier run holds is free before the next is built
        with reporting_failed_setup():
            self._run = build_run(self, module, given, recovery)
        self.chosen_checkpoint = None
        fit(self._run)

    def train(self, *args: Any, **kwargs: Any) -> TrainingState:
        """Do what `fit` does; the name that other trainers have for it."""
        return self.fit(*args, **kwargs)

    def save_model(self, path: str | PathLike[str] | None = None) -> None:
        """Save the current weights, as the best ones are saved.

        Processes: collective.

        Args:
            path: A folder; None is `model_path`.

        Raises:
            RuntimeError: There was no run yet.
            OSError: The folder cannot be written.
        """
        from accmt.recovery.model_saver import save_model

        self.run.note_call("trainer.save_model")
        save_model(self.run, self.settings.model_folder if path is None else Path(path))

    def register_model_saving(
        self, name: str, saving_below: float | None = None, saving_above: float | None = None
    ) -> None:
        """Save the model by one more rule, with thresholds of its own, from the next `fit` on.

        Args:
            name: A rule as in `model_saving`: "best_accuracy@en", or "best_accuracy/f1" where both must be better.
            saving_below: Saves only while the values that decide are below this; a dict is by name.
            saving_above: Saves only while the values that decide are above this; a dict is by name.

        Raises:
            ArgumentError: No such rule, one that is there already, or bounds that nothing can be between.
        """
        from accmt.setup.inputs import RegisteredSaving, check_metrics

        registered = [*self.registered_savings, RegisteredSaving(name, saving_below, saving_above)]
        check_metrics(self.settings, registered)
        self.registered_savings = registered

    def do_backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a scaled loss to those of the window; a subclass may replace it."""
        self.run.stepper.backward(loss)

    def do_opt_step(self) -> bool:
        """Make the update of a window; a subclass may replace it.

        Returns:
            Whether the optimizer really stepped; if not, neither schedule nor counters advance.
        """
        return self.run.stepper.step()

    def do_zero_grad(self) -> None:
        """Begin the next window without gradients; a subclass may replace it."""
        self.run.stepper.zero_grad()


def _resolve_aliases(arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Move arguments under other spellings from `extra` to their own names."""
    resolved = dict(arguments)
    for alias in [name for name in extra if name in ALIASES]:
        name = ALIASES[alias]
        if resolved[name] != Settings.defaults()[name]:
            raise UnknownArgumentError(
                explain(f"Trainer({alias}=..., {name}=...)", "both", "one of them", f"drop {alias}")
            )
        resolved[name] = extra.pop(alias)
        if alias in MISSPELT:
            warnings.warn(f"{alias} is a misspelling; write {name}", DeprecationWarning, stacklevel=3)
    return resolved


def _as_module(module: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(module, str | PathLike):
        return AcceleratorModule.from_hf(module, **kwargs)
    if isinstance(module, tuple):
        return AcceleratorModule.from_hf(*module, **kwargs)
    if kwargs:
        got, expected = (
            f"the keywords {sorted(kwargs)}",
            "keywords only where `module` is the path of a transformers model",
        )
        raise UnknownArgumentError(explain("fit", got, expected, "give them to the Trainer, or to your module"))
    return module
