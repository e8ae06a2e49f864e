"""Arguments of optimizers and schedulers, checked against the signatures they are for."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias, get_args, get_origin

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accmt.errors import describe_value, nearest
from accmt.libraries.versions import without_tensors
from accmt.options.checks import (
    NOTHING,
    Expected,
    KeyFault,
    KeyPath,
    Range,
    find_faults,
    is_off,
    make_shape,
    shape_of,
    whole,
)
from accmt.options.optimizer_and_scheduler_names import is_listed, name_of
from accmt.registry import addon

ArgumentsAndFaults: TypeAlias = tuple[dict[str, Any], list[KeyFault]]
"""Arguments in the types of a signature, and what is wrong with them."""

GROUPING = ("groups", "no_decay", "layer_decay")
"""The keys of `optim` that are not optimizer arguments, but about groups of parameters."""

SELECTORS = ("match", "kind", "type")
"""The keys of a group that are not arguments of its optimizer."""

COMPUTED = frozenset({"last_epoch", "num_training_steps", "total_steps", "epochs", "steps_per_epoch"})
"""Scheduler arguments that depend on the run: accmt sets them, users cannot."""

FILLED_IF_MISSING = frozenset({"num_warmup_steps", "T_max"})
"""Scheduler arguments that accmt sets if the user does not."""

_SYNONYMS = {"learning_rate": "lr"}


def split_grouping(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the optimizer arguments and the grouping keys of `optim`."""
    arguments, grouping = dict(values), {}
    for name in GROUPING:
        value = arguments.pop(name, None)
        if not is_off(value):
            grouping[name] = value
    return arguments, grouping


