"""Base classes that let your classes use hook and method names of other trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HOOK_NAMES: Mapping[str, str] = {
    "before_fit": "on_fit_start",
    "begin_fit": "on_fit_start",
    "on_train_start": "on_fit_start",
    "on_train_begin": "on_fit_start",
    "after_fit": "on_fit_end",
    "on_train_end": "on_fit_end",
    "on_end_train": "on_fit_end",
    "before_epoch": "on_epoch_start",
    "begin_epoch": "on_epoch_start",
    "on_begin_train_epoch": "on_epoch_start",
    "on_train_epoch_start": "on_epoch_start",
    "on_epoch_begin": "on_epoch_start",
    "after_epoch": "on_epoch_end",
    "on_end_train_epoch": "on_epoch_end",
    "on_train_epoch_end": "on_epoch_end",
    "before_step": "on_before_training_step",
    "on_train_batch_start": "on_before_training_step",
    "after_step": "on_after_training_step",
    "on_train_batch_end": "on_after_training_step",
    "after_backward": "on_after_backward",
    "on_end_backward": "on_after_backward",
    "on_pre_optimizer_step": "on_before_optimizer_step",
    "on_optimizer_step": "on_after_optimizer_step",
    "on_step_end": "on_update_end",
    "on_end_train_step": "on_update_end",
    "before_valid": "on_evaluation_start",
    "on_validation_epoch_start": "on_evaluation_start",
    "on_validation_epoch_end": "on_evaluation_end",
    "on_evaluate": "on_evaluation_end",
    "on_validation_batch_start": "on_before_validation_step",
    "on_validation_batch_end": "on_after_validation_step",
    "on_prediction_step": "on_after_validation_step",
    "on_end_val_epoch": "on_validation_end",
    "after_cancel": "on_keyboard_interrupt",
}
"""Hook names of PyMarlin, trainer_tools, Lightning and transformers, mapped to ours."""


class OtherHookNames:
    """Base class, in addition to `Callback` or `AcceleratorModule`, that allows hook names of other trainers.

    The hooks get accmt's keyword arguments. `ord`, as in trainer_tools, works like `order`.

    Examples:
        >>> from accmt import Callback
        >>> class Watcher(OtherHookNames, Callback):
        ...     def on_train_epoch_end(self):
        ...         print(self.state.epoch)
    """

    other_hook_names = HOOK_NAMES

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "ord" in cls.__dict__:
            cls.order = cls.__dict__["ord"]  # type: ignore[attr-defined]


class OtherTrainerNames:
    """Base class, before `Trainer`, that adds methods and properties with the names of other trainers.

    Examples:
        >>> from accmt import Trainer
        >>> class MyTrainer(OtherTrainerNames, Trainer): ...
    """

    @property
    def is_global_zero(self: Any) -> bool:
        """Lightning's name for `is_main`."""
        is_main: bool = self.is_main
        return is_main

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `fit`; the name in transformers and PyMarlin."""
        return self.fit(*args, **kwargs)

    def get_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `get_callback`; the name in trainer_tools."""
        return self.get_callback(*args, **kwargs)

    def describe_hooks(self: Any) -> str:
        """Call `describe_callbacks`; the name in trainer_tools."""
        table: str = self.describe_callbacks()
        return table
