"""Runs a `TrainerCallback` of transformers as a callback of accmt."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from accmt.callbacks import Callback
from accmt.errors import ModuleContractError, fail
from accmt.loop.evaluation import evaluate_and_count
from accmt.loop.logging import log_row
from accmt.messages import warn_once
from accmt.processes import is_main_process
from accmt.registry import addon


def adapt_callback(callback: Any) -> Callback:
    """Return a callback of accmt that works like another trainer's.

    Raises:
        ModuleContractError: There is none; the message says what to write instead.
    """
    advice: str | None = addon("hint_for_callback")(callback)
    transformers = sys.modules.get("transformers.trainer_callback")  # not imported, it made no callback
    if advice is None and transformers is not None and isinstance(callback, transformers.TrainerCallback):
        return TransformersCallback(callback)
    expected = "an accmt.Callback, a TrainerCallback of transformers, or a list of them"
    do = advice or "callbacks=MyCallback(), with class MyCallback(Callback): ..."
    raise fail(ModuleContractError, "Trainer(callbacks=...)", got=repr(callback), expected=expected, do=do)


class TransformersCallback(Callback):
    """Calls the events of a `TrainerCallback` with transformers' arguments, and acts on the flags that it sets.

    `args` is a `TrainingArguments`, `state` a `TrainerState` and `control` a `TrainerControl`, with what this run has;
    other values of `args` are transformers' defaults. Rows have transformers' names: `loss`, `eval_loss`,
    `eval_accuracy`. `should_epoch_stop` has no effect.

    Args:
        callback: The callback, which is called on every process, as by transformers' Trainer.
    """

    def __init__(self, callback: Any) -> None:
        from transformers import TrainerControl, TrainerState

        self.callback = callback
        self._args: Any = None
        self._state = TrainerState()
        self._control: Any = TrainerControl()
        self._num_batches = 0  # of the current step

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state, if it has one, and the rows so far."""
        exported = self.callback.state() if hasattr(self.callback, "state") else {}
        return {"attributes": exported.get("attributes", {}), "log_history": self._state.log_history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore state from `state_dict`."""
        vars(self.callback).update(state["attributes"])
        self._state.log_history = state["log_history"]

    def on_fit_start(self) -> None:
        """Call `on_init_end` and `on_train_begin`."""
        self._args = _make_arguments(self.trainer)
        Path(self._args.output_dir).mkdir(
            parents=True, exist_ok=True
        )  # as their Trainer does; CodeCarbon's requires it
        self._call("on_init_end")
        self._control.should_training_stop = False
        self._call("on_train_begin")

    def on_fit_end(self) -> None:
        """Call `on_train_end`, unless the run failed."""
        if self.state.finished:
            self._call("on_train_end")

    def on_epoch_start(self) -> None:
        """Call `on_epoch_begin`."""
        self._control.should_epoch_stop = False
        self._call("on_epoch_begin")

    def on_epoch_end(self) -> None:
        """Call `on_epoch_end`."""
        self._call("on_epoch_end")

    def on_before_training_step(self) -> None:
        """Call `on_step_begin` at the first batch of an optimizer step."""
        if self._num_batches == 0:
            self._control.should_save = self._control.should_evaluate = self._control.should_log = False
            self._call("on_step_begin")
        self._num_batches += 1

    def on_after_training_step(self) -> None:
        """Call `on_substep_end`, if other batches of the optimizer step follow."""
        if self._num_batches < self.state.grad_accum_steps:
            self._call("on_substep_end")

    def on_before_optimizer_step(self) -> None:
        """Call `on_pre_optimizer_step`."""
        self._call("on_pre_optimizer_step")

    def on_after_optimizer_step(self) -> None:
        """Call `on_optimizer_step`."""
        self._call("on_optimizer_step")

    def on_update_end(self) -> None:
        """Call `on_step_end`."""
        self._num_batches = 0
        self._call("on_step_end")

    def on_log(self, values: Mapping[str, float]) -> None:
        """Call `on_log`."""
        self._update()
        logs = self._rename(values)
        if not self.state.now.is_evaluating:
            logs["learning_rate"] = float(self.module.optimizer.param_groups[0]["lr"])
        logs["epoch"] = self._state.epoch
        self._state.log_history.append({**logs, "step": self.state.global_step})
        self._call("on_log", logs=logs)

    def on_evaluation_end(self, metrics: Mapping[str, float]) -> None:
        """Call `on_evaluate`."""
        self._call("on_evaluate", metrics=self._rename(metrics))

    def on_after_validation_step(self) -> None:
        """Call `on_prediction_step`."""
        self._call("on_prediction_step")

    def on_save_checkpoint(self) -> None:
        """Call `on_save`."""
        self._call("on_save")

    def _call(self, event: str, **others: Any) -> None:
        """Call an event with live values, and act on the flags that it sets."""
        self._update()
        run = self.trainer.run
        result = getattr(self.callback, event)(
            self._args,
            self._state,
            self._control,
            model=run.unwrapped_model,
            processing_class=getattr(self.module, "tokenizer", None),
            optimizer=run.stepper.optimizer,
            lr_scheduler=run.scheduler,
            train_dataloader=self.trainer.train_dataloader,
            eval_dataloader=next(iter(self.trainer.val_dataloaders), None),
            **others,
        )
        if result is not None:
            self._control = result
        if event in ("on_step_end", "on_epoch_end"):  # between steps, where a run can log, evaluate and save
            self._act()

    def _act(self) -> None:
        run, control = self.trainer.run, self._control
        if control.should_log:
            log_row(run)
        if control.should_evaluate and run.val_loaders:
            for before_use in run.features.before_use:
                before_use()
            evaluate_and_count(run)
        if control.should_save:
            self.trainer.save_checkpoint()
        if control.should_training_stop:
            self.trainer.should_stop = True
        if control.should_epoch_stop:
            name = type(self.callback).__name__
            warn_once(f"should_epoch_stop of {name} has no effect: an epoch is trained to its end", about=name)
        control.should_log = control.should_evaluate = control.should_save = control.should_epoch_stop = False

    def _update(self) -> None:
        """Set the values of `state` to those of the run."""
        run, state = self.trainer.run, self._state
        number = run.train_loader.source.num_micro_batches
        state.epoch = run.state.epoch + (run.state.train_step / number if number else 0.0)
        state.global_step = run.state.global_step
        state.max_steps = run.total_steps or 0
        state.num_train_epochs = run.length.epochs or 0
        state.logging_steps, state.train_batch_size = self._args.logging_steps, self._args.per_device_train_batch_size
        state.is_world_process_zero = is_main_process()
        state.is_local_process_zero = bool(run.accelerator.is_local_main_process)
        best = run.state.best.values()
        state.best_metric = next(iter(best), None)

    def _rename(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return values under transformers' names."""
        tracking, renamed = self.trainer.settings.tracking, {}
        for name, value in values.items():
            if name == tracking.train_loss_metric_name:
                renamed["loss"] = value
            elif self.state.now.is_evaluating:
                renamed[f"eval_{'loss' if name == tracking.val_loss_metric_name else name}"] = value
            else:
                renamed[name] = value
        return renamed


def _make_arguments(trainer: Any) -> Any:
    """Return a `TrainingArguments` with what a run has, and transformers' defaults for the rest.

    It is not constructed: its constructor chooses devices and sets environment variables for a Trainer of transformers.
    """
    from accelerate import PartialState
    from transformers import TrainingArguments

    settings, run = trainer.settings, trainer.run
    arguments = object.__new__(TrainingArguments)
    for field in fields(TrainingArguments):
        if field.default is not MISSING:
            vars(arguments)[field.name] = field.default
        elif field.default_factory is not MISSING:
            vars(arguments)[field.name] = field.default_factory()
    known = {
        "output_dir": str(settings.model_folder),
        "logging_dir": str(trainer.log_dir),
        "run_name": run.tracking.run_name,
        "report_to": [],
        "seed": run.seed,
        "per_device_train_batch_size": settings.hps.train_batch_size,
        "per_device_eval_batch_size": settings.hps.val_batch_size,
        "gradient_accumulation_steps": run.accumulation_at(0) or 1,
        "learning_rate": settings.hps.learning_rate or 0.0,
        "num_train_epochs": float(run.length.epochs or 0),
        "max_steps": -1 if run.total_steps is None else run.total_steps,
        "logging_steps": max(settings.tracking.log_steps, 1),
        "bf16": run.accelerator.mixed_precision == "bf16",
        "fp16": run.accelerator.mixed_precision == "fp16",
        # Else the first `args.device` would set up devices again, and reset the run's Accelerator.
        "_setup_devices": run.device,
        "_n_gpu": int(run.device.type == "cuda"),
        "distributed_state": PartialState(),
    }
    vars(arguments).update(known)
    return arguments
