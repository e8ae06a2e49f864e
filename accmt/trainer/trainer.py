"""The Trainer: checks settings, builds a run and starts the loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch

from accmt.callbacks import build_callbacks
from accmt.errors import CheckpointError, fail
from accmt.module import AcceleratorModule
from accmt.options import HyperParameters, Settings
from accmt.options.saving import RegisteredSaving
from accmt.options.settings import apply_trials
from accmt.registry import ARGUMENTS_VARIABLE, FIT_VARIABLE, addon
from accmt.state import TrainingState
from accmt.trainer.calls import ShortTraceback, reports_at_call, resolve_aliases
from accmt.trainer.properties import TrainerProperties

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from datetime import timedelta
    from types import TracebackType

    from accelerate import Accelerator
    from accelerate.utils import ProfileKwargs
    from torch.profiler import profile

    from accmt.addons.flight_recorder.replay import Replay
    from accmt.addons.prove import Proof
    from accmt.addons.tuning import Search, Tuning
    from accmt.callbacks import Callback
    from accmt.checkpoint.manifest import Checkpoint
    from accmt.loaders import UserData
    from accmt.module import Data
    from accmt.options import (
        Checkpointer,
        CheckpointOptions,
        Clipping,
        DataOptions,
        Failures,
        Handler,
        Ledger,
        Limits,
        MetricOptions,
        Monitor,
        TrackerOptions,
    )
    from accmt.options.running import ParallelismOptions, TorchFlags
    from accmt.options.saving import PatienceOptions
    from accmt.run.restart import Recovery
    from accmt.trainer.argument_types import Bound, Collate, Metrics, Samplers, Trackers


class Trainer(TrainerProperties):
    """Trains an `AcceleratorModule`.

    The constructor only checks settings: no process group, files or network before `fit`. Arguments are documented in
    `accmt.options`; `python docs/generate_arguments.py` generates the list below.

    Args:
        hps_config: The hyper-parameters: a YAML or JSON file, a dict, or a `HyperParameters` object.
        model_path: Folder of the saved model, created on the first save. With a URL, such as "s3://bucket/models/news",
            the folder is `out/news`, and saved models are also uploaded there.
        track_name: Name of the project or experiment. None uses the base name of `model_path`.
        checkpoint: Checkpoint folder. None means `checkpoint-<name of the model folder>`, next to the model folder.
            With a URL, such as "s3://bucket/run", checkpoints are uploaded from that default folder.
        resume: False starts from scratch, and moves the checkpoints of an earlier run to `<folder>.previous`; True
            resumes from the newest checkpoint; "auto" or None resumes if there is one; a path or URL resumes from that
            checkpoint or the newest one in that folder.
        model_saving: Which model to save: "best_valid_loss", "best_train_loss", "best_<metric>", "always" (at each
            evaluation), "last" (at the end, in `<model_path>/last`), None, or a list of these. Without validation data,
            "best_valid_loss" means "best_train_loss". With several validation sets, "best_<metric>" uses the mean over
            the sets, and "best_<metric>@<set>" one set. "best_accuracy/f1" requires both metrics to improve.
        evaluate_every_n_steps: Steps or interval between evaluations, such as "500 steps" or "0.25 epochs", counted
            across epochs. None: at the end of each epoch. "never": not at all, for example because `accmt evaluate`
            does it in another process.
        checkpoint_every: How often to save: steps or an interval, such as "500 steps", "2 epochs" or "3 evals"; a time,
            such as "10 minutes"; or "auto", which measures the cost of a checkpoint and of a failure, and chooses the
            interval with the lowest total cost. With None, no checkpoints are written. A checkpoint is also written at
            the end of the run.
        logging_dir: Log folder, or the URL of the tracker's server.
        log_with: A tracker or a list of trackers: `TensorBoard`, `MLFlow`, `WandB` ..., their names, or any Accelerate
            `GeneralTracker`.
        log_every: Steps or interval between rows of training values, such as "10 steps"; -1 or "epoch" logs one row at
            the end of each epoch.
        grad_accumulation_steps: Batches per process and optimizer step: a number; `{epoch: number}` with the epoch
            (from 0) at which each number starts to apply; or the name of another package's window maker (entry-point
            group `accmt.window_makers`). None means 1.
        clip_grad: Maximum gradient norm of an optimizer step. `Clipping(value=0.5)` clamps each entry instead. None or
            0 disables clipping. For sparse gradients, only the stored values count.
        set_to_none: Whether to free gradients after a step instead of setting them to zero.
        shuffle_train: Whether to shuffle the training data every epoch, based on (seed, epoch). Ignored with a sampler.
        shuffle_validation: Whether to shuffle validation data. This does not affect results.
        sampler: The order of training samples: a torch `Sampler`, a function `(dataset) -> Sampler`, or a list of
            indices; `{"train": ..., "val": ...}` also sets the order of validation data.
        model_saving_below: Save only if the monitored value is below this limit. A dict sets limits by name.
        model_saving_above: Save only if the monitored value is above this limit. A dict sets limits by name.
        collate_fn: Function that turns a list of samples into a batch; in a list of functions, each is applied to the
            result of the previous one. `{"train": ..., "val": ...}` sets separate functions; "val" also applies to test
            and prediction data. A `collate_fn` method of the module takes precedence.
        max_shard_size: Maximum size of a weight file: bytes, or a string such as "5GB".
        safe_serialization: True writes safetensors, including tied weights; False writes `pytorch_model*.bin`.
        compile: Whether to compile the model with `torch.compile`; a dict sets its arguments. `{"buckets": 64}` pads
            batches to multiples of 64, which limits the number of graphs. `{"regional": True}` compiles only the
            repeated layers, in a fraction of the time.
        train_loss_metric_name: Name of the training loss in the logs.
        val_loss_metric_name: Name of the validation loss in the logs.
        dataloader_pin_memory: Whether to put batches into pinned memory, with an accelerator device.
        dataloader_num_workers: Data-loading processes per training process. 0 loads data in the training process.
        report_loss_after_eval: True logs the mean validation loss once per evaluation, False the loss of every
            `log_every`-th validation batch.
        handlers: Errors after which accmt saves a checkpoint of the last optimizer step: a `Handler`, its name, or a
            list.
        eval_when_finish: Whether to evaluate at the end of training if the last step has not been evaluated yet and
            evaluations do not follow epochs.
        eval_when_start: Whether to evaluate before the first optimizer step, logged at step 0; saves no model.
        verbose: False silences messages and progress bars.
        monitor: What to log in addition to losses and metrics: a `Monitor`, a dict of its fields, a list of fields to
            enable, or the path of a file with one of these.
        data_options: How data are batched, loaded and sharded: `DataOptions(drop_last=True)`, or a dict.
        reload_dataloaders_every_n_epochs: Rebuilds the loaders of the module or the datamodule at the start of every
            n-th epoch; 0 builds them once.
        limit_batches: Batches per training epoch, and per validation, test and prediction set: a number, or a fraction
            as a float (1.0 is all, 1 is one); `Limits(val=0.1)` limits only validation.
        overfit_batches: Trains and validates on this many training batches (or this fraction of them), unshuffled; 0 is
            off.
        fast_dev_run: Tests a script: runs this many batches (True: 1) of each kind, with one evaluation, and writes
            nothing.
        min_length: Minimum length of training before it can end early: "2 epochs", "100 steps", or a list of both.
        max_time: Maximum training time over all starts, after which training ends at the next optimizer step:
            "DD:HH:MM:SS" or "1h30m", a timedelta, or a dict of its arguments. `min_length` takes precedence.
        num_sanity_val_steps: Validation batches to run before training, so that errors show early. 0 is off, -1 runs
            all batches.
        patience: Consecutive evaluations without improvement after which training ends, such as 3 or "3 evals". A dict,
            such as `{"accuracy": 3}`, counts separately for each value, and can contain `PatienceOptions`.
        seed: Random seed for everything. None draws a random seed.
        same_bits: Computes each batch in this many units, a power of two, so that weights, metrics and checkpoints have
            the same bits on any number of processes that divides it. `batch_size` then counts the samples of all
            processes together. None: the last bits depend on the number of processes.
        torch_flags: Torch settings during the run: `TorchFlags(deterministic=True)`, or a dict.
        inference_mode: Whether validation runs under `torch.inference_mode`; False: `torch.no_grad`.
        gradient_checkpointing: Whether a transformers model recomputes activations to save memory. A dict sets
            arguments of `torch.utils.checkpoint.checkpoint`.
        sync_batchnorm: Whether batch norm uses the statistics of all processes during training. GPUs only.
        checkpoint_options: How many checkpoints to keep, and how to write them: `CheckpointOptions(max_checkpoints=3)`,
            or a dict.
        checkpointer: Custom checkpoint storage: an object with the methods of `accmt.Checkpointer`, or the name of
            another package's class (entry-point group `accmt.checkpointers`).
        fork: The run folder and the step of another run, such as "logs/news/run-a@1200": this run continues from there
            with its own name, folders and settings. Started again, it resumes.
        metrics: Metrics over all samples of a validation set: names such as "f1", `Metric` or `torchmetrics` objects,
            or metrics from `evaluate`; one, a list, a dict by name, or a dict of lists by validation set.
            `{"perplexity": "min"}` sets the direction of a value that a step or a hook reports.
        metric_options: Which results to average, and how to gather predictions: `MetricOptions(averages=...)`, or a
            dict.
        callbacks: A `Callback` or a list of them.
        run_name: Name of this run; None generates one from the time and a few letters.
        tracker_options: Additional configuration, and what to do if a tracker's server is unreachable:
            `TrackerOptions(offline=False)`, or a dict.
        ledger: Whether to record the result of each step, for `accmt replay` and `accmt diff`; `Ledger(every="100
            steps")`, or a dict, sets the interval of checksums.
        profiler: Profiles `fit`: "simple" by phase, "advanced" by function, "pytorch" by operation for a few steps; or
            an `accelerate.utils.ProfileKwargs` or a `torch.profiler.profile`.
        enable_progress_bar: True shows a progress bar even if stderr is not a terminal; False never. None shows a bar
            in a terminal, and prints occasional lines otherwise.
        enable_model_summary: Whether to print a table of the model's modules at the start. A number sets the depth; -1
            shows all levels.
        accelerator: An `accelerate.Accelerator`, or a dict of its arguments; None builds one from the launch settings.
        mixed_precision: "no", "fp16" or "bf16", or the name of another package's precision (entry-point group
            `accmt.precisions`); None uses the launch setting.
        parallelism: Shards the model over processes, or sets DDP's arguments: `ParallelismOptions(fsdp=True)`, or a
            dict.
        failures: How to react to a loss that is not finite, an unreadable sample, a hanging process and the like:
            `Failures(on_nonfinite="skip")`, or a dict.
        **kwargs: Other keywords are passed to the trackers when they start; `mlflow={...}` to one tracker only.

    Raises:
        HyperParameterError: Invalid hyper-parameters; all errors are reported together.
        ArgumentError: An argument with an invalid value.
        MissingArgumentError: `hps_config` or `model_path` is missing.
        UnknownArgumentError: Unknown arguments; the message suggests what to use instead.
        CombinedError: Invalid hyper-parameters and arguments, reported together.
    """

    own_steps: ClassVar[tuple[Callable[..., Any], ...]]
    """The steps that a subclass may replace, as defined here."""

    @reports_at_call
    def __init__(
        self,
        hps_config: str | PathLike[str] | Mapping[str, Any] | HyperParameters,
        model_path: str | PathLike[str],
        track_name: str | None = None,
        checkpoint: str | PathLike[str] | None = None,
        resume: bool | str | PathLike[str] | None = False,
        model_saving: str | Sequence[str | None] | None = "best_valid_loss",
        evaluate_every_n_steps: float | str | None = None,
        checkpoint_every: float | str | None = "epoch",
        logging_dir: str | PathLike[str] = "logs",
        log_with: Trackers | None = None,
        log_every: int | str = 1,
        grad_accumulation_steps: int | Mapping[int, int] | str | None = None,
        clip_grad: float | Clipping | Mapping[str, float] | None = None,
        set_to_none: bool = True,
        shuffle_train: bool = True,
        shuffle_validation: bool = False,
        sampler: Samplers | Mapping[str, Samplers | None] | None = None,
        model_saving_below: Bound | None = None,
        model_saving_above: Bound | None = None,
        collate_fn: Collate | Mapping[str, Collate | None] | None = None,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        compile: bool | Mapping[str, Any] = False,  # noqa: A002 - the documented name
        train_loss_metric_name: str = "train_loss",
        val_loss_metric_name: str = "val_loss",
        dataloader_pin_memory: bool = True,
        dataloader_num_workers: int = 0,
        report_loss_after_eval: bool = True,
        handlers: Handler | str | Iterable[Handler | str] | None = None,
        eval_when_finish: bool = True,
        eval_when_start: bool = False,
        verbose: bool = True,
        monitor: Monitor | Mapping[str, bool | float | str] | Sequence[str] | str | PathLike[str] | None = None,
        *,
        data_options: DataOptions | Mapping[str, Any] | None = None,
        reload_dataloaders_every_n_epochs: int | str = 0,
        limit_batches: float | Limits | Mapping[str, float] = 1.0,
        overfit_batches: float = 0.0,
        fast_dev_run: bool | int = False,
        min_length: str | Sequence[str] | None = None,
        max_time: str | timedelta | Mapping[str, float] | None = None,
        num_sanity_val_steps: int = 2,
        patience: int | str | Mapping[str, int | str | PatienceOptions | Mapping[str, Any]] | None = None,
        seed: int | None = None,
        same_bits: int | None = None,
        torch_flags: TorchFlags | Mapping[str, Any] | None = None,
        inference_mode: bool = True,
        gradient_checkpointing: bool | Mapping[str, Any] = False,
        sync_batchnorm: bool = False,
        checkpoint_options: CheckpointOptions | Mapping[str, Any] | None = None,
        checkpointer: Checkpointer | str | None = None,
        fork: str | None = None,
        metrics: Metrics | None = None,
        metric_options: MetricOptions | Mapping[str, Any] | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        run_name: str | None = None,
        tracker_options: TrackerOptions | Mapping[str, Any] | None = None,
        ledger: bool | Ledger | Mapping[str, Any] = False,
        profiler: Literal["simple", "advanced", "pytorch"] | ProfileKwargs | profile | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | int = False,
        accelerator: Accelerator | Mapping[str, Any] | None = None,
        mixed_precision: Literal["no", "fp16", "bf16"] | None = None,
        parallelism: ParallelismOptions | Mapping[str, Any] | None = None,
        failures: Failures | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # Functions import what only checks and runs need, to keep `import accmt` fast.
        arguments = dict(locals())  # the signature above is the only list of all arguments
        tracker_kwargs = arguments.pop("kwargs")
        for name in ("self", "__class__"):
            arguments.pop(name, None)
        arguments = resolve_aliases(arguments, tracker_kwargs)
        # A command of accmt has started the program: a sweep or a fork changes the arguments.
        if ARGUMENTS_VARIABLE in os.environ:
            arguments = addon(os.environ[ARGUMENTS_VARIABLE])(arguments | {"tracker_kwargs": tracker_kwargs})
            tracker_kwargs = arguments.pop("tracker_kwargs")
        self.settings = apply_trials(Settings.from_arguments(arguments | {"tracker_kwargs": tracker_kwargs}))
        build_callbacks(self.settings.running.callbacks)
        addon("check_stage")("arguments", self.settings)
        if self.settings.tracking.log_with is not None:
            addon("find_trackers")(self.settings.tracking.log_with)
        self.registered_savings: list[RegisteredSaving] = []
        self.state = TrainingState()

    def __getstate__(self) -> dict[str, Any]:
        """Return settings and counters for pickling and copying, without the run."""
        # A run holds threads and file handles that cannot be pickled.
        return {name: value for name, value in vars(self).items() if name not in ("_run", "_user_data")}

    def fit(
        self,
        module: AcceleratorModule | str | PathLike[str] | tuple[Any, ...] | Mapping[str, Any] | HyperParameters,
        train_dataset: Data | None = None,
        val_dataset: Data | None = None,
        *,
        datamodule: object | None = None,
        **kwargs: Any,
    ) -> TrainingState:
        """Train a module. Call it again for another run.

        Processes: collective.

        Args:
            module: An `AcceleratorModule`; or a transformers model, its path, or `(path, type)` as in `from_hf`; or
                hyper-parameters with a `model` section: the path of the .yaml or .json file, a dict, or `trainer.hps`.
                Flags such as `--hps.model.lora.r=8` apply if the file is also the Trainer's.
            train_dataset: A dataset, an iterable dataset, a `datasets` dataset or a DataLoader; or a dict of datasets,
                which the section `data` of the hyper-parameters mixes. None if the module has `get_train_dataloader`.
            val_dataset: The same for validation; None trains without validation.
            datamodule: Provides both instead: a Lightning `LightningDataModule`, or any object with
                `train_dataloader()`. `prepare_data()`, `setup(stage)` and `teardown(stage)` are called if defined.
            **kwargs: Arguments for `from_pretrained`, if `module` is a path; `processor=` is saved with the model.

        Returns:
            The counters of the finished run.

        Raises:
            ModuleContractError: The module, a callback or a step violates the contract.
            DataError: Training data are missing or empty.
            SavingError: `model_path` or `logging_dir` is not writable.
            NoCheckpointError: `resume` requires a checkpoint, and there is none.
            CheckpointError: The checkpoint is damaged, or from another model or optimizer.
            ArgumentError: Settings contradict each other, or there are unused keywords.
            KeyboardInterrupt: After Ctrl-C; `Preempted` after SIGTERM or SIGUSR1.
        """
        # A command has started the program up to its `fit`, and does something else there: replay, evaluate, fork.
        if FIT_VARIABLE in os.environ:
            instead = addon(os.environ[FIT_VARIABLE])
            state: TrainingState = instead(self, module, train_dataset, val_dataset, datamodule=datamodule, **kwargs)
            return state
        from accmt.loaders import UserData
        from accmt.run.restart import Recovery, free_finished
        from accmt.setup.torch_flags import running, working

        trained, recovery = addon("as_module")(module, kwargs, self.hps), Recovery()
        user_data = UserData("fit", {"train": train_dataset, "validate": val_dataset}, datamodule)
        try:
            with ShortTraceback(), running(self, trained), working(self.settings.running), user_data.ending("fit"):
                self._user_data = user_data
                self._fit_once(trained, user_data, recovery)
                # A rollback or a smaller batch after running out of memory: another run continues.
                while recovery.checkpoint is not None:
                    free_finished(self.run.stepper.optimizer)
                    self._fit_once(trained, user_data, recovery)
        except KeyboardInterrupt as error:
            # At exit, torch 2.13 imports tabulate (`dump_compile_times` in torch/_dynamo/utils.py). A string that is
            # evaluated then, as for its named tuples, makes Python 3.11 end with 1 in place of 130.
            with suppress(ImportError):
                import tabulate  # type: ignore[import-untyped]  # noqa: F401
            if self._run is not None and self._run.interruption.is_left_in_order:
                # Between two steps the frames are useless, and would push the resume hint out of view.
                raise error.with_traceback(None) from None
            raise
        return self.state

    def _fit_once(self, module: AcceleratorModule, user_data: UserData, recovery: Recovery) -> None:
        from accmt.loop.fit import fit
        from accmt.setup.build import build_run
        from accmt.setup.model import detach_run

        self.state = TrainingState()
        self._run = None  # free the memory of an earlier run before building the next
        with addon("reporting_failed_setup")():
            self._run = build_run(self, module, user_data, recovery)
        self.chosen_checkpoint = None
        try:
            fit(self._run)
        finally:
            detach_run(self._run)

    def do_backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of a scaled loss; a subclass may replace it."""
        self.run.stepper.backward(loss)

    def do_opt_step(self) -> bool:
        """Step the optimizer after an accumulation window; a subclass may replace it.

        Returns:
            Whether the optimizer stepped; if not, neither scheduler nor counters advance.
        """
        return self.run.stepper.step()

    def do_zero_grad(self) -> None:
        """Clear the gradients before the next accumulation window; a subclass may replace it."""
        self.run.stepper.zero_grad()

    def reset_optimizer(self) -> None:
        """Clear the optimizer's state, such as momenta; learning rates stay the same.

        Processes: all, after the same optimizer step.

        Raises:
            RuntimeError: There has been no run yet.
        """
        self.run.stepper.optimizer.state.clear()

    def validate(
        self,
        module: AcceleratorModule | None = None,
        val_dataset: Data | None = None,
        ckpt_path: str | PathLike[str] | None = None,
        verbose: bool = True,  # noqa: FBT001, FBT002 - the documented signature is positional
        results_output: str | PathLike[str] | None = None,
        *,
        datamodule: object | None = None,
    ) -> dict[str, float]:
        """Evaluate on validation data, each sample once; after `fit`, bit-for-bit identical to its evaluation.

        Weights, counters and modes of module and Trainer do not change, and no model is saved. Evaluation hooks are
        called; a row is logged only while `fit` runs.

        Processes: collective.

        Args:
            module: The module; None uses the last `fit`'s.
            val_dataset: As for `fit`: one set, or several in a list or dict; None uses the data of the last `fit`, of
                its datamodule, or of the module's `get_validation_dataloader`.
            ckpt_path: The weights to use: None for the module's current weights; "best" for `model_path`; "last" for
                the newest checkpoint, or `<model_path>/last` if there is none; or the path of a model folder or
                checkpoint. The module's weights are restored afterwards.
            verbose: Whether to print the results, and draw a progress bar in a terminal.
            results_output: A JSON file for the results, written by the main process.
            datamodule: Provides the data instead, as for `fit`.

        Returns:
            Losses and metrics by name; with several sets `<name>__<set>`. The same on every process.

        Raises:
            ArgumentError: There is neither a module nor an earlier `fit`, or there are both data and a datamodule.
            ModuleContractError: The module has no validation step, or a step violates the contract.
            DataError: There are no data; `MetricError` if a metric cannot be computed.
            NoCheckpointError: There are no weights at `ckpt_path`.
            WeightsError: They are incomplete or for another model; `CheckpointError` for those of a checkpoint.
            SavingError: The folder of `results_output` is not writable.
        """
        arguments = self, "validate", module, val_dataset, datamodule, ckpt_path
        evaluate_alone: Callable[..., dict[str, float]] = addon("evaluate_alone")
        return evaluate_alone(*arguments, results_output=results_output, verbose=verbose)

    evaluate = validate

    def test(
        self,
        module: AcceleratorModule | None = None,
        test_dataset: Data | None = None,
        ckpt_path: str | PathLike[str] | None = None,
        verbose: bool = True,  # noqa: FBT001, FBT002 - the documented signature is positional
        results_output: str | PathLike[str] | None = None,
        *,
        datamodule: object | None = None,
    ) -> dict[str, float]:
        """Evaluate on test data with the module's `test_step`, or its validation step if it has none.

        Like `validate`, including arguments, results and errors; but batches have the third size in `batch_size`, and
        the loss is called `test_loss`. `test_dataset` may be None if the module has `get_test_dataloader`, or the last
        `fit` had a datamodule.

        Processes: collective.
        """
        arguments = self, "test", module, test_dataset, datamodule, ckpt_path
        evaluate_alone: Callable[..., dict[str, float]] = addon("evaluate_alone")
        return evaluate_alone(*arguments, results_output=results_output, verbose=verbose)

    def predict(
        self,
        module: AcceleratorModule | None = None,
        dataset: Data | None = None,
        ckpt_path: str | PathLike[str] | None = None,
        return_predictions: bool = True,  # noqa: FBT001, FBT002 - the documented signature is positional
        *,
        datamodule: object | None = None,
    ) -> Any:
        """Predict each sample of a dataset once with the module's `predict_step`.

        Batches have the third size in `batch_size`; no hooks are called.

        Processes: collective.

        Args:
            module: The module; None uses the last `fit`'s.
            dataset: The data to predict; several sets in a list or dict; None if the module has
                `get_predict_dataloader`.
            ckpt_path: As in `validate`.
            return_predictions: False keeps nothing, for a `predict_step` that stores its results itself.
            datamodule: As in `test`.

        Returns:
            On the main process, the predictions in the order of the data, on the CPU; None on the others, or if not
            kept. Batches are joined: tensors into one tensor `[samples, ...]` (or a list of samples if shapes differ),
            lists into one list, dicts and tuples entry by entry. For several sets, a dict by name.

        Raises:
            AccmtError: As for `validate`; also ModuleContractError if a step does not return a prediction per sample.
        """
        return addon("predict_alone")(self, module, dataset, datamodule, ckpt_path, keeps=return_predictions)

    def tune(
        self,
        module: AcceleratorModule,
        train_dataset: Data | None = None,
        *,
        batch_size: Search | None = None,
        lr: bool = False,
        lowest_lr: float = 1e-7,
        highest_lr: float = 1.0,
        lr_updates: int = 100,
    ) -> Tuning:
        """Find a batch size and a learning rate, and set them in this Trainer's hyper-parameters.

        Each trial trains the module for a few steps, without validation, callbacks, files and trackers; then it gets
        its weights back. Hooks of the module are called. A new batch size changes the effective batch: where that is
        to stay, use `max_micro_batch_size: auto` in the hyper-parameters instead.

        Processes: collective.

        Args:
            module: The module.
            train_dataset: As for `fit`.
            batch_size: "power" doubles the batch until memory runs out, "binsearch" then finds the largest that fits;
                None keeps it.
            lr: Whether to find the learning rate at which the loss falls fastest while the rate rises.
            lowest_lr: The first rate.
            highest_lr: The last rate, unless the loss diverges earlier.
            lr_updates: Optimizer steps in between.

        Returns:
            The results, which are also set in the hyper-parameters. With `fast_dev_run` nothing is tried.

        Raises:
            ArgumentError: A single sample does not fit in memory, or `batch_size` is something else.
            DataError: There are no training data.
        """
        rates = (lowest_lr, highest_lr, lr_updates) if lr else None
        tuning: Tuning = addon("tune")(self, module, train_dataset, batch_size, rates)
        return tuning

    def save_model(self, path: str | PathLike[str] | None = None) -> None:
        """Save the current weights in the same format as the best ones.

        Processes: collective.

        Args:
            path: A folder; None is `model_path`.

        Raises:
            RuntimeError: There has been no run yet.
            ArgumentError: `path` is None, and `model_path` has the best model of the finished run.
            OSError: The folder is not writable.
        """
        from accmt.processes import serving
        from accmt.run.model_saver import save_model

        with serving("trainer.save_model"):
            if path is None:
                addon("reject_replacing_best")(self.run)
            save_model(self.run, Path(path or self.settings.model_folder))

    def register_model_saving(
        self, name: str, saving_below: Bound | None = None, saving_above: Bound | None = None
    ) -> None:
        """Add a rule for saving the model, with separate thresholds, starting with the next `fit`.

        Args:
            name: A rule as in `model_saving`: "best_accuracy@en", or "best_accuracy/f1" where both must improve.
            saving_below: Like `model_saving_below`.
            saving_above: Like `model_saving_above`.

        Raises:
            ArgumentError: An unknown or existing rule, or bounds that exclude every value.
        """
        registered = [*self.registered_savings, RegisteredSaving(name, saving_below, saving_above)]
        addon("check_stage")("arguments", self.settings, registered=registered)
        self.registered_savings = registered

    def save_checkpoint(self, path: str | PathLike[str] | None = None) -> None:
        """Save everything that is needed to resume the run.

        During training, the checkpoint is written after the current optimizer step and everything else due there: a
        run cannot resume from the middle of a step.

        Processes: collective.

        Args:
            path: A separate checkpoint folder, in which none is deleted; None is the run's folder.

        Raises:
            RuntimeError: There has been no run yet.
            CheckpointError: The folder is not writable (during training, `fit` raises this), or the run has failed: its
                state may be from the middle of a step.
        """
        from accmt.processes import serving

        folder = None if path is None else Path(path).absolute()
        # Weights of some layers are from before the step, and of others from after it.
        if self.state.status in ("failed", "interrupted"):
            got = "a run that ended in the middle of an optimizer step"
            do = "Trainer(handlers=Handler.ALL), which saves the last finished step"
            raise fail(
                CheckpointError, "save_checkpoint", got=got, expected="a run that is training, or has finished", do=do
            )
        with serving("trainer.save_checkpoint"):
            if self.state.status == "running":
                self.run.checkpoints.request(folder)
            else:
                self.run.checkpoints.save(self.run, folder)

    def load_checkpoint(self, path: str | PathLike[str] | None = None) -> Checkpoint | None:
        """Choose the checkpoint that the next `fit` resumes from, regardless of `resume`.

        Processes: collective.

        Args:
            path: A checkpoint, or a folder, of which the newest checkpoint is used; None is the Trainer's folder.

        Returns:
            The checkpoint, with every file verified; None if `path` is None and there is none.

        Raises:
            NoCheckpointError: There is no checkpoint in `path`.
            CheckpointCorruptError: It is damaged.
        """
        from accmt.checkpoint.store import CheckpointStore
        from accmt.run.resume import find_checkpoint

        checkpoint = CheckpointStore(self.checkpoint_path).newest() if path is None else find_checkpoint(Path(path))
        self.chosen_checkpoint = None if checkpoint is None else checkpoint.folder
        return checkpoint

    def check_resume(
        self, module: AcceleratorModule, train_dataset: Data | None, val_dataset: Data | None = None
    ) -> int:
        """Check, in seconds, that interrupting and resuming this training is bit-for-bit exact.

        Trains copies of the module for four optimizer steps, once without and once with an interruption in the middle,
        and compares every batch, loss and tensor. The module does not change, the data are as for `fit`, and nothing is
        written outside a temporary folder.

        Processes: collective.

        Returns:
            The number of batches, losses and tensors compared.

        Raises:
            CheckpointError: Something differs; the message names the first difference and its likely cause.
        """
        compared: int = addon("check_resume")(self, module, train_dataset, val_dataset)
        return compared

    def prove(
        self,
        module: AcceleratorModule,
        train_dataset: Data | None = None,
        val_dataset: Data | None = None,
        *,
        datamodule: object | None = None,
        steps: int = 4,
        samples: int = 64,
    ) -> Proof:
        """Check that a training computes the same on any number of processes, and name what is wrong if it does not.

        Trains a few steps as one process with one batch per step, then with two processes, accumulation, loader
        workers, a token budget, an interruption and other evaluation batches, on the CPU and in forks of this process:
        the module, the data and the disk do not change. Random numbers of a step are the same for all its samples.

        Args:
            module: The module.
            train_dataset: As for `fit`.
            val_dataset: As for `fit`.
            datamodule: As for `fit`.
            steps: Optimizer steps of each launch.
            samples: Maximum training samples of each launch.

        Returns:
            The result; printing it shows a table, and the causes of differences.

        Raises:
            ArgumentError: The program has several processes, has used a GPU, or the system cannot fork.
        """
        proof: Proof = addon("prove")(
            self, module, train_dataset, val_dataset, datamodule=datamodule, steps=steps, samples=samples
        )
        return proof

    def replay(
        self,
        step: int,
        to: int | None = None,
        *,
        without: Collection[int] = (),
        probe: str | None = None,
        export: Path | None = None,
    ) -> Replay:
        """Make steps of this Trainer's last run again in a new process, and compare them with its ledger.

        The program is started again as it was launched, up to its `fit`; see `accmt replay`. The run needs
        `Trainer(ledger=True)`, and must have ended.

        Args:
            step: The optimizer step, from 1.
            to: The last of several steps.
            without: Samples that the first step is made without.
            probe: "file.py:name" of a callback class, or of a function that is called with the Trainer.
            export: A file for batches, weights and gradients of the first step.

        Returns:
            The result; printing it shows the samples and layers of each step, ranked by their gradients.

        Raises:
            ArgumentError: The steps cannot be made again.
        """
        made: Replay = addon("replay_run")(self.log_dir, step, to, without=without, probe=probe, export=export)
        return made

    @property
    def has_state(self) -> bool:
        """Whether a subclass adds to the state."""
        return type(self).get_state is not Trainer.get_state

    def get_state(self) -> dict[str, Any]:
        """Return the Trainer's state for checkpoints; a subclass may add JSON values and tensors."""
        return {"epochs_finished": self.state.epoch}

    def update_state(self, state: dict[str, Any]) -> None:
        """Restore state from `get_state`; a subclass restores its additions here."""

    def close(self) -> None:
        """Release the last run's resources, and leave the process group that it created.

        Without it, the group lasts until the program ends. Afterwards, processes are disconnected, and a launched
        program cannot train again: close at the end, once for all Trainers. A second call does nothing.

        Processes: all.

        Raises:
            RuntimeError: A run has not finished yet.
        """
        from accmt.engine.accelerator import close_group

        if self.state.status == "running":
            raise RuntimeError("a run has not finished yet: close the Trainer after it")
        self._forget_run()
        close_group()

    def __enter__(self) -> Self:
        """Return the Trainer; the end of the `with` block closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the Trainer; after an error, the process group stays until the program ends.

        Another process may be in the middle of a collective, and closing would wait for it.
        """
        if kind is None:
            self.close()
        else:
            self._forget_run()

    def _forget_run(self) -> None:
        # The module may have been given to another Trainer since.
        if self._run is not None and self._run.module.trainer is self:
            self._run.module.forget_run()
        self._run = self._evaluated = self._user_data = None
        self._dataloaders = {}

    @classmethod
    def from_config(cls, config: str | PathLike[str] | Mapping[str, Any], **kwargs: Any) -> Self:
        """Create a Trainer from a YAML or JSON file, or a dict, with its arguments.

        Args:
            config: The arguments; `hps_config` may be a path or the hyper-parameters themselves.
            **kwargs: Arguments that a file cannot contain, such as `sampler` and `collate_fn`; they take precedence.

        Raises:
            ArgumentError: The file does not contain a mapping.
            FileNotFoundError: There is no such file.
        """
        make: Callable[..., Self] = cls  # a subclass may have another constructor
        return make(**{**addon("read_config")(config), **kwargs})

    @classmethod
    def add_argparse_args(cls, parser: ArgumentParser) -> ArgumentParser:
        """Add a flag to a parser, in a separate group, for every Trainer argument that a string can express.

        Parsed arguments contain only flags that were set, so defaults do not override a file.

        Args:
            parser: A parser, possibly with other flags.

        Returns:
            The same parser.

        Raises:
            ArgumentError: The parser already has an argument with one of these names; nothing was added.
        """
        addon("add_flags")(parser)
        return parser

    @classmethod
    def from_argparse_args(
        cls, args: Namespace, config: str | PathLike[str] | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Self:
        """Create a Trainer from parsed arguments; arguments that are not the Trainer's are ignored.

        Args:
            args: The result of a parser with the flags of `add_argparse_args`.
            config: A file or dict of arguments, as for `from_config`; flags override them one by one.
            **kwargs: Arguments from the program; they override flags.

        Raises:
            ArgumentError: `hps_config` or `model_path` is missing, or a value is invalid.
            FileNotFoundError: There is no such file.
        """
        return cls.from_config(addon("take_typed")(args, config, kwargs))


Trainer.own_steps = (Trainer.do_backward, Trainer.do_opt_step, Trainer.do_zero_grad)
