"""Builds the optimizer, with fused kernels where they work, and chains several."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain, product
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from accmt.errors import ArgumentError, HyperParameterError, ModuleContractError, fail
from accmt.options import HyperParameters
from accmt.options.optimizer_and_scheduler_arguments import (
    optimizer_arguments,
    parameters_of,
    split_grouping,
)
from accmt.registry import addon
from accmt.sharded_tensors import by_mesh, make_whole, mesh_of

# ---- Several optimizers that behave as one


class ChainedOptimizer(Optimizer):
    """Several optimizers over different parameters that behave as one.

    One `step` steps them all; one scheduler, one gradient clipping and one state apply to all their groups. The chained
    optimizers and this one share the groups (the same dicts) and the state.

    Args:
        optimizers: Optimizers of different parameters. Groups added later go to the first.

    Raises:
        ArgumentError: The list is empty, two optimizers share a parameter, or one overrides `state_dict`.

    Examples:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> muon = torch.optim.Muon([model[0].weight], lr=0.02)
        >>> adam = torch.optim.AdamW([model[0].bias, *model[1].parameters()], lr=1e-3)
        >>> [group["lr"] for group in ChainedOptimizer([adam, muon]).param_groups]
        [0.001, 0.02]
    """

    is_mixed = False
    """Whether parameters are sharded over several groups of processes, or only some are."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._chained = list(optimizers)
        where = "ChainedOptimizer(optimizers=...)"
        if not self._chained or not all(isinstance(optimizer, Optimizer) for optimizer in self._chained):
            got, expected = repr(self._chained), "at least one torch optimizer"
            raise fail(ArgumentError, where, got=got, expected=expected, do="[adamw, muon]")
        self._owners: list[int] = []
        groups: list[dict[str, Any]] = []
        for number, optimizer in enumerate(self._chained):
            self._owners += [number] * len(optimizer.param_groups)
            groups += optimizer.param_groups
            # Its own `state_dict` would not see the shared state. That of bitsandbytes only packs entries for FSDP1.
            kind = type(optimizer)
            if kind.state_dict is not Optimizer.state_dict and not kind.__module__.startswith("bitsandbytes."):
                got = f"{kind.__name__}, which overrides `state_dict`"
                do = "use it for all parameters or for none"
                raise fail(ArgumentError, where, got=got, expected="optimizers with torch's state_dict", do=do)
        parameters = list(chain.from_iterable(group["params"] for group in groups))
        if len(set(parameters)) < len(parameters):  # both would step it, and share its state
            got, expected = "two optimizers for one parameter", "each parameter in one optimizer"
            raise fail(ArgumentError, where, got=got, expected=expected, do="remove it from the others")
        super().__init__(groups, {})
        for optimizer in self._chained:
            self.state.update(optimizer.state)
        first = groups[0]
        self.defaults = {}
        if "lr" in first:  # what polynomial decay is relative to
            self.defaults["lr"] = first["lr"]
        self._share()
        addon("separate_states")(self)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The chained optimizers."""
        return tuple(self._chained)

    @property
    def class_names(self) -> str:
        """The names of the chained optimizers: `AdamW + Muon`."""
        return " + ".join(type(optimizer).__qualname__ for optimizer in self._chained)

    def class_name_of(self, number: int) -> str:
        """Return the class name of a parameter group's optimizer."""
        return type(self._chained[self._owners[number]]).__qualname__

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step all optimizers.

        Args:
            closure: Must be None: several optimizers cannot each evaluate the loss.
        """
        if closure is not None:
            raise fail(
                ArgumentError, "ChainedOptimizer.step", got="a closure", expected="no closure", do="step one optimizer"
            )
        self._share()
        for optimizer in self._chained:
            with mesh_by_mesh(optimizer) if self.is_mixed else nullcontext():
                optimizer.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the first optimizer."""
        if len(self.param_groups) < len(self._owners):  # during construction
            super().add_param_group(param_group)
            return
        self._share()
        first = self._chained[0]
        first.add_param_group(param_group)
        super().add_param_group(first.param_groups[-1])
        self._owners.append(0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state and share it: schedulers and manual steps use the chained optimizers directly.

        Each of them adds entries that are missing in states of older versions.
        """
        super().__setstate__(state)
        for number, optimizer in enumerate(self._chained):
            optimizer.__setstate__({"state": self.state, "param_groups": self._groups_of(number)})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_chained": self._chained, "_owners": self._owners}

    def _share(self) -> None:
        """Set this optimizer's state and groups on the chained ones; loading a state replaces both."""
        for number, optimizer in enumerate(self._chained):
            optimizer.state, optimizer.param_groups = self.state, self._groups_of(number)

    def _groups_of(self, number: int) -> list[dict[str, Any]]:
        # Strict: if a script appends to `param_groups` instead of calling `add_param_group`, the owner is unknown.
        return [group for group, owner in zip(self.param_groups, self._owners, strict=True) if owner == number]


@contextmanager
def mesh_by_mesh(optimizer: Optimizer) -> Iterator[None]:
    """Step fused optimizers separately for each device mesh of sharded parameters.

    A kernel accepts either plain tensors or those of one mesh (torch 2.13: "got mixed torch.Tensor and DTensor").
    """
    groups = optimizer.param_groups
    split_groups: list[dict[str, Any]] = []
    for group in groups:
        if group.get("fused"):
            split_groups += [{**group, "params": parameters} for (parameters,) in by_mesh(group["params"])]
        else:  # other optimizers may store state in a group, which a copy would lose
            split_groups.append(group)
    optimizer.param_groups = split_groups
    try:
        yield
    finally:
        optimizer.param_groups = groups


_TRIED = 67  # elements: some full vectors of a CPU's kernels, and a remainder
_IMPLEMENTATIONS = frozenset({"fused", "foreach", "differentiable", "capturable"})


AsTrained = Callable[[torch.Tensor], torch.Tensor]


def needs_closure(optimizer: Any) -> bool:
    """Return whether an optimizer evaluates the loss itself, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def build_optimizer(hps: HyperParameters, model: nn.Module, *, as_trained: AsTrained = torch.clone) -> Optimizer:
    """Build the optimizer of `hps` over the parameters of a model, or several chained optimizers.

    It gets all parameters, including frozen ones: the optimizer skips those without a gradient, and trains them once
    they are unfrozen. `fused=True` is set if the class, the devices and the dtypes allow it and `hps` does not choose
    an implementation.

    Args:
        hps: The hyper-parameters.
        model: The model.
        as_trained: Converts a tensor to the kind of the parameters, if they are sharded later.

    Raises:
        ModuleContractError: No parameter requires gradients.
        HyperParameterError: The optimizer rejects its arguments or the parameters, or the groups do not match them.
    """
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):  # all layers frozen: the loss would never change
        raise fail(
            ModuleContractError,
            "the parameters to optimize",
            got=f"{len(parameters)} parameters, none with requires_grad=True",
            expected="at least one trainable parameter",
            do="unfreeze part of the model, or override get_optimizer",
        )
    if split_grouping(hps.optim_kwargs)[1]:
        grouped: Optimizer = addon("build_grouped_optimizer")(hps, model, as_trained)
        return grouped
    return make_optimizer(hps.optimizer_class, parameters, hps.optim_kwargs, as_trained, hps.where("optim"))


def make_optimizer(
    optimizer_class: type[Optimizer],
    parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
    settings: Mapping[str, Any],
    as_trained: AsTrained,
    where: str,
) -> Optimizer:
    arguments = optimizer_arguments(optimizer_class, settings)
    trainable: list[nn.Parameter] = []
    for entry in parameters:
        members = entry["params"] if isinstance(entry, dict) else [entry]
        trainable += [parameter for parameter in members if parameter.requires_grad]
    if "fused" in parameters_of(optimizer_class) and not _IMPLEMENTATIONS & set(arguments):
        # Errors of a trial show up when the real optimizer is built.
        with suppress(RuntimeError, TypeError, ValueError):
            if _is_fused_right(optimizer_class, arguments, trainable, as_trained):
                arguments["fused"] = True
    try:
        return optimizer_class(parameters, **arguments)
    except (TypeError, ValueError, AssertionError) as error:
        name = optimizer_class.__name__
        do = (
            "correct the arguments, choose another optimizer, use it for some parameters only (`groups`), or override "
            "get_optimizer"
        )
        if optimizer_class is torch.optim.Muon and "2D" in str(error):
            do = "use it for matrices only: `type: AdamW` and `groups: [{kind: matrix, type: Muon, lr: 0.02}]`"
        expected = f"arguments and parameters accepted by {name}"
        raise fail(HyperParameterError, where, got=f"{name}: {error}", expected=expected, do=do) from error


def _is_fused_right(
    optimizer_class: type[Optimizer],
    arguments: Mapping[str, Any],
    trainable: Sequence[nn.Parameter],
    as_trained: AsTrained,
) -> bool:
    """Compare fused steps with standard ones on a few numbers, for each device and dtype of the parameters.

    The second weight has its first gradient after the other, like one that is unfrozen. In torch 2.13, fused SGD with
    momentum then raises a TypeError, and fused SGD silently leaves bfloat16 and float16 weights on a CPU unchanged.
    """
    makes = [as_trained]
    if len(set(map(mesh_of, trainable))) > 1:  # plain and sharded parameters, which have separate steps
        makes.append(torch.clone)

    def step(make: AsTrained, device: torch.device, dtype: torch.dtype, *, fused: bool) -> torch.Tensor:
        weights = [nn.Parameter(make(torch.zeros(_TRIED, device=device, dtype=dtype))) for _ in range(2)]
        optimizer = optimizer_class(weights, **{**arguments, "fused": fused})
        for weight in weights:
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return torch.stack([make_whole(weight.detach()) for weight in weights])

    kinds = {(parameter.device, parameter.dtype) for parameter in trainable if not parameter.is_meta}
    for make, (device, dtype) in product(makes, kinds):
        fused, standard = step(make, device, dtype, fused=True), step(make, device, dtype, fused=False)
        if not torch.allclose(fused, standard, rtol=0.02, atol=0):
            return False
    return True
