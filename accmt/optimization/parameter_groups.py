"""Puts the parameters of a model into groups with separate arguments or optimizers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from accmt.errors import HyperParameterError, explain
from accmt.messages import warn_once
from accmt.options import HyperParameters
from accmt.options.grouping import Group, Grouping
from accmt.options.yaml_reader import Fault, KeyPath, names_like

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
    faults = [*_unused(chosen, names, kinds, grouping)]
    if faults:
        raise hps.reject(faults)
    for number, group in enumerate(grouping.groups, 1):
        if not any(parameter.requires_grad for parameter, own in chosen.items() if own == number):
            where = hps.where(*_GROUPS, number - 1)
            what = f"all parameters of {_label(group)} are frozen, so the group trains nothing until they are unfrozen"
            warn_once(f"{where}: {what}", about=f"frozen parameters of group {number}")
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
    kinds: Mapping[nn.Parameter, set[str]],
    grouping: Grouping,
) -> Iterator[Fault]:
    """Yield an error for each unused pattern and group, and for an empty default group."""
    every = [name for several in names.values() for name in several]
    for number, group in enumerate(grouping.groups):
        place = (*_GROUPS, number)
        unknown = [pattern for pattern in group.match if not any(re.search(pattern, name) for name in every)]
        for pattern in unknown:
            do = f"correct it; similar names: {', '.join(names_like(pattern, every))}"
            got = f"{pattern!r}, which matches no parameter name"
            yield Fault((*place, "match"), got, "part of a parameter name of the model", do)
        if not unknown and number + 1 not in chosen.values():
            fitting = [name for one in chosen for name in names[one] if _fits(group, name, kinds[one])]
            got = f"{_label(group)}: no parameter of the model"
            if fitting:
                got = f"{_label(group)}: earlier groups contain all its parameters, such as {fitting[0]}"
            do = "remove the group, or move it up: the first group that matches a parameter gets it"
            yield Fault(place, got, "a group with at least one parameter", do)
    if grouping.groups and 0 not in chosen.values():
        got = f"groups with all {len(chosen)} parameters, so that none is left for the default optimizer"
        do = "move the arguments of the last group to `optim`, and remove the group"
        yield Fault(_GROUPS, got, "at least one parameter outside the groups", do)


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
