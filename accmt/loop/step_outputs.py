"""Reads and checks the outputs of the user's steps."""

from __future__ import annotations

import dis
import math
from collections.abc import Callable, Mapping
from inspect import CO_COROUTINE, CO_GENERATOR, unwrap
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple, NoReturn

import torch

from accmt.errors import ModuleContractError, fail
from accmt.metrics.averages import Weight
from accmt.module import AcceleratorModule, defines
from accmt.options.checks import as_float
from accmt.run.weighting import require_weight

_TRAINING_EXPECTED = 'the mean loss as a tensor of shape [], or a dict with it under "loss"'


class TrainingOutput(NamedTuple):
    """The output of a training step.

    Attributes:
        loss: The mean loss, of shape [] and attached to the graph.
        weight: The weight of the loss; None if the step did not return one.
        values: Further detached scalars, by name.
    """

    loss: torch.Tensor
    weight: Weight | None = None
    values: dict[str, torch.Tensor] | None = None


def read_training_output(output: Any) -> TrainingOutput:
    """Read the output of `training_step`.

    Raises:
        ModuleContractError: It is neither a scalar tensor with a gradient nor a dict with one under "loss", or its
            weight is invalid.
    """
    if isinstance(output, torch.Tensor):
        is_trainable = output.requires_grad and output.ndim == 0
        return TrainingOutput(output if is_trainable else _require_trainable(output))
    if not isinstance(output, Mapping):
        do = 'return loss.mean(), or {"loss": loss.mean()}'
        if output is None:
            do = "return loss; to skip a batch, write `return None` in the step itself"
        elif isinstance(output, int | float):
            do = "return the tensor itself, not loss.item()"
        _reject(_describe(output), do)
    if "loss" not in output:
        _reject(f"a dict with the keys {sorted(map(str, output))}", 'return {"loss": loss, ...}')
    loss = output["loss"]
    if not isinstance(loss, torch.Tensor):
        _reject(f'"loss": {_describe(loss)}', "return the tensor itself, not loss.item()")
    weight = read_weight("training_step", output.get("weight"))
    return TrainingOutput(_require_trainable(loss), weight, read_further_values(output) or None)


def may_return_none(module: AcceleratorModule) -> bool:
    """Return whether the source of the module's training step returns both a loss and None.

    Processes have to know this before the first batch, because the total weight of a window is then not known
    beforehand. A step that never returns a loss is not such a step: its `return` is missing.
    """
    step = module.training_step if defines(module, "training_step") else module.step
    nones = _find_returns_of_none(step)
    return any(nones) and not all(nones)


def _find_returns_of_none(function: Callable[..., Any]) -> list[bool]:
    """Return, for each `return` in a function's source, whether it returns None, also at the end of the function.

    Of a generator, and of a function without Python source, nothing is known: there are none.
    """
    code = getattr(unwrap(function), "__code__", None)
    if code is None or code.co_flags & (CO_GENERATOR | CO_COROUTINE):
        return []
    instructions = [step for step in dis.get_instructions(code) if step.opname not in ("NOP", "CACHE")]
    nones = []
    for before, step in pairwise(instructions):
        if step.opname == "RETURN_CONST":
            nones.append(step.argval is None)
        elif step.opname == "RETURN_VALUE":
            nones.append(before.opname == "LOAD_CONST" and before.argval is None)
            if step.is_jump_target:  # `loss if ... else None`
                nones.append(False)
    return nones


def _require_trainable(loss: torch.Tensor) -> torch.Tensor:
    # `reduction="none"`: torch's own message is about implicit gradients of outputs that are not scalars.
    if loss.ndim != 0:
        _reject(f"a tensor of shape {tuple(loss.shape)}", "return loss.mean()")
    # A detached loss: torch says that element 0 of tensors does not require grad.
    if not loss.requires_grad:
        do = "return the loss with its graph: do not detach it or compute it under no_grad"
        _reject("a tensor without a gradient", do)
    return loss


def read_further_values(output: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the other scalars that a step returned, detached; values that are not scalars are left out."""
    values = {}
    for name, value in output.items():
        if name in ("loss", "weight") or _is_of_samples(name, value):
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            values[name] = value.detach().reshape(()).clone()
        elif isinstance(value, Real):
            values[name] = torch.tensor(as_float(value), dtype=torch.float64)
    return values


def _is_of_samples(name: str, value: Any) -> bool:
    """Return whether an entry has one value per sample, for features that need them, rather than a value to report."""
    return name in ("losses", "weights") and isinstance(value, torch.Tensor) and value.ndim == 1


def read_weight(step: str, weight: Any) -> Weight | None:
    """Read the weight of a step's loss; a tensor on a device stays there.

    Raises:
        ModuleContractError: It is not a finite non-negative number.
    """
    if weight is None:
        return None
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        scalar = weight.detach().reshape(())
        if scalar.device.type != "cpu":
            return scalar.float()  # checked when it is read: checking now would wait for the device
        weight = scalar.item()
    number = as_float(weight) if isinstance(weight, Real) else math.nan
    require_weight(step, number, _describe(weight))
    return number


def _reject(got: str, do: str) -> NoReturn:
    raise fail(ModuleContractError, "training_step", got=got, expected=_TRAINING_EXPECTED, do=do)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"{type(value).__name__} {value!r:.80}"


def read_validation_output(output: Any, loss_name: str) -> tuple[dict[str, Any], Weight | None]:
    """Read the output of `validation_step`.

    Args:
        output: The mean loss as a tensor, or a dict with it under "loss" (optional), scalars, and pairs for metrics.
        loss_name: The name under which the loss is reported.

    Returns:
        The entries by name, and the weight if the step returned one.

    Raises:
        ModuleContractError: It is neither a scalar tensor nor a dict, or its weight is invalid.
    """
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return {loss_name: output}, None
    if not isinstance(output, Mapping):
        expected = 'a tensor of shape [], or a dict such as {"loss": loss, "accuracy": (predictions, references)}'
        raise fail(
            ModuleContractError, "validation_step", got=_describe(output), expected=expected, do='return {"loss": loss}'
        )
    entries = {
        loss_name if name == "loss" else name: value
        for name, value in output.items()
        if name != "weight" and not _is_of_samples(name, value)
    }
    return entries, read_weight("validation_step", output.get("weight"))
