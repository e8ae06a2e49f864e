"""Arguments of optimizers and schedulers, held against the signature of what will be called with them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_origin

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accmt.errors import nearest
from accmt.libraries.versions import without_tensors
from accmt.options.checks import is_number, whole
from accmt.options.grouping import (
    GROUPING,
    SELECTORS,
    Group,
    Grouping,
    group_entries,
    own_arguments,
    read_kinds,
    read_layer_decay,
    read_patterns,
    split_grouping,
)
from accmt.options.optimizer_and_scheduler_names import find_optimizer, name_of
from accmt.options.yaml_reader import Fault, KeyPath, describe

COMPUTED = frozenset({"last_epoch", "num_training_steps", "total_steps", "epochs", "steps_per_epoch"})
"""Arguments of schedulers that only the run knows: accmt fills them in, and nobody else may."""

FILLED_IF_MISSING = frozenset({"num_warmup_steps", "T_max"})
"""Arguments of schedulers that accmt fills in where the user did not."""

_SYNONYMS = {"learning_rate": "lr"}
_RATES_OF_SCHEDULERS = ("max_lr", "base_lr", "eta_min", "min_lr")


def parameters_of(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of an optimizer class or scheduler, without the first: the weights, or the optimizer."""
    try:
        signature = inspect.signature(factory, eval_str=True)
    except NameError:  # an annotation that exists for type checkers only
        signature = inspect.signature(factory)
    return dict(list(signature.parameters.items())[1:])


