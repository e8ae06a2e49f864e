"""The table of hooks: every moment at which a callback or a module can act."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from accmt.errors import ModuleContractError, explain, nearest

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

ONCE_PER_BATCH = frozenset(
    f"on_{moment}" for moment in ("before_training_step", "after_training_step", "before_backward", "after_backward")
) | {"on_before_validation_step", "on_after_validation_step"}
"""Hooks that act on a batch, of which each process has its own; the others act for all processes together."""

ALIASES: dict[str, str] = {"before_eval": "on_evaluation_start", "after_eval": "on_evaluation_end"}
"""The original accmt's names. Those of other trainers work where `accmt.compat.OtherHookNames` is a base."""

HOOK_PREFIXES = ("on_", "before_", "after_", "begin_")
"""A public method of a callback that begins like this is meant as a hook, so it has to be one."""


def names_of_hooks(owner: object) -> Mapping[str, str]:
    """Return what else the hooks of an object may be called, with our names."""
    return {**ALIASES, **getattr(owner, "other_hook_names", {})}


def reject_unknown_hook(callback: object, attribute: str) -> NoReturn:
    """Reject something that was meant as a hook and is none.

    Raises:
        ModuleContractError: Always; the message names the nearest hook, or what to write for another trainer's.
    """
    from accmt.registry import addon

    theirs: Mapping[str, str] = addon("other_hook_names")
    meant = nearest(attribute, [*HOOKS, *ALIASES, *theirs], cutoff=0) or attribute
    got = "a method that begins like a hook but is none"
    meant = theirs.get(meant, meant)
    do = f"did you mean {meant}? Any other name that does not begin with {', '.join(HOOK_PREFIXES)} is free"
    foreign = addon("hint_for_method")(attribute)
    if foreign is not None:
        got, do = f"a hook of {foreign[0]}, which does not exist here", foreign[1]
    if attribute in theirs:
        keywords = ", ".join(("self", *HOOKS[theirs[attribute]]))
        got = "a name that other trainers have for a hook"
        do = f"def {theirs[attribute]}({keywords}); or derive from accmt.compat.OtherHookNames too: it takes theirs"
    where, expected = f"{type(callback).__name__}.{attribute}", "one of: " + ", ".join(HOOKS)
    raise ModuleContractError(explain(where, got, expected, do))
