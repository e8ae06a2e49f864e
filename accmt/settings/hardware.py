"""Checks the Trainer's arguments about device and precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accmt.errors import ArgumentError, explain
from accmt.settings.checks import require_choice, require_keywords, require_mapping

PRECISIONS: Mapping[str, str] = {
    "16": 'mixed_precision="fp16"',
    "16-mixed": 'mixed_precision="fp16"',
    "16-true": "model.half() before fit: mixed_precision keeps the weights in 32 bits",
    "32": "leave it out: a launch without a precision computes in 32 bits",
    "32-true": "leave it out: a launch without a precision computes in 32 bits",
    "64": "model.double() before fit: there is no precision of 64 bits",
    "64-true": "model.double() before fit: there is no precision of 64 bits",
    "bf16-mixed": 'mixed_precision="bf16"',
    "bf16-true": "model.bfloat16() before fit: mixed_precision keeps the weights in 32 bits",
    "bfloat16": 'mixed_precision="bf16"',
    "double": "model.double() before fit: there is no precision of 64 bits",
    "float16": 'mixed_precision="fp16"',
    "float32": 'mixed_precision="no"',
    "float64": "model.double() before fit: there is no precision of 64 bits",
    "fp32": 'mixed_precision="no"',
    "fp64": "model.double() before fit: there is no precision of 64 bits",
    "fp8": 'mixed_precision="bf16": there is no fp8 in this version',
    "full": 'mixed_precision="no"',
    "half": 'mixed_precision="fp16"',
    "transformer-engine": 'mixed_precision="bf16": there is no fp8 in this version',
}
"""Precisions as others write them, torch's types among them, and what to do here."""


def require_precision(value: Any) -> None:
    """Check `mixed_precision`.

    Raises:
        ArgumentError: No such precision; the message says what the one of another trainer is here.
    """
    choices = (None, "no", "fp16", "bf16")
    do = PRECISIONS.get(str(value).removeprefix("torch."))
    if value in choices or do is None:
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
