"""Names of other trainers that work where a class asks for them, by deriving from one of these bases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["OtherHookNames", "OtherTrainerNames"]

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
"""Names of PyMarlin, trainer_tools, Lightning and transformers, with ours for the same moments."""


class OtherHookNames:
    """A base beside `Callback` or `AcceleratorModule`: hooks may have the names that other trainers give them.

    They get our keywords. A class may have trainer_tools' `ord` in place of `order`.

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
    """A base before `Trainer`: methods and properties may have the names that other trainers give them.

    Examples:
        >>> from accmt import Trainer
        >>> class MyTrainer(OtherTrainerNames, Trainer): ...
    """

    @property
    def is_global_zero(self: Any) -> bool:
        """Lightning's name of `is_main`."""
        is_main: bool = self.is_main
        return is_main

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Do what `fit` does, as transformers and PyMarlin call it."""
        return self.fit(*args, **kwargs)

    def get_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Do what `get_callback` does, as trainer_tools calls it."""
        return self.get_callback(*args, **kwargs)

    def describe_hooks(self: Any) -> str:
        """Do what `describe_callbacks` does, as trainer_tools calls it."""
        table: str = self.describe_callbacks()
        return table
