"""Reads what a user's steps return, and says what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch

from accmt.errors import ModuleContractError, explain

_TRAINING_EXPECTED = 'the mean loss as a tensor of shape [], or a dict with it under "loss"'


class TrainingOutput(NamedTuple):
    """What a training step returned.

    Attributes:
        loss: The mean loss, of shape [] and attached to the graph.
        weight: What the step says its loss weighs; None if it says nothing.
        others: Further detached scalars, by name.
    """

    loss: torch.Tensor
    weight: torch.Tensor | float | None = None
    others: dict[str, torch.Tensor] | None = None


def read_training_output(output: Any) -> TrainingOutput:
    """Read what `training_step` returned.

    Raises:
        ModuleContractError: It is neither a scalar tensor with a gradient nor a dict with one under "loss".
    """
    if isinstance(output, torch.Tensor):
        return TrainingOutput(_require_trainable(output))
    if not isinstance(output, Mapping):
        _refuse(_describe(output), "return loss" if output is None else 'return loss.mean(), or {"loss": loss.mean()}')
    if "loss" not in output:
        _refuse(f"a dict with the keys {sorted(map(str, output))}", 'return {"loss": loss, ...}')
    loss = output["loss"]
    if not isinstance(loss, torch.Tensor):
        _refuse(f'"loss": {_describe(loss)}', "return the tensor itself, not loss.item()")
    others = {
        name: value.detach().reshape(()) if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        for name, value in output.items()
        if name not in ("loss", "weight") and _is_scalar(value)
    }
    return TrainingOutput(_require_trainable(loss), _read_weight(output.get("weight")), others or None)


def _require_trainable(loss: torch.Tensor) -> torch.Tensor:
    if loss.ndim != 0:
        _refuse(f"a tensor of shape {tuple(loss.shape)}", "return loss.mean()")
    if not loss.requires_grad:
        _refuse(
            "a tensor without a gradient", "return the loss as the model computed it: not detached, not under no_grad"
        )
    return loss


def _read_weight(weight: Any) -> torch.Tensor | float | None:
    do = "return one number, such as (labels != -100).sum()"
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            _refuse(f'"weight": a tensor of shape {tuple(weight.shape)}', do)
        weight = weight.detach().reshape(())
        return float(weight) if weight.device.type == "cpu" else weight.float()
    if weight is not None and not isinstance(weight, int | float):
        _refuse(f'"weight": {_describe(weight)}', do)
    return None if weight is None else float(weight)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _refuse(got: str, do: str) -> NoReturn:
    raise ModuleContractError(explain("training_step", got, _TRAINING_EXPECTED, do))


def _describe(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r:.80}"


def read_validation_output(output: Any, loss_name: str) -> tuple[dict[str, Any], torch.Tensor | float | None]:
    """Read what `validation_step` returned.

    Args:
        output: The mean loss as a tensor, or a dict with it under "loss" (optional), scalars, and pairs for metrics.
        loss_name: The name under which the loss is reported.

    Returns:
        The entries by name, and the weight that the step gave, if it did.

    Raises:
        ModuleContractError: It is neither a scalar tensor nor a dict.
    """
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return {loss_name: output}, None
    if not isinstance(output, Mapping):
        got = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else _describe(output)
        expected = 'a tensor of shape [], or a dict such as {"loss": loss, "accuracy": (predictions, references)}'
        raise ModuleContractError(explain("validation_step", got, expected, 'return {"loss": loss}'))
    entries = {loss_name if name == "loss" else name: value for name, value in output.items() if name != "weight"}
    return entries, output.get("weight")
