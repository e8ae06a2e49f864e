"""Checks the Trainer's arguments about device and precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accmt.errors import ArgumentError, explain
from accmt.options.checks import require_choice, require_keywords, require_mapping, write_place
from accmt.registry import addon


def require_precision(value: Any) -> None:
    """Check `mixed_precision`.

    Raises:
        ArgumentError: No such precision; the message says what the one of another trainer is here.
    """
    choices = (None, "no", "fp16", "bf16")
    if value in choices:
        return
    do = addon("hint_for_precision")(value)
    if do is None:
        require_choice("mixed_precision", value, choices)
        return
    expected = "one of " + ", ".join(map(repr, choices))
    where, got = "Trainer(mixed_precision=...)", f"{value!r} ({type(value).__name__})"
    raise ArgumentError(explain(where, got, expected, do))


def require_ddp_kwargs(value: Any) -> None:
    """Check `ddp_kwargs`; Accelerate is imported for a dict only.

    Raises:
        ArgumentError: It is neither None nor a dict of arguments that exist.
    """
    require_mapping("ddp_kwargs", value)
    if value:
        from accelerate import DistributedDataParallelKwargs

        require_keywords("ddp_kwargs", value, DistributedDataParallelKwargs, "accelerate.DistributedDataParallelKwargs")


def require_fsdp(name: str, value: Any) -> None:
    """Check arguments of FSDP; Accelerate is imported for a dict of them only.

    Raises:
        ArgumentError: It is neither True nor a dict of arguments that exist.
    """
    if isinstance(value, Mapping):
        from accelerate import FullyShardedDataParallelPlugin

        require_keywords(name, value, FullyShardedDataParallelPlugin, "accelerate.FullyShardedDataParallelPlugin")
    elif value is not True:
        expected, do = "True, or arguments of FSDP2 by name", 'parallelism={"fsdp": True}, or leave `parallelism` out'
        raise ArgumentError(explain(write_place(name), repr(value), expected, do))


def require_accelerator(value: Any) -> None:
    """Check `accelerator`; Accelerate is imported for a dict only.

    Raises:
        ArgumentError: It is neither None, a dict of arguments that exist nor an object that prepares models.
    """
    if isinstance(value, Mapping) and value:
        from accelerate import Accelerator

        require_keywords("accelerator", value, Accelerator, "accelerate.Accelerator")
    is_object = hasattr(value, "prepare") and not isinstance(value, type)
    if value is None or isinstance(value, Mapping) or is_object:
        return
    got, expected = f"{value!r} ({type(value).__name__})", "an accelerate.Accelerator, or a dict of its arguments"
    do = "leave it out, and choose the hardware as the program starts: accmt launch -N 2 train.py"
    if value == "cpu":
        do = 'accelerator={"cpu": True}'
    elif isinstance(value, type):
        do = f"accelerator={value.__name__}()"
    raise ArgumentError(explain("Trainer(accelerator=...)", got, expected, do))
