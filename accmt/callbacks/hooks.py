"""The table of hooks: every moment at which a callback or a module can act, and the names other trainers give it."""

from __future__ import annotations

from difflib import get_close_matches
from typing import NoReturn

from accmt.compat.method_hints import find_foreign_method
from accmt.errors import ModuleContractError, explain

HOOKS: dict[str, tuple[str, ...]] = {
    "on_fit_start": (),
    "on_fit_end": (),
    "on_epoch_start": (),
    "on_epoch_end": (),
    "on_before_training_step": ("batch",),
    "on_after_training_step": ("batch", "outputs"),
    "on_before_backward": ("loss",),
    "on_after_backward": ("loss",),
    "on_before_optimizer_step": ("optimizer",),
    "on_after_optimizer_step": ("optimizer",),
    "on_before_scheduler_step": ("scheduler",),
    "on_after_scheduler_step": ("scheduler",),
    "on_before_zero_grad": ("optimizer",),
    "on_after_zero_grad": ("optimizer",),
    "on_update_end": (),
    "on_log": ("values", "step"),
    "on_evaluation_start": (),
    "on_evaluation_end": ("metrics",),
    "on_validation_start": ("key",),
    "on_validation_end": ("key", "outputs"),
    "on_before_validation_step": ("batch",),
    "on_after_validation_step": ("batch", "outputs"),
    "on_save_model": ("folder",),
    "on_save_checkpoint": ("folder",),
    "on_resume": (),
    "on_keyboard_interrupt": ("error",),
    "on_cuda_out_of_memory": ("error",),
    "on_runtime_error": ("error",),
    "on_exception": ("error",),
}
"""Each hook with the keywords it is called with; a method takes those it names."""

ALIASES: dict[str, str] = {
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
    "before_eval": "on_evaluation_start",
    "on_validation_epoch_start": "on_evaluation_start",
    "after_eval": "on_evaluation_end",
    "on_validation_epoch_end": "on_evaluation_end",
    "on_evaluate": "on_evaluation_end",
    "on_validation_batch_start": "on_before_validation_step",
    "on_validation_batch_end": "on_after_validation_step",
    "on_prediction_step": "on_after_validation_step",
    "on_end_val_epoch": "on_validation_end",
    "after_cancel": "on_keyboard_interrupt",
}
"""Names of PyMarlin, trainer_tools, Lightning and transformers for the same moments."""

HOOK_PREFIXES = ("on_", "before_", "after_", "begin_")
"""A public method of a callback that begins like this is meant as a hook, so it has to be one."""


def refuse_unknown_hook(callback: object, attribute: str) -> NoReturn:
    """Refuse something that was meant as a hook and is none.

    Raises:
        ModuleContractError: Always; the message names the nearest hook, or what to write for another trainer's.
    """
    nearest = get_close_matches(attribute, [*HOOKS, *ALIASES], n=1, cutoff=0.0)[0]
    got = "a method that begins like a hook but is none"
    do = f"did you mean {nearest}? Any other name that does not begin with {', '.join(HOOK_PREFIXES)} is free"
    foreign = find_foreign_method(attribute)
    if foreign is not None:
        got, do = f"a hook of {foreign[0]}, which does not exist here", foreign[1]
    where, expected = f"{type(callback).__name__}.{attribute}", "one of: " + ", ".join(HOOKS)
    raise ModuleContractError(explain(where, got, expected, do))
