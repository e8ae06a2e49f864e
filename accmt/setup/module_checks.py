"""Checks the user's module before the first batch, and adapts its steps to a common signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from os import PathLike
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from accmt.callbacks import find_hooks
from accmt.errors import ModuleContractError, describe_value, fail
from accmt.huggingface import advise_wrapping
from accmt.metrics import Metric, ReportedValue
from accmt.module import AcceleratorModule, HuggingFaceModule, defines
from accmt.optimization import ChainedOptimizer, SeveralSchedulers, needs_closure
from accmt.registry import addon
from accmt.state import Function, TrainingState

_MOST = 1000  # entries of a container that are searched for parameters


STEPS: dict[str, tuple[str, ...]] = {
    "training_step": ("training_step", "step"),
    "validation_step": ("validation_step", "step"),
    "test_step": ("test_step", "validation_step", "step"),
    "predict_step": ("predict_step",),
}
"""Each step with those that stand in its place where it is not defined, in this order."""


def check_module(module: Any) -> None:
    """Check a module before training."""
    check_untrained_module(module, "fit")
    model = module.model
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    lazy += [name for name, buffer in model.named_buffers() if is_lazy(buffer)]
    if lazy:
        got = f"lazy layers without weights ({', '.join(lazy[:3])}): nothing can train or save them"
        _reject(module, got, "run one batch through the model before `fit`, in __init__: self.model(torch.zeros(...))")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        _reject(module, "no parameter of self.model requires a gradient", "leave at least one unfrozen")
    _check_other_parameters(module, model)
    # Reject a teacher that shares trainable weights with the model.
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if module.teacher is not None and any(id(parameter) in trained for parameter in module.teacher.parameters()):
        got = "self.teacher shares trainable weights with self.model, but a teacher is frozen"
        _reject(module, got, "self.teacher = copy.deepcopy(...), or freeze the shared weights")
    if not defines(module, "training_step") and not _defines_step(module):
        _reject(module, "neither training_step nor step", "def training_step(self, batch): return loss")


def check_untrained_module(module: Any, function: Function) -> None:
    """Check what a module needs for training and evaluation."""
    require_module(module, function)
    addon("reject_foreign_methods")(module)
    addon("reject_misspelt_methods")(module)
    model = getattr(module, "model", None)
    if model is None:
        _reject(module, "no attribute `model`", _advise_model(module))
    if not isinstance(model, nn.Module):
        _reject(module, f"self.model is {type(model).__name__}", "self.model = an nn.Module")
    find_hooks(module)


def _advise_model(module: Any) -> str:
    parts = dict(module.named_children()) if isinstance(module, nn.Module) else vars(module)
    names = [name for name, part in parts.items() if isinstance(part, nn.Module)]
    if len(names) < 2:
        return f"self.model = {f'self.{names[0]}' if names else 'MyNetwork()'} in __init__"
    entries = ", ".join(f'"{name}": self.{name}' for name in names)
    return f"self.model = nn.ModuleDict({{{entries}}}) in __init__, without those that are not trained"


def check_validation(module: AcceleratorModule, step: str = "validation_step") -> None:
    """Check that a module can process validation or test data."""
    *names, _ = STEPS[step]
    if not any(defines(module, name) for name in names) and not _defines_step(module):
        got = f"{step.partition('_')[0]} data, but neither {', '.join(names)} nor step"
        _reject(module, got, 'def validation_step(self, batch): return {"loss": loss}')


def require_optimizer(module: AcceleratorModule, own: Any) -> Any:
    """Return what `get_optimizer` returned: one optimizer, or several with manual optimization."""
    if hasattr(own, "param_groups") and hasattr(own, "step") and not isinstance(own, type):
        if needs_closure(own) and not module.uses_manual_optimization:
            got = f"{type(own).__name__}, which evaluates the loss several times in one step (it needs a closure)"
            do = "choose an optimizer that needs one gradient per step, such as torch.optim.AdamW; or derive from "
            do += "ExtendedAcceleratorModule, and call self.optimizer.step(closure) in training_step"
            where = f"{type(module).__name__}.get_optimizer"
            raise fail(ModuleContractError, where, got=got, expected="step() without a closure", do=do)
        return own
    parts = list(own.values()) if isinstance(own, dict) else list(own) if isinstance(own, list | tuple) else []
    if parts and module.uses_manual_optimization and all(hasattr(part, "param_groups") for part in parts):
        return ChainedOptimizer(parts) if len(parts) > 1 else parts[0]
    do = "def get_optimizer(self): return torch.optim.SGD(self.model.parameters(), lr=0.1), without brackets, and "
    do += f"{_GET_SCHEDULER}; to step several optimizers, derive from ExtendedAcceleratorModule"
    where, expected = f"{type(module).__name__}.get_optimizer", "one torch.optim.Optimizer, or None"
    raise fail(ModuleContractError, where, got=_describe_returned(own), expected=expected, do=do)


def require_scheduler(module: AcceleratorModule, own: Any) -> Any:
    """Return what `get_scheduler` returned: one scheduler, or several with manual optimization."""
    if hasattr(own, "step") and hasattr(own, "state_dict") and not isinstance(own, type):
        if isinstance(own, LRScheduler) or _accepts(own.step):
            return own
        got = f"a {type(own).__name__}, whose step{inspect.signature(own.step)} requires arguments"
        do = "wrap it in a class with state_dict and load_state_dict, whose step() calls it with its step count"
        expected = "a scheduler whose step() takes no arguments: it is called after each optimizer step"
        raise fail(ModuleContractError, f"{type(module).__name__}.get_scheduler", got=got, expected=expected, do=do)
    is_several = isinstance(own, list | tuple) and all(isinstance(one, LRScheduler) for one in own)
    if own and is_several and module.uses_manual_optimization:
        return SeveralSchedulers(own) if len(own) > 1 else own[0]
    do = f"{_GET_SCHEDULER}; several are one as torch.optim.lr_scheduler.ChainedScheduler(schedulers), and "
    do += "interval='epoch' is `step_scheduler_per_epoch: true` in the hyper-parameters"
    where, expected = f"{type(module).__name__}.get_scheduler", "one torch.optim.lr_scheduler.LRScheduler, or None"
    raise fail(ModuleContractError, where, got=_describe_returned(own), expected=expected, do=do)


def call_get_scheduler(module: AcceleratorModule, optimizer: torch.optim.Optimizer, named: Mapping[str, int]) -> Any:
    """Call the module's `get_scheduler` with the keywords that its signature names.

    Raises:
        ModuleContractError: It requires other arguments.
    """
    parameters = inspect.signature(module.get_scheduler).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    wanted = {name: value for name, value in named.items() if takes_all or name in parameters}
    if not _accepts(module.get_scheduler, optimizer, **wanted):
        got = f"get_scheduler{inspect.signature(module.get_scheduler)}"
        expected = "a method that takes the optimizer, and steps_per_epoch and epochs or one of them"
        raise fail(ModuleContractError, type(module).__name__, got=got, expected=expected, do=_GET_SCHEDULER)
    make: Callable[..., Any] = module.get_scheduler
    return make(optimizer, **wanted)


_GET_SCHEDULER = "def get_scheduler(self, optimizer, steps_per_epoch, epochs): return scheduler"


def _describe_returned(value: Any) -> str:
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__} of {', '.join(type(part).__name__ for part in parts) or 'nothing'}"
    return describe_value(value)


def _defines_step(module: AcceleratorModule) -> bool:
    # `step` of an ExtendedAcceleratorModule is not a training step: it steps optimizer and scheduler.
    return defines(module, "step") and not module.uses_manual_optimization


def require_module(module: Any, function: str) -> None:
    """Check that the argument of a Trainer method is a module.

    Raises:
        ModuleContractError: It is something else; the message explains how to make a module from it.
    """
    where = f"{function}(module)"
    if isinstance(module, type):
        do = f"trainer.{function}({module.__name__}(...), ...)"
        raise fail(ModuleContractError, where, got=f"the class {module.__name__}", expected="an instance of it", do=do)
    if not isinstance(module, AcceleratorModule):
        do = advise_wrapping(module) or "class MyModule(AcceleratorModule): with self.model and training_step"
        if isinstance(module, str | PathLike | tuple):
            make = 'from_hf(path, "AutoModelForCausalLM"), or from_hps(path) for hyper-parameters'
            do = f"module = AcceleratorModule.{make}; trainer.{function}(module, data)"
        if isinstance(module, Dataset | DataLoader):
            do = f"trainer.{function}(module, data): the module comes first"
        raise fail(ModuleContractError, where, got=type(module).__name__, expected="an AcceleratorModule", do=do)


def _check_other_parameters(module: AcceleratorModule, model: nn.Module) -> None:
    """Reject trainable parameters outside `self.model`, in attributes and in containers of them."""
    own = {id(parameter) for parameter in model.parameters()}
    attributes = dict(vars(module))
    # What an optimizer in an attribute trains, such as the temperature of a soft actor-critic, checkpoints contain.
    stepped = [value for value in attributes.values() if isinstance(value, torch.optim.Optimizer)]
    own |= {id(parameter) for optimizer in stepped for group in optimizer.param_groups for parameter in group["params"]}
    if isinstance(module, nn.Module):  # which does not keep its children in its attributes
        kinds = [attributes.pop(name, {}) for name in ("_parameters", "_buffers", "_modules")]
        attributes |= {name: value for kind in kinds for name, value in kind.items()}
    for name, value in attributes.items():
        if name in ("model", "teacher"):
            continue
        for path, part in _parts_of(f"self.{name}", value):
            parameters = part.parameters() if isinstance(part, nn.Module) else [part]
            if all(id(parameter) in own or not _is_trainable(parameter) for parameter in parameters):
                continue
            if isinstance(part, nn.Module):
                got = f"{path} has parameters that are not in self.model: they would be neither trained nor saved"
                do = f"self.model = nn.ModuleDict({{..., {name!r}: ...}}), or {path}.requires_grad_(False)"
            else:
                got = f"{path} requires a gradient and is not in self.model: it would be neither trained nor saved"
                do = f"self.model.{name} = nn.Parameter(...), and use it from there; or {path}.requires_grad_(False)"
            _reject(module, got, do)


def _parts_of(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value with its path, or the values in a list, tuple or dict; a long list holds data."""
    if not isinstance(value, list | tuple | dict):
        yield path, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in islice(items, _MOST):
        yield f"{path}[{key!r}]", item


