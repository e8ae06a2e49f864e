"""Calls the methods of the user's module: steps with what their signature names, and what makes optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler

from accmt.errors import ModuleContractError, describe_value, fail
from accmt.metrics import Metric, ReportedValue
from accmt.module import AcceleratorModule, defines
from accmt.optimization import ChainedOptimizer, SeveralSchedulers, needs_closure
from accmt.state import TrainingState

STEPS: dict[str, tuple[str, ...]] = {
    "training_step": ("training_step", "step"),
    "validation_step": ("validation_step", "step"),
    "test_step": ("test_step", "validation_step", "step"),
    "predict_step": ("predict_step",),
}
"""Each step with those that stand in its place where it is not defined, in this order."""


def require_optimizer(module: AcceleratorModule, returned: Any) -> Any:
    """Return what `get_optimizer` returned: one optimizer, or several with manual optimization."""
    if hasattr(returned, "param_groups") and hasattr(returned, "step") and not isinstance(returned, type):
        # LBFGS evaluates the loss again, of a batch that automatic optimization has already left.
        if needs_closure(returned) and not module.uses_manual_optimization:
            got = f"{type(returned).__name__}, which evaluates the loss several times in one step (it needs a closure)"
            do = "choose an optimizer that needs one gradient per step, such as torch.optim.AdamW; or derive from "
            do += "ExtendedAcceleratorModule, and call self.optimizer.step(closure) in training_step"
            where = f"{type(module).__name__}.get_optimizer"
            raise fail(ModuleContractError, where, got=got, expected="step() without a closure", do=do)
        return returned
    parts: list[Any] = []
    match returned:
        case dict():
            parts = list(returned.values())
        case list() | tuple():
            parts = list(returned)
    if parts and module.uses_manual_optimization and all(hasattr(part, "param_groups") for part in parts):
        return ChainedOptimizer(parts) if len(parts) > 1 else parts[0]
    do = "def get_optimizer(self): return torch.optim.SGD(self.model.parameters(), lr=0.1), without brackets, and "
    do += f"{_GET_SCHEDULER}; to step several optimizers, derive from ExtendedAcceleratorModule"
    where, expected = f"{type(module).__name__}.get_optimizer", "one torch.optim.Optimizer, or None"
    raise fail(ModuleContractError, where, got=_describe_returned(returned), expected=expected, do=do)


def require_scheduler(module: AcceleratorModule, returned: Any) -> Any:
    """Return what `get_scheduler` returned: one scheduler, or several with manual optimization."""
    if hasattr(returned, "step") and hasattr(returned, "state_dict") and not isinstance(returned, type):
        # transformers and timm have schedulers of their own classes; timm's need the step count in each call.
        if isinstance(returned, LRScheduler) or _accepts(returned.step):
            return returned
        got = f"a {type(returned).__name__}, whose step{inspect.signature(returned.step)} requires arguments"
        do = "wrap it in a class with state_dict and load_state_dict, whose step() calls it with its step count"
        expected = "a scheduler whose step() takes no arguments: it is called after each optimizer step"
        raise fail(ModuleContractError, f"{type(module).__name__}.get_scheduler", got=got, expected=expected, do=do)
    is_several = isinstance(returned, list | tuple) and all(isinstance(part, LRScheduler) for part in returned)
    # Of automatic optimization, only one would be stepped.
    if returned and is_several and module.uses_manual_optimization:
        return SeveralSchedulers(returned) if len(returned) > 1 else returned[0]
    do = f"{_GET_SCHEDULER}; several are one as torch.optim.lr_scheduler.ChainedScheduler(schedulers), and "
    do += "interval='epoch' is `step_scheduler_per_epoch: true` in the hyper-parameters"
    where, expected = f"{type(module).__name__}.get_scheduler", "one torch.optim.lr_scheduler.LRScheduler, or None"
    raise fail(ModuleContractError, where, got=_describe_returned(returned), expected=expected, do=do)


def call_get_scheduler(module: AcceleratorModule, optimizer: torch.optim.Optimizer, named: Mapping[str, int]) -> Any:
    """Call the module's `get_scheduler` with the keywords that its signature names.

    Raises:
        ModuleContractError: It requires other arguments.
    """
    parameters = inspect.signature(module.get_scheduler).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    wanted = {name: value for name, value in named.items() if takes_all or name in parameters}
    # A method with other arguments would raise a TypeError without the name of the module.
    if not _accepts(module.get_scheduler, optimizer, **wanted):
        got = f"get_scheduler{inspect.signature(module.get_scheduler)}"
        expected = "a method that takes the optimizer, and steps_per_epoch and epochs or one of them"
        raise fail(ModuleContractError, type(module).__name__, got=got, expected=expected, do=_GET_SCHEDULER)
    make: Callable[..., Any] = module.get_scheduler
    return make(optimizer, **wanted)


_GET_SCHEDULER = "def get_scheduler(self, optimizer, steps_per_epoch, epochs): return scheduler"


def _describe_returned(value: Any) -> str:
    match value:
        case dict():
            parts = list(value.values())
        case list() | tuple():
            parts = list(value)
        case _:
            return describe_value(value)
    names = ", ".join(type(part).__name__ for part in parts) or "nothing"
    return f"a {type(value).__name__} of {names}"


def reject_module(module: AcceleratorModule, got: str, do: str) -> NoReturn:
    """Raise the error about a module that violates the contract of `AcceleratorModule`."""
    expected = "self.model, an nn.Module, and training_step (or step); validation_step (or step) with validation data"
    raise fail(ModuleContractError, type(module).__name__, got=got, expected=expected, do=do)


def adapt_training_step(module: AcceleratorModule, state: TrainingState) -> Callable[[Any], Any]:
    """Return the training step as a function of the batch; other parameters are filled in."""
    name, step = _find_step(module, "training_step")
    further = _find_further(step, lambda: state, lambda: state.train_step)
    if not _accepts(step, None, **further):
        _reject_parameters(module, name, step, f"def {name}(self, batch)")
    # Without a wrapper, a step costs one Python call less.
    if not further:
        return step
    return lambda batch: step(batch, **_fill(further))


def adapt_validation_step(
    module: AcceleratorModule, name: str, metrics: Mapping[str, Sequence[Metric]] = MappingProxyType({})
) -> Callable[[str, Any], Any]:
    """Return a validation or test step as a function of (key, batch), whether it takes the key or not.

    Args:
        module: The module.
        name: The name of the step.
        metrics: The metrics of each set, for steps that depend on them.
    """
    # Its validation step returns predictions only for the metrics that somebody computes.
    if module.metric_names is not None:
        names_of_sets: dict[str, list[str]] = {}
        for key, group in metrics.items():
            names_of_sets[key] = [metric.name for metric in group if not isinstance(metric, ReportedValue)]
        module.metric_names = names_of_sets
    name, step = _find_step(module, name)
    further = _find_further(step, lambda: module.state, lambda: module.state.val_step)
    if "key" in inspect.signature(step).parameters and _accepts(step, None, key=None, **further):
        return lambda key, batch: step(batch, key=key, **_fill(further))
    if _accepts(step, None, **further):
        if not further:
            return lambda _key, batch: step(batch)
        return lambda _key, batch: step(batch, **_fill(further))
    names = list(inspect.signature(step).parameters)
    takes_key = len(names) > 1 and (names[0] == "key" or names[1] == "batch")
    # (batch, batch_idx), as in Lightning, would get the name of the set as its batch.
    if not takes_key or not _accepts(step, None, None, **further):
        _reject_parameters(module, name, step, f"def {name}(self, batch) or def {name}(self, key, batch)")
    return lambda key, batch: step(key, batch, **_fill(further))


def _find_step(module: AcceleratorModule, step: str) -> tuple[str, Callable[..., Any]]:
    """Return the step that the user defined, or its first fallback; the last fallback if none is defined."""
    names = STEPS[step]
    name = next(filter(partial(defines, module), names), names[-1])
    return name, getattr(module, name)


def _find_further(
    step: Callable[..., Any], state: Callable[[], TrainingState], batch_idx: Callable[[], int]
) -> dict[str, Callable[[], Any]]:
    """Return the further parameters of a step, with functions that return their values."""
    parameters = inspect.signature(step).parameters
    known = {"batch_idx": batch_idx, "state": state, "status_dict": lambda: state().state_dict()}
    return {name: value for name, value in known.items() if name in parameters}


def _fill(further: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: value() for name, value in further.items()}


def _accepts(step: Callable[..., Any], *values: Any, **named: Any) -> bool:
    try:
        inspect.signature(step).bind(*values, **named)
    except TypeError:
        return False
    return True


def _reject_parameters(module: AcceleratorModule, name: str, step: Callable[..., Any], do: str) -> NoReturn:
    do = f"{do}, with any of batch_idx, state, status_dict after it"
    reject_module(module, f"{name}{inspect.signature(step)}", do)
