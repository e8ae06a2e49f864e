"""Builds the optimizer, with fused kernels where they work, and with groups of parameters."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from accmt.errors import ArgumentError, HyperParameterError, ModuleContractError, explain
from accmt.options import HyperParameters
from accmt.options.optimizer_and_scheduler_arguments import (
    Group,
    Grouping,
    optimizer_arguments,
    parameters_of,
    read_grouping,
)
from accmt.options.yaml_reader import Fault, KeyPath, names_like
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
        if not self._chained or not all(isinstance(one, Optimizer) for one in self._chained):
            raise ArgumentError(explain(where, repr(self._chained), "at least one torch optimizer", "[adamw, muon]"))
        parameters = [parameter for one in self._chained for group in one.param_groups for parameter in group["params"]]
        if len(set(parameters)) < len(parameters):
            got = "two optimizers for one parameter"
            raise ArgumentError(explain(where, got, "each parameter in one optimizer", "remove it from the others"))
        for kind in (type(one) for one in self._chained):
            # The one of bitsandbytes only packs each parameter's entries for FSDP1.
            if kind.state_dict is not Optimizer.state_dict and not kind.__module__.startswith("bitsandbytes."):
                got = f"{kind.__name__}, which overrides `state_dict`"
                do = "use it for all parameters or for none"
                raise ArgumentError(explain(where, got, "optimizers with torch's state_dict", do))
        self._owners = [number for number, one in enumerate(self._chained) for _ in one.param_groups]
        super().__init__([group for one in self._chained for group in one.param_groups], {})
        for one in self._chained:
            self.state.update(one.state)
        first = self._chained[0].param_groups[0]
        self.defaults = {"lr": first["lr"]} if "lr" in first else {}  # what polynomial decay is relative to
        self._share()

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The chained optimizers."""
        return tuple(self._chained)

    @property
    def class_names(self) -> str:
        """The names of the chained optimizers: `AdamW + Muon`."""
        return " + ".join(type(one).__qualname__ for one in self._chained)

    def class_name_of(self, number: int) -> str:
        """Return the class name of a parameter group's optimizer."""
        return type(self._chained[self._owners[number]]).__qualname__

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step all optimizers.

        Args:
            closure: Must be None: several optimizers cannot each evaluate the loss.
        """
        if closure is not None:
            raise ArgumentError(explain("ChainedOptimizer.step", "a closure", "no closure", "step one optimizer"))
        self._share()
        for one in self._chained:
            with mesh_by_mesh(one) if self.is_mixed else nullcontext():
                one.step()

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
        for number, one in enumerate(self._chained):
            one.__setstate__({"state": self.state, "param_groups": self._groups_of(number)})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_chained": self._chained, "_owners": self._owners}

    def __repr__(self) -> str:
        return f"ChainedOptimizer([{', '.join(map(repr, self._chained))}])"

    def _share(self) -> None:
        """Set this optimizer's state and groups on the chained ones; loading a state replaces both."""
        for number, one in enumerate(self._chained):
            one.state, one.param_groups = self.state, self._groups_of(number)

    def _groups_of(self, number: int) -> list[dict[str, Any]]:
        if len(self.param_groups) != len(self._owners):
            got = f"{len(self.param_groups)} parameter groups instead of {len(self._owners)}"
            do = "modify the groups in place, or call add_param_group"
            raise ArgumentError(explain("ChainedOptimizer.param_groups", got, "the groups of its optimizers", do))
        return [group for group, owner in zip(self.param_groups, self._owners, strict=True) if owner == number]


