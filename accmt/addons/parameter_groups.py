"""Groups of parameters with separate arguments or optimizers: `groups`, `no_decay` and `layer_decay` in `optim`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from accmt.errors import HyperParameterError, describe_value, fail
from accmt.messages import warn_once
from accmt.optimization.optimizers import AsTrained, ChainedOptimizer, make_optimizer
from accmt.options import HyperParameters
from accmt.options.checks import KeyFault, KeyPath
from accmt.options.optimizer_and_scheduler_arguments import (
    SELECTORS,
    check_arguments,
    parameters_of,
    split_grouping,
)
from accmt.options.optimizer_and_scheduler_names import find_optimizer, name_of
from accmt.options.yaml_reader import names_like, suggest

# ---- Reading the keys


KINDS = ("adapter", "bias", "embedding", "matrix", "norm")
"""Kinds of parameters that a group can select."""

_GROUP = "a mapping with `match` or `kind`, and arguments or a `type`"
_EXAMPLE = "groups: [{kind: norm, weight_decay: 0}]"


@dataclass(frozen=True)
class Group:
    """Parameters with separate optimizer arguments, or a separate optimizer.

    Attributes:
        match: Regular expressions; a parameter is in the group if one of them matches in its name. Empty: any name.
        kinds: Kinds of parameters in the group. Empty: any kind.
        optimizer_class: The optimizer of the group; None uses that of the ungrouped parameters.
        arguments: Optimizer arguments that the group sets.
    """

    match: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    optimizer_class: type[Optimizer] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Grouping:
    """How parameters are split into groups; a parameter belongs to the first group that matches it.

    Attributes:
        groups: The groups, in order.
        no_decay: Kinds of parameters with a `weight_decay` of 0, in any group.
        layer_decay: Factor on the learning rate for each layer towards the input. 1 has no effect.
    """

    groups: tuple[Group, ...] = ()
    no_decay: tuple[str, ...] = ()
    layer_decay: float = 1.0

    def __bool__(self) -> bool:
        return self != Grouping()


def read_kinds(path: KeyPath, value: Any, faults: list[KeyFault]) -> tuple[str, ...]:
    """Return the kinds in a string or list."""
    kinds = _words(value)
    for kind in kinds if kinds is not None else [value]:
        if kind not in KINDS:
            do = suggest(str(kind), KINDS, "name one of them, or write a regular expression as `match`")
            faults.append(KeyFault(path, describe_value(kind), f"one of {', '.join(KINDS)}, or a list of them", do))
    return tuple(kinds or ())


def read_patterns(path: KeyPath, value: Any, faults: list[KeyFault]) -> tuple[str, ...]:
    """Return the regular expressions in a string or list."""
    patterns = _words(value)
    if patterns is None:
        expected = "a regular expression that is searched in parameter names, or a list of them"
        faults.append(KeyFault(path, describe_value(value), expected, rf"write `{path[-1]}: classifier\.`"))
    for pattern in patterns or ():
        try:
            re.compile(pattern)
        except re.error as error:
            expected = "a regular expression"
            faults.append(KeyFault(path, f"{pattern!r}: {error}", expected, r"put a backslash before . ( ) [ ] * + ?"))
    return tuple(patterns or ())


def read_layer_decay(path: KeyPath, value: Any, faults: list[KeyFault]) -> float:
    """Return the factor between the learning rates of adjacent layers."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        faults.append(KeyFault(path, describe_value(value), "a number above 0, up to 1", "write `layer_decay: 0.9`"))
        return 1.0
    return float(value)


