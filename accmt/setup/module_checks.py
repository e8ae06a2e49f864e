"""Checks the user's module before the first batch, and adapts its steps to a common signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
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
from accmt.errors import ArgumentError, ModuleContractError, UnknownArgumentError, explain, nearest
from accmt.huggingface import advise_wrapping
from accmt.metrics import Metric, ReportedValue
from accmt.module import AcceleratorModule, HuggingFaceModule, defines
from accmt.optimization import ChainedOptimizer, SeveralSchedulers, needs_closure
from accmt.options import HyperParameters
from accmt.processes import num_processes
from accmt.registry import addon
from accmt.state import Function, TrainingState

_CONTRACT = tuple(
    name
    for name in vars(AcceleratorModule)
    if callable(getattr(AcceleratorModule, name)) or name.startswith("collate_fn")
)


_DEEPEST, _MOST = 3, 1000  # depth to which containers are searched for parameters


STEPS: dict[str, tuple[str, ...]] = {
    "training_step": ("training_step", "step"),
    "validation_step": ("validation_step", "step"),
    "test_step": ("test_step", "validation_step", "step"),
    "predict_step": ("predict_step",),
}
"""Each step with those that stand in its place where it is not defined, in this order."""


def as_module(module: Any, kwargs: dict[str, Any], hps: HyperParameters) -> AcceleratorModule:
    """Return the module for an argument of `fit`: a module, a model's path, `(path, type)`, or hyper-parameters.

    Args:
        module: One of these.
        kwargs: Further keywords of `fit`, used to build the model.
        hps: The Trainer's hyper-parameters.

    Raises:
        UnknownArgumentError: There are unused keywords.
        ArgumentError: The hyper-parameters describe a different model than the Trainer's.
    """
    is_file = isinstance(module, str | PathLike) and str(module).endswith((".yaml", ".yml", ".json"))
    if is_file or isinstance(module, Mapping | HyperParameters):
        # Reject keywords for `from_pretrained` with hyper-parameters: they belong in the `model` section.
        others = {name: value for name, value in kwargs.items() if name != "processor"}
        if others:
            got = f"the keywords {sorted(others)} together with hyper-parameters"
            lines = ", ".join(f"`{name}: {value}`" for name, value in others.items())
            expected = "only `processor`: arguments of `from_pretrained` belong in the `model` section"
            raise UnknownArgumentError(explain("fit", got, expected, f"write {lines} in `model`"))
        if isinstance(module, Mapping | HyperParameters) or not hps.is_from(module):
            own_hps = HyperParameters.from_config(module)
            _require_same_model(own_hps, hps, "trainer.fit(trainer.hps, data)")
        else:
            own_hps = hps  # from the same source; only the Trainer's include the flags, and the run records them
        return AcceleratorModule.from_hps(own_hps, in_fit=True, **kwargs)
    if isinstance(module, str | PathLike):
        return AcceleratorModule.from_hf(module, in_fit=True, **kwargs)
    if isinstance(module, tuple):
        return AcceleratorModule.from_hf(*module, in_fit=True, **kwargs)
    if kwargs:
        got, expected = (
            f"the keywords {sorted(kwargs)}",
            "keywords only if `module` is the path of a transformers model",
        )
        raise UnknownArgumentError(explain("fit", got, expected, "pass them to the Trainer, or to your module"))
    if isinstance(module, HuggingFaceModule) and module.hps is not None:
        name = "AcceleratorModule" if type(module) is HuggingFaceModule else type(module).__name__
        _require_same_model(module.hps, hps, f"{name}.from_hps(trainer.hps)")
    own: AcceleratorModule = module
    return own


def _require_same_model(own: HyperParameters, hps: HyperParameters, do: str) -> None:
    """Check that a module matches the Trainer's hyper-parameters, which the run records.

    Raises:
        ArgumentError: They differ, for example because of flags.
    """
    for section in ("model", "sft", "prefer"):
        if hps[section] is not None and own[section] != hps[section]:
            got = f"{own.where(section)}: {own[section]}, and {hps.where(section)}: {hps[section]}"
            do = f"{do}: the Trainer's hyper-parameters include the flags"
            raise ArgumentError(explain("fit", got, "the model of the Trainer's hyper-parameters", do))


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
    _check_spelling(module)
    model = getattr(module, "model", None)
    if model is None:
        _reject(module, "no attribute `model`", "self.model = MyNetwork() in __init__")
    if not isinstance(model, nn.Module):
        _reject(module, f"self.model is {type(model).__name__}", "self.model = an nn.Module")
    # Reject nested tensors: strided ones have no size, others have no optimizer step, and none can be sent.
    kinds = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    for kind, named in kinds.items():
        for name, tensor in named:
            can_be_held = kind == "buffer" and tensor.layout != torch.strided and num_processes() == 1
            if tensor.is_nested and not can_be_held:
                got = f"{name}, a {kind} that is a nested tensor ({tensor.layout})"
                expected = "dense tensors, which can be moved, compared, trained and saved"
                do = "keep the values of all parts in one tensor and their lengths in another, and build the nested "
                do += "tensor in forward (torch.nested.nested_tensor_from_jagged)"
                raise ModuleContractError(explain("self.model", got, expected, do))
    find_hooks(module)


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
            raise ModuleContractError(explain(where, got, "step() without a closure", do))
        return own
    parts = list(own.values()) if isinstance(own, dict) else list(own) if isinstance(own, list | tuple) else []
    num_optimizers = sum(hasattr(part, "param_groups") for part in parts)
    if parts and num_optimizers == len(parts) and module.uses_manual_optimization:
        return ChainedOptimizer(parts) if num_optimizers > 1 else parts[0]
    do = "def get_optimizer(self): return torch.optim.SGD(self.model.parameters(), lr=0.1)"
    if num_optimizers > 1:
        do = "return one optimizer with a group for each part; "
        do += "to step each part separately, derive from ExtendedAcceleratorModule"
    elif len(parts) > 1:
        do = "def get_optimizer(self): return optimizer, and " + _GET_SCHEDULER
    elif parts:
        do = "def get_optimizer(self): return optimizer, without brackets"
    where, expected = f"{type(module).__name__}.get_optimizer", "one torch.optim.Optimizer, or None"
    raise ModuleContractError(explain(where, _describe_returned(own), expected, do))


def require_scheduler(module: AcceleratorModule, own: Any) -> Any:
    """Return what `get_scheduler` returned: one scheduler, or several with manual optimization."""
    if hasattr(own, "step") and hasattr(own, "state_dict") and not isinstance(own, type):
        if isinstance(own, LRScheduler) or _accepts(own.step):
            return own
        got = f"a {type(own).__name__}, whose step{inspect.signature(own.step)} requires arguments"
        do = "wrap it in a class with state_dict and load_state_dict, whose step() calls it with its step count"
        expected = "a scheduler whose step() takes no arguments: it is called after each optimizer step"
        raise ModuleContractError(explain(f"{type(module).__name__}.get_scheduler", got, expected, do))
    is_several = isinstance(own, list | tuple) and all(isinstance(one, LRScheduler) for one in own)
    if own and is_several and module.uses_manual_optimization:
        return SeveralSchedulers(own) if len(own) > 1 else own[0]
    do = f"{_GET_SCHEDULER}; several are one as torch.optim.lr_scheduler.ChainedScheduler(schedulers)"
    if isinstance(own, dict):
        do = f"{_GET_SCHEDULER}; interval='epoch' is `step_scheduler_per_epoch: true` in the hyper-parameters"
    where, expected = f"{type(module).__name__}.get_scheduler", "one torch.optim.lr_scheduler.LRScheduler, or None"
    raise ModuleContractError(explain(where, _describe_returned(own), expected, do))


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
        raise ModuleContractError(explain(type(module).__name__, got, expected, _GET_SCHEDULER))
    make: Callable[..., Any] = module.get_scheduler
    return make(optimizer, **wanted)


_GET_SCHEDULER = "def get_scheduler(self, optimizer, steps_per_epoch, epochs): return scheduler"


def _describe_returned(own: Any) -> str:
    if isinstance(own, type):
        return f"the class {own.__name__}"
    if isinstance(own, dict):
        return f"a dict with {', '.join(f'{name!r}: {type(part).__name__}' for name, part in own.items())}"
    if isinstance(own, list | tuple):
        return f"a {type(own).__name__} of {', '.join(type(part).__name__ for part in own) or 'nothing'}"
    return f"{own!r} ({type(own).__name__})"


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
        raise ModuleContractError(explain(where, f"the class {module.__name__}", "an instance of it", do))
    if not isinstance(module, AcceleratorModule):
        do = advise_wrapping(module) or "class MyModule(AcceleratorModule): with self.model and training_step"
        if isinstance(module, str | PathLike | tuple):
            do = f"trainer.{function}({_advise_making(module)}, data)"
        if isinstance(module, Dataset | DataLoader):
            do = f"trainer.{function}(module, data): the module comes first"
        raise ModuleContractError(explain(where, type(module).__name__, "an AcceleratorModule", do))


def _advise_making(path: Any) -> str:
    """Return how to make a module from a model's path or `(path, type)`, which only `fit` accepts."""
    if isinstance(path, tuple):
        return f"AcceleratorModule.from_hf({', '.join(map(repr, path))})"
    if str(path).endswith((".yaml", ".yml", ".json")):
        return f"AcceleratorModule.from_hps({str(path)!r})"
    return f'AcceleratorModule.from_hf({str(path)!r}, "AutoModelForSequenceClassification")'


