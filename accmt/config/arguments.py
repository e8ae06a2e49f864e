"""Arguments of optimizers and schedulers, held against the signature of what will be called with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_origin

import torch

from accmt.config.faults import Fault, describe, nearest
from accmt.config.numbers import whole
from accmt.config.optimizer_names import name_of
from accmt.libraries.versions import without_tensors

COMPUTED = frozenset({"last_epoch", "num_training_steps", "total_steps", "epochs", "steps_per_epoch"})
"""Arguments of schedulers that only the run knows: accmt fills them in, and nobody else may."""

FILLED_IF_MISSING = frozenset({"num_warmup_steps", "T_max"})
"""Arguments of schedulers that accmt fills in where the user did not."""

_SYNONYMS = {"learning_rate": "lr"}


def parameters_of(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of an optimizer class or scheduler, without the first: the weights, or the optimizer."""
    try:
        signature = inspect.signature(factory, eval_str=True)
    except NameError:  # an annotation that exists for type checkers only
        signature = inspect.signature(factory)
    return dict(list(signature.parameters.items())[1:])


def optimizer_arguments(optimizer_class: type[torch.optim.Optimizer], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments to call an optimizer with, from those that the user wrote.

    transformers' Adafactor finds its own learning rate by default, and rejects one beside it; whoever
    writes `lr` means that one.
    """
    if name_of(optimizer_class) == "Adafactor" and values.get("lr") is not None:
        return {"relative_step": False, **values}
    return dict(values)


def check_optimizer(
    optimizer_class: type[torch.optim.Optimizer], values: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Fault]]:
    """Return the arguments as the optimizer takes them, and all that is wrong with them."""
    call = _Call("optim", optimizer_class)
    arguments, faults = call.check(values)
    if not faults and optimizer_class.__module__.startswith(("torch.", "transformers.")):
        faults = list(_trial(call, optimizer_class, arguments))
    return arguments, faults


def check_scheduler(factory: Callable[..., Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """Return the arguments as the scheduler takes them, warm-up as the user wrote it, and all that is wrong."""
    call = _Call("scheduler", factory)
    warmup = {name: whole(values[name]) for name in ("warmup_ratio", "num_warmup_steps") if name in values}
    if "num_warmup_steps" not in call.parameters or not warmup:
        return call.check(values)
    rest = {name: value for name, value in values.items() if name not in warmup}
    arguments, faults = call.check(rest)
    return {**warmup, **arguments}, [*_warmup_faults(warmup), *faults]


class _Call:
    """A call that will be made with the user's arguments."""

    def __init__(self, key: str, factory: Callable[..., Any]) -> None:
        self.key = key
        self.name = name_of(factory)
        parameters = parameters_of(factory)
        kinds = {parameter.kind for parameter in parameters.values()}
        self.takes_anything = inspect.Parameter.VAR_KEYWORD in kinds
        variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        self.parameters = {name: item for name, item in parameters.items() if item.kind not in variadic}
        extra = {"warmup_ratio"} if "num_warmup_steps" in parameters else set()
        self.names = sorted((set(self.parameters) | extra) - COMPUTED)

    def check(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
        """Return `values` in the types of the signature, and a fault for each argument that is wrong or missing."""
        arguments = {name: self._convert(name, value) for name, value in values.items()}
        faults = [self._fault(name, value) for name, value in arguments.items()]
        return arguments, [*filter(None, faults), *self._missing(values)]

    def _convert(self, name: str, value: Any) -> Any:
        annotation = _annotation(self.parameters.get(name))
        if isinstance(value, list) and (annotation is tuple or get_origin(annotation) is tuple):
            return tuple(value)
        if isinstance(value, float) and not _fits(value, annotation) and _fits(whole(value), annotation):
            return whole(value)
        return value

    def _fault(self, name: str, value: Any) -> Fault | None:
        path = (self.key, name)
        if name in COMPUTED and name in self.parameters:
            return Fault(path, describe(value), "nothing: accmt computes it from the run", f"remove `{name}`")
        if name not in self.parameters:
            return None if self.takes_anything else self._unknown(name, value)
        annotation = _annotation(self.parameters[name])
        if _fits(value, annotation):
            return None
        expected = without_tensors(inspect.formatannotation(annotation))
        return Fault(path, describe(value), f"{expected} ({self.name}'s signature)", f"correct `{name}`")

    def _unknown(self, name: str, value: Any) -> Fault:
        synonym = _SYNONYMS.get(name)
        meant = synonym if synonym in self.names else nearest(name, self.names)
        do = f"write `{meant}`" if meant else f"remove `{name}`"
        takes = ", ".join(self.names) or "nothing"
        return Fault((self.key, name), f"{name} = {describe(value)}", f"an argument of {self.name}: {takes}", do)

    def _missing(self, values: Iterable[str]) -> Iterable[Fault]:
        for name, parameter in self.parameters.items():
            is_filled = name in COMPUTED or name in FILLED_IF_MISSING or name in values
            if parameter.default is parameter.empty and not is_filled:
                yield Fault((self.key, name), "nothing", f"{self.name} needs {name}", f"add `{name}:` to {self.key}")


def _annotation(parameter: inspect.Parameter | None) -> Any:
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


def _warmup_faults(warmup: Mapping[str, Any]) -> Iterable[Fault]:
    if len(warmup) == 2:
        got = ", ".join(f"{name} = {value!r}" for name, value in warmup.items())
        do = "keep one: remove `num_warmup_steps` or `warmup_ratio`"
        yield Fault(("scheduler", "num_warmup_steps"), got, "one of the two", do)
        return
    ((name, value),) = warmup.items()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "warmup_ratio" and not (is_number and 0 <= value <= 1):
        do = "write `warmup_ratio: 0.1`, or `num_warmup_steps:` for a number of steps"
        yield Fault(("scheduler", name), describe(value), "a number from 0 to 1, the part of all steps", do)
    if name == "num_warmup_steps" and not (is_number and value >= 0 and (isinstance(value, int) or value < 1)):
        do = "write `num_warmup_steps: 100`, or `warmup_ratio: 0.1`"
        yield Fault(("scheduler", name), describe(value), "a whole number of steps from 0", do)


def _trial(call: _Call, optimizer_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> Iterable[Fault]:
    """Build the optimizer over one number, so that a value that it rejects is known now; find whose value it is."""
    refusal = _refusal(optimizer_class, arguments)
    if refusal is None:
        return
    others = {name: {key: arguments[key] for key in arguments if key != name} for name in arguments}
    culprit = next((name for name in arguments if _refusal(optimizer_class, others[name]) is None), None)
    path = (call.key,) if culprit is None else (call.key, culprit)
    got = describe(dict(arguments) if culprit is None else arguments[culprit])
    yield Fault(path, got, f"what {call.name} accepts: {refusal}", f"correct `{culprit or call.key}`")


def _refusal(optimizer_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> str | None:
    weight = torch.nn.Parameter(torch.zeros(1, 1))
    try:
        optimizer_class([weight], **optimizer_arguments(optimizer_class, arguments))
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return None