def optimizer_arguments(optimizer_class: type[torch.optim.Optimizer], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments to call an optimizer with, from those that the user wrote, groups left aside.

    transformers' Adafactor finds its own learning rate by default, and rejects one beside it; whoever
    writes `lr` means that one.
    """
    arguments, _ = split_grouping(values)
    if name_of(optimizer_class) == "Adafactor" and arguments.get("lr") is not None:
        return {"relative_step": False, **arguments}
    return arguments


def check_optimizer(
    optimizer_class: type[torch.optim.Optimizer], values: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Fault]]:
    """Return the arguments as the optimizer takes them, groups among them, and all that is wrong with them."""
    own, about_groups = split_grouping(values)
    arguments, faults = _check_call(("optim",), optimizer_class, own)
    _, group_faults = read_grouping(optimizer_class, values)
    return {**arguments, **about_groups}, [*faults, *group_faults]


def read_grouping(
    optimizer_class: type[torch.optim.Optimizer], values: Mapping[str, Any]
) -> tuple[Grouping, list[Fault]]:
    """Return how `groups`, `no_decay` and `layer_decay` put parameters into groups, and all that is wrong with them."""
    defaults, about_groups = split_grouping(values)
    faults: list[Fault] = []
    read: dict[str, Any] = {}
    if "groups" in about_groups:
        entries = group_entries(("optim", "groups"), about_groups["groups"], faults)
        read["groups"] = tuple(_read_group(path, entry, optimizer_class, defaults, faults) for path, entry in entries)
    if "no_decay" in about_groups:
        path = ("optim", "no_decay")
        read["no_decay"] = read_kinds(path, about_groups["no_decay"], faults)
        if "weight_decay" not in parameters_of(optimizer_class):
            got = f"no_decay for {name_of(optimizer_class)}, which takes no weight_decay"
            faults.append(Fault(path, got, "an optimizer that decays weights", "remove `no_decay`"))
    if "layer_decay" in about_groups:
        read["layer_decay"] = read_layer_decay(("optim", "layer_decay"), about_groups["layer_decay"], faults)
    grouping = Grouping(**read)
    if _finds_its_rate(optimizer_class, defaults):
        faults += _rates_without_use(optimizer_class, grouping)
    return grouping, faults


def _finds_its_rate(optimizer_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> bool:
    """Return whether an optimizer takes no learning rate, as transformers' Adafactor without `lr`."""
    is_able = "relative_step" in parameters_of(optimizer_class) and standard_rate(optimizer_class) is None
    return is_able and arguments.get("lr") is None and arguments.get("relative_step", True) is not False


def _rates_without_use(optimizer_class: type[torch.optim.Optimizer], grouping: Grouping) -> Iterator[Fault]:
    paths: list[KeyPath] = [("optim", "layer_decay")] if grouping.layer_decay != 1 else []
    for number, group in enumerate(grouping.groups):
        own = group.arguments
        if group.optimizer_class is None and "lr" in own and own.get("relative_step", True) is not False:
            paths.append(("optim", "groups", number, "lr"))
    for path in paths:
        got = f"{path[-1]}, and {name_of(optimizer_class)} without `lr`, which finds its own learning rate"
        yield Fault(path, got, "a learning rate that it belongs to", "add `lr:` to optim")


def check_rates(
    optimizer_class: type[torch.optim.Optimizer],
    values: Mapping[str, Any],
    scheduler: Callable[..., Any] | None,
    of_scheduler: Mapping[str, Any],
) -> Iterator[Fault]:
    """Yield a fault where every learning rate is 0 and no scheduler raises it: nothing would be trained."""
    if scheduler is not None and scheduler.__module__.partition(".")[0] not in ("torch", "transformers"):
        return  # nobody knows which rates it sets
    grouping, _ = read_grouping(optimizer_class, values)
    default = values.get("lr", standard_rate(optimizer_class))
    rates = [default]
    for group in grouping.groups:
        otherwise = default if group.optimizer_class is None else standard_rate(group.optimizer_class)
        rates.append(group.arguments.get("lr", otherwise))
    if all(rate == 0 for rate in rates) and not any(of_scheduler.get(name) for name in _RATES_OF_SCHEDULERS):
        got = f"0{', and so in every group' if grouping.groups else ''}: nothing would be trained"
        yield Fault(("optim", "lr"), got, "a learning rate above 0", "write `lr: 1e-3`, say")


def standard_rate(optimizer_class: Any) -> float | None:
    """Return the learning rate that an optimizer has where none is written."""
    parameter = parameters_of(optimizer_class).get("lr")
    rate = None if parameter is None else parameter.default
    return rate if isinstance(rate, int | float) else None


def _read_group(
    path: KeyPath,
    entry: Mapping[str, Any],
    default_class: type[torch.optim.Optimizer],
    defaults: Mapping[str, Any],
    faults: list[Fault],
) -> Group:
    """Return one entry of `groups`; without a `type`, its arguments are those of the optimizer of all the rest."""
    match = read_patterns((*path, "match"), entry["match"], faults) if "match" in entry else ()
    kinds = read_kinds((*path, "kind"), entry["kind"], faults) if "kind" in entry else ()
    own = own_arguments(entry)
    if "type" not in entry:
        arguments, wrong = _check_call(path, default_class, own, beside=defaults)
        faults += wrong
        return Group(match, kinds, None, arguments)
    found = find_optimizer(entry["type"])
    if isinstance(found, Fault):
        faults.append(Fault((*path, "type"), found.got, found.expected, found.do))
        return Group(match, kinds, None, own)
    arguments, wrong = _check_call(path, found, own)
    faults += wrong
    return Group(match, kinds, found, arguments)


def _check_call(
    path: KeyPath,
    optimizer_class: type[torch.optim.Optimizer],
    values: Mapping[str, Any],
    beside: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], list[Fault]]:
    """Return arguments in the types of the signature, and all that is wrong with them; `beside` are known as well."""
    call = _Call(path, optimizer_class)
    beside = beside or {}
    arguments, faults = call.check(values, known=beside)
    if not faults and optimizer_class.__module__.startswith(("torch.", "transformers.")):
        faults = list(_trial(call, optimizer_class, arguments, beside))
    return arguments, faults


