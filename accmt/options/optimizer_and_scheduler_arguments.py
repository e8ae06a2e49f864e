"""Arguments of optimizers and schedulers, checked against the signatures they are for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_origin

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accmt.errors import nearest
from accmt.libraries.versions import without_tensors
from accmt.options.checks import is_number, is_off, whole
from accmt.options.optimizer_and_scheduler_names import is_listed, name_of
from accmt.options.yaml_reader import Fault, KeyPath, describe
from accmt.registry import addon

GROUPING = ("groups", "no_decay", "layer_decay")
"""The keys of `optim` that are not optimizer arguments, but about groups of parameters."""

SELECTORS = ("match", "kind", "type")
"""The keys of a group that are not arguments of its optimizer."""

COMPUTED = frozenset({"last_epoch", "num_training_steps", "total_steps", "epochs", "steps_per_epoch"})
"""Scheduler arguments that depend on the run: accmt sets them, users cannot."""

FILLED_IF_MISSING = frozenset({"num_warmup_steps", "T_max"})
"""Scheduler arguments that accmt sets if the user does not."""

_WARM_UP = ("warmup_ratio", "num_warmup_steps")
_SYNONYMS = {"learning_rate": "lr"}


def split_grouping(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the optimizer arguments and the grouping keys of `optim`."""
    arguments = {name: value for name, value in values.items() if name not in GROUPING}
    return arguments, {name: values[name] for name in GROUPING if not is_off(values.get(name))}


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
    return type(optimizer)([parameter], **{name: value for name, value in group.items() if name in names})


def optimizer_arguments(optimizer_class: type[torch.optim.Optimizer], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's arguments for an optimizer, without those about groups.

    transformers' Adafactor computes its own learning rate by default and then rejects `lr`: setting `lr` turns that
    off.
    """
    arguments, _ = split_grouping(values)
    if name_of(optimizer_class) == "Adafactor" and arguments.get("lr") is not None:
        return {"relative_step": False, **arguments}
    return arguments


def check_optimizer(
    optimizer_class: type[torch.optim.Optimizer], values: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Fault]]:
    """Return the arguments, including groups, in the types of the optimizer's signature, and their errors."""
    plain, about_groups = split_grouping(values)
    arguments, faults = check_arguments(("optim",), optimizer_class, plain)
    if about_groups:
        _, group_faults = addon("read_grouping")(optimizer_class, values)
        faults += group_faults
    return {**arguments, **about_groups}, faults


def standard_rate(optimizer_class: Any) -> float | None:
    """Return the default learning rate of an optimizer."""
    parameter = parameters_of(optimizer_class).get("lr")
    rate = None if parameter is None else parameter.default
    return rate if isinstance(rate, int | float) else None


def check_arguments(
    path: KeyPath,
    optimizer_class: type[torch.optim.Optimizer],
    values: Mapping[str, Any],
    beside: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], list[Fault]]:
    """Return arguments in the types of the signature, and their errors; `beside` are further arguments of the call."""
    beside = beside or {}
    arguments, faults = _Call(path, optimizer_class).check(values, known=beside)
    if faults or not is_listed(optimizer_class):
        return arguments, faults
    # Build the optimizer for one weight, to find values that it rejects.
    refusal = _refusal(optimizer_class, {**beside, **arguments})
    if refusal is None or (beside and _refusal(optimizer_class, beside) is not None):  # then the error is in those
        return arguments, []
    got, do = describe(dict(arguments)), f"correct `{'.'.join(map(str, path))}`"
    for name, value in arguments.items():
        rest = {key: arguments[key] for key in arguments if key != name}
        if _refusal(optimizer_class, {**beside, **rest}) is None:
            path, got, do = (*path, name), describe(value), f"correct `{name}`"
            break
    return arguments, [Fault(path, got, f"a value that {name_of(optimizer_class)} accepts: {refusal}", do)]