def _is_trainable(value: Any) -> bool:
    """Return whether a value is a trainable tensor; a computed one is a result, such as the last loss."""
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _reject(module: AcceleratorModule, got: str, do: str) -> NoReturn:
    expected = "self.model, an nn.Module, and training_step (or step); validation_step (or step) with validation data"
    raise fail(ModuleContractError, type(module).__name__, got=got, expected=expected, do=do)


def adapt_training_step(module: AcceleratorModule, state: TrainingState) -> Callable[[Any], Any]:
    """Return the training step as a function of the batch; other parameters are filled in."""
    name, step = _find_step(module, "training_step")
    further = _find_further(step, lambda: state, lambda: state.train_step)
    if not _accepts(step, None, **further):
        _reject_parameters(module, name, step, f"def {name}(self, batch)")
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
    if isinstance(module, HuggingFaceModule):
        module.metric_names = {
            key: [metric.name for metric in group if not isinstance(metric, ReportedValue)]
            for key, group in metrics.items()
        }
    name, step = _find_step(module, name)
    further = _find_further(step, lambda: module.state, lambda: module.state.val_step)
    if "key" in inspect.signature(step).parameters and _accepts(step, None, key=None, **further):
        return lambda key, batch: step(batch, key=key, **_fill(further))
    if _accepts(step, None, **further):
        return (lambda _key, batch: step(batch, **_fill(further))) if further else (lambda _key, batch: step(batch))
    names = list(inspect.signature(step).parameters)
    takes_key = len(names) > 1 and (names[0] == "key" or names[1] == "batch")
    if not takes_key or not _accepts(step, None, None, **further):
        _reject_parameters(module, name, step, f"def {name}(self, batch) or def {name}(self, key, batch)")
    return lambda key, batch: step(key, batch, **_fill(further))


def _find_step(module: AcceleratorModule, step: str) -> tuple[str, Callable[..., Any]]:
    """Return the step that the user defined, or its first fallback; the last fallback if none is defined."""
    names = STEPS[step]
    name = next((name for name in names if defines(module, name)), names[-1])
    return name, getattr(module, name)


def _find_further(
    step: Callable[..., Any], state: Callable[[], TrainingState], batch_idx: Callable[[], int]
) -> dict[str, Callable[[], Any]]:
    """Return the further parameters of a step, with functions that return their values."""
    known = {"batch_idx": batch_idx, "state": state, "status_dict": lambda: state().state_dict()}
    return {name: value for name, value in known.items() if name in inspect.signature(step).parameters}


def _fill(further: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: value() for name, value in further.items()}


def _accepts(step: Callable[..., Any], *values: Any, **named: Any) -> bool:
    try:
        inspect.signature(step).bind(*values, **named)
    except TypeError:
        return False
    return True


def _reject_parameters(module: AcceleratorModule, name: str, step: Callable[..., Any], do: str) -> NoReturn:
    _reject(module, f"{name}{inspect.signature(step)}", f"{do}, with any of batch_idx, state, status_dict after it")