def group_entries(path: KeyPath, value: Any, faults: list[KeyFault]) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Yield each valid entry of `groups` with its path; invalid ones are added to `faults`."""
    if isinstance(value, Mapping):  # a single group
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str):
        faults.append(KeyFault(path, describe_value(value), "a list of groups", f"write `{_EXAMPLE}`"))
        return
    for number, entry in enumerate(value):
        at = (*path, number)
        if not isinstance(entry, Mapping) or not {"match", "kind"} & entry.keys():
            faults.append(KeyFault(at, describe_value(entry), _GROUP, f"write `{_EXAMPLE}`"))
        elif not entry.keys() - {"match", "kind"}:
            expected = "an optimizer argument, or a `type`"
            faults.append(
                KeyFault(at, describe_value(dict(entry)), expected, "add one, such as `lr`, or remove the group")
            )
        else:
            yield at, {str(key): item for key, item in entry.items()}


def _words(value: Any) -> list[str] | None:
    items = [value] if isinstance(value, str) else value
    is_list = isinstance(items, list | tuple) and len(items) > 0 and all(isinstance(item, str) for item in items)
    return list(items) if is_list else None


def read_grouping(optimizer_class: type[Optimizer], values: Mapping[str, Any]) -> tuple[Grouping, list[KeyFault]]:
    """Return the parameter grouping by `groups`, `no_decay` and `layer_decay`, and its errors."""
    defaults, about_groups = split_grouping(values)
    faults: list[KeyFault] = []
    read: dict[str, Any] = {}
    if "groups" in about_groups:
        entries = group_entries(("optim", "groups"), about_groups["groups"], faults)
        read["groups"] = tuple(_read_group(path, entry, optimizer_class, defaults, faults) for path, entry in entries)
    if "no_decay" in about_groups:
        path = ("optim", "no_decay")
        read["no_decay"] = read_kinds(path, about_groups["no_decay"], faults)
        if "weight_decay" not in parameters_of(optimizer_class):
            del read["no_decay"]
            message = f"optim.no_decay has no effect: {name_of(optimizer_class)} has no weight_decay"
            warn_once(message, about="no_decay")
    if "layer_decay" in about_groups:
        read["layer_decay"] = read_layer_decay(("optim", "layer_decay"), about_groups["layer_decay"], faults)
    return Grouping(**read), faults


def _read_group(
    path: KeyPath,
    entry: Mapping[str, Any],
    default_class: type[Optimizer],
    defaults: Mapping[str, Any],
    faults: list[KeyFault],
) -> Group:
    """Return one entry of `groups`; without a `type`, its arguments are for the optimizer of the other parameters."""
    match = read_patterns((*path, "match"), entry["match"], faults) if "match" in entry else ()
    kinds = read_kinds((*path, "kind"), entry["kind"], faults) if "kind" in entry else ()
    own = {name: value for name, value in entry.items() if name not in SELECTORS}
    if "type" not in entry:
        arguments, wrong = check_arguments(path, default_class, own, beside=defaults)
        faults += wrong
        return Group(match, kinds, None, arguments)
    found = find_optimizer(entry["type"])
    if isinstance(found, KeyFault):
        faults.append(KeyFault((*path, "type"), found.got, found.expected, found.do))
        return Group(match, kinds, None, own)
    arguments, wrong = check_arguments(path, found, own)
    faults += wrong
    return Group(match, kinds, found, arguments)


# ---- Building the optimizers


def build_grouped_optimizer(hps: HyperParameters, model: nn.Module, as_trained: AsTrained) -> Optimizer:
    """Build the optimizer of hyper-parameters with groups, or several chained optimizers; as `build_optimizer`."""
    grouping, _ = read_grouping(hps.optimizer_class, hps.optim_kwargs)
    if not grouping:
        parameters = list(model.parameters())
        return make_optimizer(hps.optimizer_class, parameters, hps.optim_kwargs, as_trained, hps.where("optim"))
    # The default optimizer has the groups without a type; each other group has one of its own.
    assigned = assign(model, grouping, hps)
    default_parts = [part for parts in assigned for part in parts if part.optimizer_class is None]
    optimizers = [_build_grouped(hps.optimizer_class, default_parts, hps.optim_kwargs, as_trained, hps.where("optim"))]
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
    optimizer = make_optimizer(optimizer_class, groups, arguments, as_trained, where)
    strange = {name for part in parts for name in part.arguments if name not in optimizer.defaults}
    if strange:
        got = f"{', '.join(sorted(strange))}, which {optimizer_class.__name__} does not support per group"
        do = "move it to `optim`, or set a `type` for the group"
        raise fail(HyperParameterError, where, got=got, expected="arguments that can differ between groups", do=do)
    for group, part in zip(optimizer.param_groups, parts, strict=True):
        group["name"] = part.label
        if group["lr"] is not None:
            group["lr"] = group["lr"] * part.rate
            group["initial_lr"] = float(group["lr"])  # as a number: some optimizers convert the rate to a tensor
    return optimizer


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
        raise fail(HyperParameterError, hps.where(*_GROUPS), got=got, expected="one optimizer for a tied weight", do=do)
    return min((number for number in by_name.values() if number), default=0)


def _fits(group: Group, name: str, kinds: set[str]) -> bool:
    is_named = not group.match or any(re.search(pattern, name) for pattern in group.match)
    return is_named and (not group.kinds or not kinds.isdisjoint(group.kinds))


def _unused(
    chosen: Mapping[nn.Parameter, int],
    names: Mapping[nn.Parameter, list[str]],
    grouping: Grouping,
) -> Iterator[KeyFault]:
    """Yield an error for each unused pattern and group."""
    every = [name for several in names.values() for name in several]
    for number, group in enumerate(grouping.groups):
        place = (*_GROUPS, number)
        unknown = [pattern for pattern in group.match if not any(re.search(pattern, name) for name in every)]
        for pattern in unknown:
            do = f"correct it; similar names: {', '.join(names_like(pattern, every))}"
            got = f"{pattern!r}, which matches no parameter name"
            yield KeyFault((*place, "match"), got, "part of a parameter name of the model", do)
        if not unknown and number + 1 not in chosen.values():
            got = f"{_label(group)}: no parameter of the model that an earlier group does not have"
            do = "remove the group, or move it up: the first group that matches a parameter gets it"
            yield KeyFault(place, got, "a group with at least one parameter", do)


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
    raise fail(HyperParameterError, where, got=got, expected=expected, do=do)


def _stacks(module: nn.Module, path: str) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    for name, child in module.named_children():
        inner = f"{path}.{name}".removeprefix(".")
        if isinstance(child, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(layer) for layer in child if next(layer.parameters(), None) is not None)
            if len(child) > 1 and len(kinds) == 1 and kinds.total() == len(child):
                yield inner, child
                continue
        yield from _stacks(child, inner)