def parameters_of(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of an optimizer or scheduler without the first one: the weights, or the optimizer."""
    try:
        signature = inspect.signature(factory, eval_str=True)
    except NameError:  # an annotation that exists only for type checkers
        signature = inspect.signature(factory)
    return dict(list(signature.parameters.items())[1:])


def weights_of(optimizer: Any) -> list[torch.nn.Parameter]:
    """Return all parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def members_of(optimizer: Any) -> tuple[Any, ...]:
    """Return the optimizers that a `ChainedOptimizer` chains, or the only one."""
    return tuple(getattr(optimizer, "optimizers", (optimizer,)))


def state_of(optimizer: Any) -> Mapping[Any, Any]:
    """Return the state by parameter; one around another optimizer may have none."""
    state: Mapping[Any, Any] = getattr(optimizer, "state", {})
    return state


def build_alike(optimizer: Any, group: Mapping[str, Any], parameter: torch.nn.Parameter) -> Any:
    """Return a new optimizer of the same class for one parameter, with a group's arguments, to try a step.

    The optimizer itself is not touched: it may wrap others, and share their state and groups with them.

    Raises:
        TypeError: Its class is built from something else, such as another optimizer.
    """
    names = parameters_of(type(optimizer))
    # A group has entries that are no arguments, such as `initial_lr` of a scheduler.
    arguments = {name: value for name, value in group.items() if name in names}
    return type(optimizer)([parameter], **arguments)


def optimizer_arguments(optimizer_class: type[torch.optim.Optimizer], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's arguments for an optimizer, without those about groups.

    transformers' Adafactor computes its own learning rate by default and then rejects `lr`: setting `lr` turns that
    off.
    """
    arguments, _ = split_grouping(values)
    if name_of(optimizer_class) == "Adafactor" and arguments.get("lr") is not None:
        return {"relative_step": False, **arguments}
    return arguments


def check_optimizer(optimizer_class: type[torch.optim.Optimizer], values: Mapping[str, Any]) -> ArgumentsAndFaults:
    """Return the arguments, including groups, in the types of the optimizer's signature, and their errors."""
    plain, about_groups = split_grouping(values)
    arguments, faults = check_arguments(("optim",), optimizer_class, plain)
    # Groups and their patterns are an add-on, which most runs do not load.
    if about_groups:
        _, group_faults = addon("read_grouping")(optimizer_class, values)
        faults += group_faults
    return {**arguments, **about_groups}, faults


def standard_rate(optimizer_class: Any) -> float | None:
    """Return the default learning rate of an optimizer."""
    parameter = parameters_of(optimizer_class).get("lr")
    # Without a default, it is the class `Parameter.empty`.
    if parameter is None or not isinstance(parameter.default, int | float):
        return None
    return parameter.default


def check_arguments(
    path: KeyPath,
    optimizer_class: type[torch.optim.Optimizer],
    values: Mapping[str, Any],
    beside: Mapping[str, Any] | None = None,
) -> ArgumentsAndFaults:
    """Return arguments in the types of the signature, and their errors; `beside` are further arguments of the call."""
    beside = beside or {}
    arguments, faults = _check_call(path, optimizer_class, values, known=beside)
    # A class of the user's may do anything when it is built, such as open a file.
    if faults or not is_listed(optimizer_class):
        return arguments, faults
    # Build the optimizer for one weight, to find values that it rejects.
    refusal = _refusal(optimizer_class, {**beside, **arguments})
    if refusal is None or (beside and _refusal(optimizer_class, beside) is not None):  # then the error is in those
        return arguments, []
    name_of_class = name_of(optimizer_class)
    expected = f"a value that {name_of_class} accepts: {refusal}"
    for name, value in arguments.items():
        remaining = {key: arguments[key] for key in arguments if key != name}
        if _refusal(optimizer_class, {**beside, **remaining}) is None:
            do = _advise(name, parameters_of(optimizer_class)[name].default)
            return arguments, [KeyFault((*path, name), describe_value(value), expected, do)]
    do = f"begin with `type: {name_of_class}` alone, and add arguments"
    return arguments, [KeyFault(path, describe_value(dict(arguments)), expected, do)]


@dataclass(frozen=True)
class _WarmUp:
    """The arguments about warm-up; accmt computes the number of steps from the ratio."""

    warmup_ratio: Annotated[
        Annotated[float, Range(ge=0, le=1)], Expected("a number from 0 to 1, the fraction of all steps", "0.1")
    ] = 0
    num_warmup_steps: Annotated[
        Annotated[int, Range(ge=0)] | Annotated[float, Range(gt=0, lt=1)],
        Expected("a whole number of steps, at least 0", "100"),
    ] = 0


@dataclass(frozen=True)
class _Monitor:
    """The argument of a scheduler that watches an evaluation result."""

    monitor: Annotated[
        str, Expected("the name of a metric, as in model_saving but without best_, or valid_loss", "accuracy")
    ] = ""


def check_scheduler(factory: Callable[..., Any], values: Mapping[str, Any]) -> ArgumentsAndFaults:
    """Return the arguments in the types of the scheduler's signature, warm-up as written, and their errors."""
    path = ("scheduler",)
    about_run: dict[str, Any] = {}
    arguments = dict(values)
    if watches_a_result(factory):
        shape = shape_of(_Monitor)
        for name in shape.hints:
            if name in arguments:
                about_run[name] = arguments.pop(name)
    else:
        shape = shape_of(_WarmUp)
        for name in shape.hints:
            steps = whole(arguments.pop(name, None))
            # 0 means no warm-up; False and True are mistakes.
            if steps not in (None, 0) or isinstance(steps, bool):
                about_run[name] = steps
        # CosineAnnealingLR and others of torch know no warm-up: the arguments are reported as unknown.
        if "num_warmup_steps" not in parameters_of(factory):
            return _check_call(path, factory, {**arguments, **about_run})
    arguments, faults = _check_call(path, factory, arguments)
    # Either alone decides the length of the warm-up.
    if len(about_run) == 2:
        got = ", ".join(f"{name} = {value!r}" for name, value in about_run.items())
        do = "keep one: remove `num_warmup_steps` or `warmup_ratio`"
        faults.insert(0, KeyFault((*path, "num_warmup_steps"), got, "one of them", do))
    else:
        for fault in find_faults(shape, about_run, lambda name, example: f"write `{name}: {example}`"):
            faults.insert(0, replace(fault, path=(*path, *fault.path)))
    return {**about_run, **arguments}, faults


def watches_a_result(factory: Any) -> bool:
    """Return whether a scheduler depends on an evaluation result, its `monitor`."""
    return isinstance(factory, type) and issubclass(factory, ReduceLROnPlateau)


def unknown_argument(path: KeyPath, value: Any, expected: str, names: Sequence[str]) -> KeyFault:
    """Return the error about an argument that is not among `names`, with the nearest of them."""
    name = str(path[-1])
    meant = _SYNONYMS.get(name)
    if meant not in names:
        meant = nearest(name, names)
    do = f"write `{meant}`" if meant else f"remove `{name}`"
    return KeyFault(path, f"{name} = {describe_value(value)}", expected, do)


def _check_call(
    path: KeyPath, factory: Callable[..., Any], values: Mapping[str, Any], known: Iterable[str] = ()
) -> ArgumentsAndFaults:
    """Check the arguments of a future call.

    Args:
        path: Where the arguments are.
        factory: The optimizer or scheduler.
        values: The arguments.
        known: Further arguments of the call.

    Returns:
        `values` in the types of the signature, and an error for each invalid or missing argument.
    """
    name_of_factory, parameters = name_of(factory), parameters_of(factory)
    # A class that takes **kwargs may pass them on: nothing is unknown to it.
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments, faults = dict(values), []
    hints, defaults = {}, {}
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        hint = annotation_of(parameter)
        # The run knows its number of steps, also after a resume with other settings.
        if name in COMPUTED:
            if name in values:
                got, expected = describe_value(arguments.pop(name)), "no value: accmt computes it from the run"
                faults.append(KeyFault((*path, name), got, expected, f"remove `{name}`"))
            continue
        text = f"{without_tensors(inspect.formatannotation(hint))} ({name_of_factory}'s signature)"
        if name in arguments:
            arguments[name] = _as_annotated(arguments[name], hint)
        else:
            hint = Any  # an annotation that pydantic cannot read is no error of a call without that argument
        hints[name] = Annotated[hint, Expected(text, "")]
        if parameter.default is not parameter.empty or name in {*known, *FILLED_IF_MISSING}:
            defaults[name] = parameter.default

    def advise(name: str, example: str) -> str:
        value = arguments.get(name)
        if isinstance(value, str) and "," in value:  # a flag such as --hps.optim.betas=0.8,0.9
            return f"write `{name}: [{value}]`"
        return _advise(name, parameters[name].default)

    shape = make_shape(name_of_factory, hints, defaults, is_open=is_open)
    for fault in find_faults(shape, arguments, advise, str):
        name = str(fault.path[0])
        at = (*path, name)
        if name not in hints:
            known_names = {*hints}
            if "num_warmup_steps" in hints:
                known_names.add("warmup_ratio")
            names = sorted(known_names)
            expected = f"an argument of {name_of_factory}: {', '.join(names) or 'nothing'}"
            if path[0] == "optim":
                names += GROUPING if path == ("optim",) else SELECTORS
            faults.append(unknown_argument(at, arguments[name], expected, names))
        elif fault.got == NOTHING:
            faults.append(KeyFault(at, NOTHING, f"{name_of_factory} needs {name}", fault.do))
        else:
            faults.append(replace(fault, path=at))
    return {name: arguments.get(name, value) for name, value in values.items()}, faults


def _as_annotated(value: Any, annotation: Any) -> Any:
    """Return a list as a tuple, and a float without a fraction as an int, where the annotation asks for those."""
    # YAML has no tuples, and the signatures of torch ask for them.
    if isinstance(value, list) and (annotation is tuple or get_origin(annotation) is tuple):
        return tuple(value)
    kinds = get_args(annotation) or (annotation,)
    return whole(value) if int in kinds and float not in kinds else value


_EXAMPLES = {"step_size": 10, "milestones": [10, 20], "gamma": 0.9, "base_lr": 1e-4, "max_lr": 1e-3, "T_0": 10}
"""Values of arguments that have no default."""


def _advise(name: str, default: Any) -> str:
    """Return what to do about a wrong or missing argument: write its default, or an example."""
    example = _EXAMPLES.get(name) if default is inspect.Parameter.empty else default
    if isinstance(example, bool | int | float | str | list | tuple):
        return f"write `{name}: {json.dumps(example)}`"
    if example is None:
        return f"remove `{name}`"
    return f"correct `{name}`"


def annotation_of(parameter: inspect.Parameter | None) -> Any:
    """Return the annotated type of an argument, or the type of its default."""
    # An annotation for type checkers alone cannot be checked.
    if parameter is None or isinstance(parameter.annotation, str):
        return Any
    if parameter.annotation is not parameter.empty:
        return parameter.annotation
    # torch annotates it differently in its classes, and an int is a valid rate.
    if parameter.name == "lr":
        return float | None
    default_type = type(parameter.default)
    # `factor=1` does not mean that fractions are wrong.
    if default_type is int:
        return float
    if default_type in (float, bool, tuple):
        return default_type
    return Any


def _refusal(optimizer_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> str | None:
    weight = torch.nn.Parameter(torch.zeros(1, 1))
    try:
        optimizer_class([weight], **optimizer_arguments(optimizer_class, arguments))
    # What the constructors of torch's optimizers raise for values out of range.
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        return str(error)
    return None