@contextmanager
def mesh_by_mesh(optimizer: Optimizer) -> Iterator[None]:
    """Step fused optimizers separately for each device mesh of sharded parameters.

    A kernel accepts either plain tensors or those of one mesh (torch 2.13: "got mixed torch.Tensor and DTensor").
    """
    groups = optimizer.param_groups
    parts: list[dict[str, Any]] = []
    for group in groups:
        if group.get("fused"):
            parts += [{**group, "params": parameters} for (parameters,) in by_mesh(group["params"])]
        else:  # other optimizers may store state in a group
            parts.append(group)
    optimizer.param_groups = parts
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
    if not any(parameter.requires_grad for parameter in parameters):
        message = explain(
            "the parameters to optimize",
            f"{len(parameters)} parameters, none with requires_grad=True",
            "at least one trainable parameter",
            "unfreeze part of the model, or override get_optimizer",
        )
        raise ModuleContractError(message)
    grouping, _ = read_grouping(hps.optimizer_class, hps.optim_kwargs)
    if not grouping:
        return _build(hps.optimizer_class, parameters, hps.optim_kwargs, as_trained, hps.where("optim"))
    # The default optimizer has the groups without a type; each other group has one of its own.
    assigned = assign(model, grouping, hps)
    mine = [part for parts in assigned for part in parts if part.optimizer_class is None]
    optimizers = [_build_grouped(hps.optimizer_class, mine, hps.optim_kwargs, as_trained, hps.where("optim"))]
    for number, (group, parts) in enumerate(zip(grouping.groups, assigned[1:], strict=True)):
        if group.optimizer_class is not None:
            where = hps.where("optim", "groups", number)
            optimizers.append(_build_grouped(group.optimizer_class, parts, group.arguments, as_trained, where))
    return optimizers[0] if len(optimizers) == 1 else ChainedOptimizer(optimizers)


def _build_grouped(
    optimizer_class: type[Optimizer],
    parts: Sequence[Assigned],
    arguments: Mapping[str, Any],
    as_trained: AsTrained,
    where: str,
) -> Optimizer:
    """Build an optimizer with a parameter group for each part, each with a `name` and an `initial_lr`."""
    groups = [{"params": list(part.parameters.values()), **part.arguments} for part in parts]
    optimizer = _build(optimizer_class, groups, arguments, as_trained, where)
    strange = {name for part in parts for name in part.arguments if name not in optimizer.defaults}
    if strange:
        got = f"{', '.join(sorted(strange))}, which {optimizer_class.__name__} does not support per group"
        do = "move it to `optim`, or set a `type` for the group"
        raise HyperParameterError(explain(where, got, "arguments that can differ between groups", do))
    for group, part in zip(optimizer.param_groups, parts, strict=True):
        group["name"] = part.label
        if group["lr"] is not None:
            group["lr"] = group["lr"] * part.rate
            group["initial_lr"] = float(group["lr"])  # as a number: some optimizers convert the rate to a tensor
    return optimizer


def _build(
    optimizer_class: type[Optimizer],
    parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
    written: Mapping[str, Any],
    as_trained: AsTrained,
    where: str,
) -> Optimizer:
    arguments = optimizer_arguments(optimizer_class, written)
    several = (one["params"] if isinstance(one, dict) else [one] for one in parameters)
    trainable = [parameter for some in several for parameter in some if parameter.requires_grad]
    if "fused" in parameters_of(optimizer_class) and not _IMPLEMENTATIONS & set(arguments):
        # Errors of a trial show up when the real optimizer is built.
        with suppress(RuntimeError, TypeError, ValueError):
            if _is_fused_right(optimizer_class, arguments, trainable, as_trained):
                arguments["fused"] = True
    try:
        return optimizer_class(parameters, **arguments)
    except (TypeError, ValueError, AssertionError) as error:
        name = optimizer_class.__name__
        do = "correct the arguments, choose another optimizer, use it for some parameters only (`groups`), or override "
        do += "get_optimizer"
        if optimizer_class is torch.optim.Muon and "2D" in str(error):
            do = "use it for matrices only: `type: AdamW` in `optim` with "
            do += "`groups: [{kind: matrix, type: Muon, lr: 0.02}]`"
        expected = f"arguments and parameters accepted by {name}"
        raise HyperParameterError(explain(where, f"{name}: {error}", expected, do)) from error


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
    is_mixed = len({mesh_of(parameter) for parameter in trainable}) > 1  # each kind has a separate step
    makes = (as_trained, torch.clone) if is_mixed else (as_trained,)

    def step(make: AsTrained, device: torch.device, dtype: torch.dtype, *, fused: bool) -> torch.Tensor:
        weights = [nn.Parameter(make(torch.zeros(_TRIED, device=device, dtype=dtype))) for _ in range(2)]
        optimizer = optimizer_class(weights, **{**arguments, "fused": fused})
        for weight in weights:
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return torch.stack([make_whole(weight.detach()) for weight in weights])

    found = {(parameter.device, parameter.dtype) for parameter in trainable if not parameter.is_meta}
    kinds = [(make, *kind) for make in makes for kind in found]
    return all(torch.allclose(step(*kind, fused=True), step(*kind, fused=False), rtol=0.02, atol=0) for kind in kinds)