def check_scheduler(factory: Callable[..., Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """Return the arguments in the types of the scheduler's signature, warm-up as written, and their errors."""
    call = _Call(("scheduler",), factory)
    if watches_a_result(factory):
        return _check_plateau(call, values)
    warmup = {name: whole(values[name]) for name in _WARM_UP if values.get(name) not in (None, 0)}
    others = {name: value for name, value in values.items() if name not in _WARM_UP}
    if "num_warmup_steps" not in call.parameters:
        return call.check({**others, **warmup})
    arguments, faults = call.check(others)
    if len(warmup) == len(_WARM_UP):
        got = ", ".join(f"{name} = {value!r}" for name, value in warmup.items())
        do = "keep one: remove `num_warmup_steps` or `warmup_ratio`"
        faults.insert(0, Fault(("scheduler", "num_warmup_steps"), got, "one of them", do))
        return {**warmup, **arguments}, faults
    for name, value in warmup.items():
        is_positive = is_number(value) and value > 0
        if name == "warmup_ratio" and not (is_positive and value <= 1):
            expected, do = "a number from 0 to 1, the fraction of all steps", "write `warmup_ratio: 0.1`"
            faults.insert(0, Fault(("scheduler", name), describe(value), expected, do))
        elif name == "num_warmup_steps" and not (is_positive and (isinstance(value, int) or value < 1)):
            expected, do = "a whole number of steps, at least 0", "write `num_warmup_steps: 100`"
            faults.insert(0, Fault(("scheduler", name), describe(value), expected, do))
    return {**warmup, **arguments}, faults


def _check_plateau(call: _Call, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    arguments, faults = call.check({name: value for name, value in values.items() if name != "monitor"})
    if "monitor" not in values:
        return arguments, faults
    monitor = values["monitor"]
    if not isinstance(monitor, str) or not monitor:
        expected = "the name of a metric, as in model_saving but without best_, or valid_loss"
        faults.append(Fault(("scheduler", "monitor"), describe(monitor), expected, "write `monitor: accuracy`"))
    return {"monitor": monitor, **arguments}, faults


def watches_a_result(factory: Any) -> bool:
    """Return whether a scheduler depends on an evaluation result, its `monitor`."""
    return isinstance(factory, type) and issubclass(factory, ReduceLROnPlateau)


def unknown_argument(path: KeyPath, value: Any, expected: str, names: Sequence[str]) -> Fault:
    """Return the error about an argument that is not among `names`, with the nearest of them."""
    name = str(path[-1])
    synonym = _SYNONYMS.get(name)
    meant = synonym if synonym in names else nearest(name, names)
    do = f"write `{meant}`" if meant else f"remove `{name}`"
    return Fault(path, f"{name} = {describe(value)}", expected, do)


class _Call:
    """A future call of an optimizer or scheduler with the user's arguments."""

    def __init__(self, path: KeyPath, factory: Callable[..., Any]) -> None:
        self.path = path
        self.name = name_of(factory)
        parameters = parameters_of(factory)
        kinds = {parameter.kind for parameter in parameters.values()}
        self.takes_anything = inspect.Parameter.VAR_KEYWORD in kinds
        variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        self.parameters = {name: item for name, item in parameters.items() if item.kind not in variadic}
        extra = {"warmup_ratio"} if "num_warmup_steps" in parameters else set()
        self.names = sorted((set(self.parameters) | extra) - COMPUTED)

    def check(self, values: Mapping[str, Any], known: Iterable[str] = ()) -> tuple[dict[str, Any], list[Fault]]:
        """Return `values` in the types of the signature, and an error for each invalid or missing argument."""
        arguments = {}
        for name, value in values.items():
            annotation = annotation_of(self.parameters.get(name))
            if isinstance(value, list) and (annotation is tuple or get_origin(annotation) is tuple):
                arguments[name] = tuple(value)
            elif isinstance(value, float) and not _fits(value, annotation) and _fits(whole(value), annotation):
                arguments[name] = whole(value)
            else:
                arguments[name] = value
        faults = [fault for name, value in arguments.items() if (fault := self._fault(name, value)) is not None]
        filled = {*values, *known, *COMPUTED, *FILLED_IF_MISSING}
        for name, parameter in self.parameters.items():
            if parameter.default is parameter.empty and name not in filled:
                do = f"add `{name}:` to {'.'.join(map(str, self.path))}"
                faults.append(Fault((*self.path, name), "nothing", f"{self.name} needs {name}", do))
        return arguments, faults

    def _fault(self, name: str, value: Any) -> Fault | None:
        path = (*self.path, name)
        if name in COMPUTED and name in self.parameters:
            return Fault(path, describe(value), "no value: accmt computes it from the run", f"remove `{name}`")
        if name not in self.parameters and self.takes_anything:
            return None
        if name not in self.parameters:
            beside = GROUPING if self.path == ("optim",) else SELECTORS if self.path[0] == "optim" else ()
            expected = f"an argument of {self.name}: {', '.join(self.names) or 'nothing'}"
            return unknown_argument(path, value, expected, [*self.names, *beside])
        annotation = annotation_of(self.parameters[name])
        if _fits(value, annotation):
            return None
        expected = without_tensors(inspect.formatannotation(annotation))
        is_list = isinstance(value, str) and get_origin(annotation) is tuple
        do = f"write `{name}: [{value}]`" if is_list else f"correct `{name}`"
        return Fault(path, describe(value), f"{expected} ({self.name}'s signature)", do)


def annotation_of(parameter: inspect.Parameter | None) -> Any:
    """Return the annotated type of an argument, or the type of its default."""
    if parameter is None or isinstance(parameter.annotation, str):
        return Any
    if parameter.annotation is not parameter.empty:
        return parameter.annotation
    if parameter.name == "lr":
        return float | None
    default_type = type(parameter.default)
    return {int: float}.get(default_type, default_type) if default_type in (int, float, bool, tuple) else Any


def _fits(value: Any, annotation: Any) -> bool:
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    try:
        TypeAdapter(annotation, config=config).validate_python(value)
    except ValidationError:
        return False
    return True


def _refusal(optimizer_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> str | None:
    weight = torch.nn.Parameter(torch.zeros(1, 1))
    try:
        optimizer_class([weight], **optimizer_arguments(optimizer_class, arguments))
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        return str(error)
    return None
