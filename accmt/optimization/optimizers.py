"""Building the optimizer, fused into one kernel where that works."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from accmt.errors import HyperParameterError, ModuleContractError, explain
from accmt.optimization.chained import ChainedOptimizer
from accmt.optimization.parameter_groups import Assigned, assign
from accmt.options import HyperParameters
from accmt.options.grouping import Grouping
from accmt.options.optimizer_and_scheduler_arguments import optimizer_arguments, parameters_of, read_grouping
from accmt.sharded_tensors import make_whole, mesh_of

_TRIED = 67  # numbers: some vectors of a CPU's kernels, and a rest
_IMPLEMENTATIONS = frozenset({"fused", "foreach", "differentiable", "capturable"})


AsTrained = Callable[[torch.Tensor], torch.Tensor]


def needs_closure(optimizer: Any) -> bool:
    """Return whether an optimizer evaluates the loss itself, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def build_optimizer(hps: HyperParameters, model: nn.Module, *, as_trained: AsTrained = torch.clone) -> Optimizer:
    """Build the optimizer of `hps` over the parameters of a model, or several that are chained into one.

    All of them are handed over, frozen ones too: the optimizer skips those without a gradient, and trains them
    from the moment they are thawed. `fused=True` is set where the class, the devices and the types of the parameters
    allow it and `hps` chooses no implementation itself.

    Args:
        hps: The hyper-parameters.
        model: The model.
        as_trained: Makes a tensor of the kind that the parameters will be, where they are sharded later.

    Raises:
        ModuleContractError: No parameter requires a gradient.
        HyperParameterError: The optimizer refuses its arguments or these parameters, or its groups do not fit them.
    """
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        message = explain(
            "the parameters to optimize",
            f"{len(parameters)} parameters, none with requires_grad=True",
            "at least one trainable parameter",
            "unfreeze a part of the model, or override get_optimizer",
        )
        raise ModuleContractError(message)
    grouping, _ = read_grouping(hps.optimizer_class, hps.optim_kwargs)
    if not grouping:
        return _build(hps.optimizer_class, parameters, hps.optim_kwargs, as_trained, hps.where("optim"))
    return _build_groups(hps, assign(model, grouping, hps), grouping, as_trained)


def _build_groups(
    hps: HyperParameters, assigned: Sequence[Sequence[Assigned]], grouping: Grouping, as_trained: AsTrained
) -> Optimizer:
    """Build the default optimizer over its own groups and those without a type, and one for each other group."""
    numbered = list(enumerate(assigned))
    mine = [part for number, parts in numbered for part in parts if part.optimizer_class is None]
    optimizers = [_build_grouped(hps.optimizer_class, mine, hps.optim_kwargs, as_trained, hps.where("optim"))]
    for number, parts in numbered[1:]:
        own_class = grouping.groups[number - 1].optimizer_class
        if own_class is not None:
            where = hps.where("optim", "groups", number - 1)
            arguments = grouping.groups[number - 1].arguments
            optimizers.append(_build_grouped(own_class, parts, arguments, as_trained, where))
    return optimizers[0] if len(optimizers) == 1 else ChainedOptimizer(optimizers)


def _build_grouped(
    optimizer_class: type[Optimizer],
    parts: Sequence[Assigned],
    arguments: Mapping[str, Any],
    as_trained: AsTrained,
    where: str,
) -> Optimizer:
    """Build an optimizer with a parameter group for each part, and with a `name` and an `initial_lr` in it."""
    groups = [{"params": list(part.parameters.values()), **part.arguments} for part in parts]
    optimizer = _build(optimizer_class, groups, arguments, as_trained, where)
    strange = {name for part in parts for name in part.arguments if name not in optimizer.defaults}
    if strange:
        got = f"{', '.join(sorted(strange))}, which {optimizer_class.__name__} has for all parameters alike"
        do = "move it to `optim`, or give the group a `type` of its own"
        raise HyperParameterError(explain(where, got, "arguments that can differ by group", do))
    for group, part in zip(optimizer.param_groups, parts, strict=True):
        group["name"] = part.label
        if group["lr"] is not None:
            group["lr"] = group["lr"] * part.rate
            group["initial_lr"] = float(group["lr"])  # a number, where an optimizer has made a tensor of the rate
    return optimizer


def _build(
    optimizer_class: type[Optimizer],
    parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
    written: Mapping[str, Any],
    as_trained: AsTrained,
    where: str,
) -> Optimizer:
    arguments = optimizer_arguments(optimizer_class, written)
    trainable = _trainable(parameters)
    if _can_fuse(optimizer_class, arguments, trainable, as_trained):
        arguments["fused"] = True
    try:
        if arguments.get("fused") and not _is_fused_right(optimizer_class, arguments, trainable, as_trained):
            types = ", ".join(sorted({f"{weight.dtype} on {weight.device.type}" for weight in trainable}))
            message = (
                f"a fused step for {types} that does not give what an ordinary one does, in torch {torch.__version__}"
            )
            raise ValueError(message)  # noqa: TRY301 - one message for all refusals
        return optimizer_class(parameters, **arguments)
    except (TypeError, ValueError, AssertionError) as error:
        name = optimizer_class.__name__
        do = "correct them, choose another optimizer, let it have only some parameters (`groups`), or override "
        do += "get_optimizer"
        if optimizer_class is torch.optim.Muon and "2D" in str(error):
            do = "let it have the matrices alone: `type: AdamW` in `optim`, and in it "
            do += "`groups: [{kind: matrix, type: Muon, lr: 0.02}]`"
        expected = f"arguments and parameters that {name} accepts"
        raise HyperParameterError(explain(where, f"{name}: {error}", expected, do)) from error


def _trainable(parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]]) -> list[nn.Parameter]:
    several = (one["params"] if isinstance(one, dict) else [one] for one in parameters)
    return [parameter for some in several for parameter in some if parameter.requires_grad]


def _can_fuse(
    optimizer_class: type[Optimizer],
    arguments: Mapping[str, Any],
    trainable: Iterable[nn.Parameter],
    as_trained: AsTrained,
) -> bool:
    if "fused" not in parameters_of(optimizer_class) or _IMPLEMENTATIONS & set(arguments):
        return False
    try:
        return _is_fused_right(optimizer_class, arguments, trainable, as_trained)
    except (RuntimeError, TypeError, ValueError):  # what is wrong beside `fused` shows when the real one is built
        return False


def _is_fused_right(
    optimizer_class: type[Optimizer],
    arguments: Mapping[str, Any],
    trainable: Iterable[nn.Parameter],
    as_trained: AsTrained,
) -> bool:
    """Try a fused step on a few numbers of each device and type that the parameters have, beside an ordinary one.

    Torch 2.13's fused SGD leaves bfloat16 and float16 weights on a CPU as they are, and says nothing.
    """
    trainable = list(trainable)
    is_mixed = len({mesh_of(parameter) for parameter in trainable}) > 1  # of which each kind has a step of its own
    makes = (as_trained, torch.clone) if is_mixed else (as_trained,)

    def step(make: AsTrained, device: torch.device, dtype: torch.dtype, *, fused: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(make(torch.zeros(_TRIED, device=device, dtype=dtype)))
        weight.grad = torch.ones_like(weight)
        optimizer_class([weight], **{**arguments, "fused": fused}).step()
        return make_whole(weight.detach())

    found = {(parameter.device, parameter.dtype) for parameter in trainable if not parameter.is_meta}
    kinds = [(make, *kind) for make in makes for kind in found]
    return all(torch.allclose(step(*kind, fused=True), step(*kind, fused=False), rtol=0.02, atol=0) for kind in kinds)