def _check_spelling(module: AcceleratorModule) -> None:
    own = {name for kind in type(module).__mro__ if kind not in AcceleratorModule.__mro__ for name in vars(kind)}
    for name in sorted(own - set(dir(AcceleratorModule))):
        meant = nearest(name, _CONTRACT, cutoff=0.9)
        if meant and not name.startswith("_") and not defines(module, meant):
            _reject(
                module,
                f"a method {name}, but no {meant}",
                f"rename it to {meant} (or to a less similar name)",
            )


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
        found = None if name in ("model", "teacher") else _find_trainable(value, f"self.{name}", own)
        if found is None:
            continue
        path, part = found
        if isinstance(part, nn.Module):
            got = f"{path} has parameters that are not in self.model: they would be neither trained nor saved"
            do = f"self.model = nn.ModuleDict({{..., {name!r}: ...}}), or {path}.requires_grad_(False)"
        else:
            got = f"{path} requires a gradient and is not in self.model: it would be neither trained nor saved"
            do = f"self.model.{name} = nn.Parameter(...), and use it from there; or {path}.requires_grad_(False)"
        _reject(module, got, do)


def _find_trainable(value: Any, path: str, own: Set[int], depth: int = 0) -> tuple[str, Any] | None:
    """Return the first trainable part of a value that is not in `own`, with its path."""
    if isinstance(value, nn.Module):
        is_other = any(parameter.requires_grad and id(parameter) not in own for parameter in value.parameters())
        return (path, value) if is_other else None
    if isinstance(value, torch.Tensor):  # a computed one is a result, such as the last loss
        is_other = value.requires_grad and value.is_leaf and id(value) not in own
        return (path, value) if is_other else None
    if not isinstance(value, list | tuple | dict) or depth == _DEEPEST:
        return None
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in islice(items, _MOST):  # a list may also hold data
        found = _find_trainable(item, f"{path}[{key!r}]", own, depth + 1)
        if found is not None:
            return found
    return None


def _reject(module: AcceleratorModule, got: str, do: str) -> NoReturn:
    expected = "self.model, an nn.Module, and training_step (or step); validation_step (or step) with validation data"
    raise ModuleContractError(explain(type(module).__name__, got, expected, do))


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
