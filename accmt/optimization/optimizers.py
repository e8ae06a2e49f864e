"""Building the optimizer, fused into one kernel where that works."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from accmt.config import HyperParameters
from accmt.config.arguments import optimizer_arguments, parameters_of
from accmt.errors import HyperParameterError, ModuleContractError, explain

_IMPLEMENTATIONS = frozenset({"fused", "foreach", "differentiable", "capturable"})


def build_optimizer(
    hps: HyperParameters,
    parameters: Iterable[torch.nn.Parameter],
    *,
    as_trained: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Optimizer:
    """Build the optimizer of `hps` over `parameters`.

    All of them are handed over, frozen ones too: the optimizer skips those without a gradient, and trains them
    from the moment they are thawed. `fused=True` is set where the class, the devices and the types of the parameters
    allow it and `hps` chooses no implementation itself.

    Args:
        hps: The hyper-parameters.
        parameters: The parameters.
        as_trained: Makes a tensor of the kind that the parameters will be, where they are sharded later.

    Raises:
        ModuleContractError: No parameter requires a gradient.
        HyperParameterError: The optimizer refuses its arguments or these parameters.
    """
    parameters = list(parameters)
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        message = explain(
            "the parameters to optimize",
            f"{len(parameters)} parameters, none with requires_grad=True",
            "at least one trainable parameter",
            "unfreeze a part of the model, or override get_optimizer",
        )
        raise ModuleContractError(message)
    optimizer_class = hps.optimizer_class
    arguments = optimizer_arguments(optimizer_class, hps.optim_kwargs)
    if _can_fuse(optimizer_class, arguments, trainable, as_trained or torch.clone):
        arguments["fused"] = True
    try:
        return optimizer_class(parameters, **arguments)
    except (TypeError, ValueError) as error:
        name = optimizer_class.__name__
        message = explain(
            hps.where("optim"),
            f"{name}: {error}",
            f"arguments and parameters that {name} accepts",
            "correct them, choose another optimizer, or override get_optimizer",
        )
        raise HyperParameterError(message) from error


def _can_fuse(
    optimizer_class: type[Optimizer],
    arguments: Mapping[str, Any],
    trainable: Iterable[torch.nn.Parameter],
    as_trained: Callable[[torch.Tensor], torch.Tensor],
) -> bool:
    """Try a fused step on one number of each device and type that the parameters have."""
    if "fused" not in parameters_of(optimizer_class) or _IMPLEMENTATIONS & set(arguments):
        return False
    try:
        for device, dtype in {(parameter.device, parameter.dtype) for parameter in trainable}:
            weight = torch.nn.Parameter(as_trained(torch.zeros(1, device=device, dtype=dtype)))
            weight.grad = torch.zeros_like(weight)
            optimizer_class([weight], **arguments, fused=True).step()  # type: ignore[call-arg]
    except (RuntimeError, TypeError, ValueError):  # what is wrong beside `fused` shows when the real one is built
        return False
    return True