# ---- Kinds of parameters: bias, norm, embedding, matrix, adapter


_NORM_NAMES = re.compile(r"layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of norms, as in transformers' Trainer.

Source: `Trainer.get_decay_parameter_names` in transformers/trainer.py.
"""


def kinds_of(model: nn.Module) -> dict[nn.Parameter, set[str]]:
    """Return the kinds of each parameter.

    - "bias": its name contains "bias";
    - "norm": its module is a norm by class or by name, as in transformers' Trainer;
    - "embedding": in an `nn.Embedding`, or tied to one;
    - "adapter": added by PEFT, or trained along with an adapter (`modules_to_save`);
    - "matrix": two-dimensional, and neither an embedding nor the output layer of a language model.
    """
    kinds: dict[nn.Parameter, set[str]] = {parameter: set() for parameter in model.parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        lower = name.lower()
        kinds[parameter] |= {"bias"} if "bias" in lower else set()
        kinds[parameter] |= {"norm"} if _NORM_NAMES.search(lower) else set()
    for path, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if "norm" in type(module).__name__.lower():
            _note("norm", own, kinds)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _note("embedding", own, kinds)
        # What PEFT added: named parts of its layers, prompts, and copied modules.
        for name in getattr(module, "adapter_layer_names", ()):
            part = getattr(module, name, None)
            if isinstance(part, nn.Module):
                _note("adapter", part.parameters(), kinds)
        if path.rpartition(".")[2] in ("modules_to_save", "prompt_encoder"):
            _note("adapter", module.parameters(), kinds)
    find_output_layer = getattr(model, "get_output_embeddings", None)
    output_layer = find_output_layer() if callable(find_output_layer) else None
    outputs = set(output_layer.parameters()) if isinstance(output_layer, nn.Module) else set[nn.Parameter]()
    for parameter, found in kinds.items():
        if parameter.dim() == 2 and "embedding" not in found and parameter not in outputs:
            found.add("matrix")
    return kinds


def _note(kind: str, parameters: Iterable[nn.Parameter], kinds: dict[nn.Parameter, set[str]]) -> None:
    for parameter in parameters:
        kinds[parameter].add(kind)


_GROUPS: KeyPath = ("optim", "groups")


@dataclass
class Assigned:
    """Parameters that share their optimizer and its arguments.

    Attributes:
        label: A description of the group: `default`, or the patterns it matches.
        optimizer_class: Its optimizer; None means the default one.
        arguments: Arguments that differ from the optimizer's.
        parameters: The parameters by name.
        rate: A factor for the learning rate.
    """

    label: str
    optimizer_class: type[Optimizer] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    rate: float = 1.0


def assign(model: nn.Module, grouping: Grouping, hps: HyperParameters) -> list[list[Assigned]]:
    """Put every parameter of a model, including frozen ones, into a group.

    Args:
        model: The model.
        grouping: The requested groups.
        hps: The hyper-parameters, for messages.

    Returns:
        For the default and then for each of `grouping.groups`, its parts after `no_decay` and `layer_decay`.

    Raises:
        HyperParameterError: A group matches nothing, nothing is left for the default group, a tied weight has two
            optimizers, or the layers of the model cannot be identified.
    """
    kinds = kinds_of(model)
    names = _names(model)
    chosen = {parameter: _choose(parameter, names[parameter], kinds, grouping, hps) for parameter in kinds}
    faults = [*_unused(chosen, names, grouping)]
    if faults:
        raise hps.reject(faults)
    depth = _rates(model, grouping.layer_decay, hps)
    heads = [Assigned("default"), *(Assigned(_label(one), one.optimizer_class) for one in grouping.groups)]
    parts: list[dict[tuple[bool, float], Assigned]] = [{} for _ in heads]
    for parameter, number in chosen.items():
        is_spared = bool(kinds[parameter] & set(grouping.no_decay))
        rate, head = depth.get(parameter, 1.0), heads[number]
        if (is_spared, rate) not in parts[number]:
            own = {} if number == 0 else dict(grouping.groups[number - 1].arguments)
            label = f"{head.label}, no decay" if is_spared else head.label
            arguments = {**own, "weight_decay": 0.0} if is_spared else own
            parts[number][is_spared, rate] = Assigned(label, head.optimizer_class, arguments, {}, rate)
        parts[number][is_spared, rate].parameters[names[parameter][0]] = parameter
    return [sorted(part.values(), key=lambda one: ("no decay" in one.label, -one.rate)) for part in parts]


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the names of each parameter without the prefix of `torch.compile`; tied parameters have several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name.replace("_orig_mod.", ""))
    return names


def _choose(
    parameter: nn.Parameter,
    names: Sequence[str],
    kinds: Mapping[nn.Parameter, set[str]],
    grouping: Grouping,
    hps: HyperParameters,
) -> int:
    """Return the number of the first matching group, from 1; 0 is the default."""
    by_name = {
        name: next((i for i, group in enumerate(grouping.groups, 1) if _fits(group, name, kinds[parameter])), 0)
        for name in names
    }
    classes = {number and grouping.groups[number - 1].optimizer_class for number in by_name.values()}
    if len(classes - {0}) > 1:
        got = f"two optimizers for one parameter with the names {' and '.join(names)}"
        do = "match both names in one group"
        raise HyperParameterError(explain(hps.where(*_GROUPS), got, "one optimizer for a tied weight", do))
    return min((number for number in by_name.values() if number), default=0)


def _fits(group: Group, name: str, kinds: set[str]) -> bool:
    is_named = not group.match or any(re.search(pattern, name) for pattern in group.match)
    return is_named and (not group.kinds or not kinds.isdisjoint(group.kinds))


def _unused(
    chosen: Mapping[nn.Parameter, int],
    names: Mapping[nn.Parameter, list[str]],
    grouping: Grouping,
) -> Iterator[Fault]:
    """Yield an error for each unused pattern and group."""
    every = [name for several in names.values() for name in several]
    for number, group in enumerate(grouping.groups):
        place = (*_GROUPS, number)
        unknown = [pattern for pattern in group.match if not any(re.search(pattern, name) for name in every)]
        for pattern in unknown:
            do = f"correct it; similar names: {', '.join(names_like(pattern, every))}"
            got = f"{pattern!r}, which matches no parameter name"
            yield Fault((*place, "match"), got, "part of a parameter name of the model", do)
        if not unknown and number + 1 not in chosen.values():
            got = f"{_label(group)}: no parameter of the model that an earlier group does not have"
            do = "remove the group, or move it up: the first group that matches a parameter gets it"
            yield Fault(place, got, "a group with at least one parameter", do)


def _label(group: Group) -> str:
    return " in ".join(filter(None, (" or ".join(group.kinds), " or ".join(group.match))))


def _rates(model: nn.Module, decay: float, hps: HyperParameters) -> dict[nn.Parameter, float]:
    """Return the learning-rate factor of each parameter, which decreases with the distance from the output.

    Parameters before the stack of layers (embeddings) count as one layer below the first; those after it (the head)
    keep the rate. This is the rule of ELECTRA and of timm's `layer_decay`.

    Source:
        Clark et al., https://arxiv.org/abs/2003.10555, appendix A.
    """
    if decay == 1:
        return {}
    path, stack = _stack(model, hps)
    rates: dict[nn.Parameter, float] = {}
    is_before = True
    for name, parameter in model.named_parameters():
        if name.startswith(f"{path}."):
            is_before = False
            rates[parameter] = decay ** (len(stack) - int(name[len(path) + 1 :].split(".")[0]))
        else:
            rates[parameter] = decay ** (len(stack) + 1) if is_before else 1.0
    return rates


def _stack(model: nn.Module, hps: HyperParameters) -> tuple[str, nn.ModuleList | nn.Sequential]:
    """Return the only outermost list of modules of one class with parameters: the model's layers."""
    found = dict(_stacks(model, ""))
    if len(found) == 1:
        return next(iter(found.items()))
    got = f"a model with {len(found)} lists of layers{': ' if found else ''}{', '.join(found)}"
    do = "remove `layer_decay`, and use `groups` with a rate for each part"
    where, expected = hps.where("optim", "layer_decay"), "one list of consecutive layers"
    raise HyperParameterError(explain(where, got, expected, do))


def _stacks(module: nn.Module, path: str) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    for name, child in module.named_children():
        inner = f"{path}.{name}".removeprefix(".")
        if isinstance(child, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(layer) for layer in child if next(layer.parameters(), None) is not None)
            if len(child) > 1 and len(kinds) == 1 and kinds.total() == len(child):
                yield inner, child
                continue
        yield from _stacks(child, inner)