def check_scheduler(factory: Callable[..., Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """Return the arguments as the scheduler takes them, warm-up as the user wrote it, and all that is wrong."""
    if watches_a_result(factory):
        return _check_plateau(factory, values)
    call = _Call(("scheduler",), factory)
    warmup = {name: whole(values[name]) for name in ("warmup_ratio", "num_warmup_steps") if name in values}
    if "num_warmup_steps" not in call.parameters or not warmup:
        return call.check(values)
    rest = {name: value for name, value in values.items() if name not in warmup}
    arguments, faults = call.check(rest)
    return {**warmup, **arguments}, [*_warmup_faults(warmup), *faults]


def watches_a_result(factory: Any) -> bool:
    """Return whether a scheduler steps by a result of evaluations, which its `monitor` names."""
    return isinstance(factory, type) and issubclass(factory, ReduceLROnPlateau)


def _check_plateau(factory: Callable[..., Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    monitor, rest = values.get("monitor"), {name: value for name, value in values.items() if name != "monitor"}
    arguments, faults = _Call(("scheduler",), factory).check(rest)
    if "monitor" not in values:
        if arguments.get("mode") == "max" and not faults:
            got = "max, for the validation loss: the rate would be cut each time the loss improves"
            expected = "the direction of what is watched"
            do = "add `monitor: accuracy`, say, to watch a metric, or remove `mode`"
            faults = [Fault(("scheduler", "mode"), got, expected, do)]
        return arguments, faults
    if not isinstance(monitor, str) or not monitor:
        expected = "the name of a metric, as in model_saving without its best_, or valid_loss"
        faults = [*faults, Fault(("scheduler", "monitor"), describe(monitor), expected, "write `monitor: accuracy`")]
    return {"monitor": monitor, **arguments}, faults


def check_names(part: str, factories: Iterable[Callable[..., Any]], values: Mapping[str, Any]) -> list[Fault]:
    """Return a fault for each argument that no optimizer or scheduler has, where nobody knows which one was meant.

    Args:
        part: "optim" or "scheduler".
        factories: All of them.
        values: The arguments.
    """
    names = sorted({name for factory in factories for name in _Call((part,), factory).names})
    names += GROUPING if part == "optim" else ()
    expected = f"an argument of {'an optimizer' if part == 'optim' else 'a scheduler'}"
    unknown = [name for name in values if name not in names]
    return [_no_argument((part, name), values[name], expected, names) for name in unknown]


def _no_argument(path: KeyPath, value: Any, expected: str, names: Sequence[str]) -> Fault:
    name = str(path[-1])
    synonym = _SYNONYMS.get(name)
    meant = synonym if synonym in names else nearest(name, names)
    do = f"write `{meant}`" if meant else f"remove `{name}`"
    return Fault(path, f"{name} = {describe(value)}", expected, do)


class _Call:
    """A call that will be made with the user's arguments."""

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

    @property
    def where(self) -> str:
        """The place of the call in the hyper-parameters."""
        return ".".join(map(str, self.path))

    def check(self, values: Mapping[str, Any], known: Iterable[str] = ()) -> tuple[dict[str, Any], list[Fault]]:
        """Return `values` in the types of the signature, and a fault for each argument that is wrong or missing."""
        arguments = {name: self._convert(name, value) for name, value in values.items()}
        faults = [self._fault(name, value) for name, value in arguments.items()]
        return arguments, [*filter(None, faults), *self._missing({*values, *known})]

    def _convert(self, name: str, value: Any) -> Any:
        annotation = annotation_of(self.parameters.get(name))
        if isinstance(value, list) and (annotation is tuple or get_origin(annotation) is tuple):
            return tuple(value)
        if isinstance(value, float) and not _fits(value, annotation) and _fits(whole(value), annotation):
            return whole(value)
        return value

    def _fault(self, name: str, value: Any) -> Fault | None:
        path = (*self.path, name)
        if name in COMPUTED and name in self.parameters:
            return Fault(path, describe(value), "nothing: accmt computes it from the run", f"remove `{name}`")
        if name not in self.parameters:
            return None if self.takes_anything else self._unknown(name, value)
        annotation = annotation_of(self.parameters[name])
        if _fits(value, annotation):
            return None
        expected = without_tensors(inspect.formatannotation(annotation))
        do = f"write `{name}: [{value}]`" if isinstance(value, str) and "," in value else f"correct `{name}`"
        return Fault(path, describe(value), f"{expected} ({self.name}'s signature)", do)

    def _unknown(self, name: str, value: Any) -> Fault:
        beside = GROUPING if self.path == ("optim",) else SELECTORS if self.path[0] == "optim" else ()
        expected = f"an argument of {self.name}: {', '.join(self.names) or 'nothing'}"
        return _no_argument((*self.path, name), value, expected, [*self.names, *beside])

    def _missing(self, values: Iterable[str]) -> Iterable[Fault]:
        for name, parameter in self.parameters.items():
            is_filled = name in COMPUTED or name in FILLED_IF_MISSING or name in values
            if parameter.default is parameter.empty and not is_filled:
                yield Fault(
                    (*self.path, name), "nothing", f"{self.name} needs {name}", f"add `{name}:` to {self.where}"
                )


def annotation_of(parameter: inspect.Parameter | None) -> Any:
    """Return the type of an argument; where none is written, that of its default."""
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


def fits_as_written(value: Any, annotation: Any) -> bool:
    """Return whether a value of a YAML file has a type; what YAML cannot write, such as a tuple, is taken from a list.

    Objects from Python, types that pydantic does not know, and names that are patterns (such as
    "pissa_niter_[number of iters]") are left to who takes them.
    """
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

    is_pattern = isinstance(value, str) and "[number" in str(annotation)
    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
        text = json.dumps(value)
    except (TypeError, PydanticUserError, NameError):
        return True
    try:
        adapter.validate_json(text)
    except ValidationError:
        return is_pattern
    return True


def _warmup_faults(warmup: Mapping[str, Any]) -> Iterable[Fault]:
    if len(warmup) == 2:
        got = ", ".join(f"{name} = {value!r}" for name, value in warmup.items())
        do = "keep one: remove `num_warmup_steps` or `warmup_ratio`"
        yield Fault(("scheduler", "num_warmup_steps"), got, "one of the two", do)
        return
    ((name, value),) = warmup.items()
    if name == "warmup_ratio" and not (is_number(value) and 0 <= value <= 1):
        do = "write `warmup_ratio: 0.1`, or `num_warmup_steps:` for a number of steps"
        yield Fault(("scheduler", name), describe(value), "a number from 0 to 1, the part of all steps", do)
    if name == "num_warmup_steps" and not (is_number(value) and value >= 0 and (isinstance(value, int) or value < 1)):
        do = "write `num_warmup_steps: 100`, or `warmup_ratio: 0.1`"
        yield Fault(("scheduler", name), describe(value), "a whole number of steps from 0", do)


def _trial(
    call: _Call,
    optimizer_class: type[torch.optim.Optimizer],
    arguments: Mapping[str, Any],
    beside: Mapping[str, Any],
) -> Iterable[Fault]:
    """Build the optimizer over one number, so that a value that it rejects is known now; find whose value it is."""
    refusal = _refusal(optimizer_class, {**beside, **arguments})
    if refusal is None or (beside and _refusal(optimizer_class, beside) is not None):  # which is said of those
        return
    others = {name: {key: arguments[key] for key in arguments if key != name} for name in arguments}
    culprit = next((name for name in arguments if _refusal(optimizer_class, {**beside, **others[name]}) is None), None)
    path = call.path if culprit is None else (*call.path, culprit)
    got = describe(dict(arguments) if culprit is None else arguments[culprit])
    yield Fault(path, got, f"what {call.name} accepts: {refusal}", f"correct `{culprit or call.where}`")


def _refusal(optimizer_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> str | None:
    weight = torch.nn.Parameter(torch.zeros(1, 1))
    try:
        optimizer_class([weight], **optimizer_arguments(optimizer_class, arguments))
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        return str(error)
    return None
