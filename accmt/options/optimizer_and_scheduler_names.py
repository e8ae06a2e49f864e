"""Finds optimizers and schedulers by name or import path, and their names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.optim import lr_scheduler

from accmt import registry
from accmt.errors import describe_value
from accmt.libraries.versions import FLOORS, require
from accmt.options.checks import KeyFault, KeyPath
from accmt.options.yaml_reader import suggest

SchedulerFactory = Callable[..., lr_scheduler.LRScheduler]

_TRANSFORMERS = "transformers.optimization"
_NEEDS_OBJECTS = "takes functions or other schedulers, which a file cannot contain"


@dataclass(frozen=True)
class _Kind:
    """How short names of one kind are resolved."""

    path: KeyPath
    group: str
    base: type
    torch_module: ModuleType
    from_transformers: Mapping[str, str]
    rejected: Mapping[str, str]
    expected: str
    instead: str

    def names(self) -> list[str]:
        of_torch = {
            name
            for name, item in vars(self.torch_module).items()
            if isinstance(item, type) and issubclass(item, self.base) and item is not self.base
            if not name.startswith("_")
        }
        return sorted((of_torch | set(self.from_transformers)) - set(self.rejected))

    def by_name(self, name: str) -> Any:
        if name in self.from_transformers:
            require("transformers", f"`type: {name}`")
            return getattr(importlib.import_module(_TRANSFORMERS), self.from_transformers[name])
        return getattr(self.torch_module, name)


_OPTIMIZERS = _Kind(
    path=("optim", "type"),
    group="accmt.optimizers",
    base=torch.optim.Optimizer,
    torch_module=torch.optim,
    from_transformers={"Adafactor": "Adafactor"},
    rejected={"LBFGS": "evaluates the loss several times per step (it needs a closure)"},
    expected="a subclass of torch.optim.Optimizer",
    instead="write `type: AdamW`",
)
_SCHEDULERS = _Kind(
    path=("scheduler", "type"),
    group="accmt.schedulers",
    base=lr_scheduler.LRScheduler,
    torch_module=lr_scheduler,
    from_transformers={
        "Constant": "get_constant_schedule",
        "ConstantWithWarmup": "get_constant_schedule_with_warmup",
        "CosineWithWarmup": "get_cosine_schedule_with_warmup",
        "CosineWithHardRestartsWithWarmup": "get_cosine_with_hard_restarts_schedule_with_warmup",
        "InverseSQRT": "get_inverse_sqrt_schedule",
        "LinearWithWarmup": "get_linear_schedule_with_warmup",
        "PolynomialDecayWithWarmup": "get_polynomial_decay_schedule_with_warmup",
    },
    rejected=dict.fromkeys(["LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"], _NEEDS_OBJECTS),
    expected="a torch.optim.lr_scheduler.LRScheduler, or a function that takes an optimizer and returns one",
    instead="return it from get_scheduler in your module",
)


class Names:
    """Short names as attributes: `Optimizer.AdamW` is "AdamW", for `HyperParameters(optim=Optimizer.AdamW)`."""

    def __init__(self, kind: _Kind) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> str:
        # copy and pickle ask for names with underscores, which must not look like optimizers.
        if name.startswith("_") or name not in self._kind.names():
            do = suggest(name, self._kind.names(), f"choose one of {', '.join(self._kind.names())}")
            message = f"there is no {self._kind.path[0]} named {name!r}: {do}"
            raise AttributeError(message, name=name, obj=self)
        return name

    def __dir__(self) -> list[str]:
        return self._kind.names()


Optimizer = Names(_OPTIMIZERS)
"""The short names of all optimizers, each as an attribute."""

Scheduler = Names(_SCHEDULERS)
"""The short names of all schedulers, each as an attribute."""


def optimizer_names() -> list[str]:
    """Return the short names of all optimizers."""
    return _OPTIMIZERS.names()


def scheduler_names() -> list[str]:
    """Return the short names of all schedulers."""
    return _SCHEDULERS.names()


def find_optimizer(value: Any) -> type[torch.optim.Optimizer] | KeyFault:
    """Return the optimizer class for a short name, an import path or a class, or the error."""
    factory: type[torch.optim.Optimizer] | KeyFault = _find(value, _OPTIMIZERS)
    return factory


def find_scheduler(value: Any) -> SchedulerFactory | KeyFault:
    """Return the class or function of a scheduler for a short name, an import path or itself, or the error."""
    factory: SchedulerFactory | KeyFault = _find(value, _SCHEDULERS)
    return factory


def is_listed(factory: Callable[..., Any]) -> bool:
    """Return whether an optimizer class or a scheduler has a short name: its behavior is known."""
    return "." not in name_of(factory)


def name_of(factory: Callable[..., Any]) -> str:
    """Return the short name of an optimizer class or scheduler, or its import path."""
    module, name = factory.__module__, factory.__name__
    for kind in (_OPTIMIZERS, _SCHEDULERS):
        for short, attribute in kind.from_transformers.items():
            # Functions of transformers have long names, which nobody writes into a YAML.
            if (module, name) == (_TRANSFORMERS, attribute):
                return short
        if name in kind.names() and name not in kind.from_transformers and kind.by_name(name) is factory:
            return name
    return f"{module}.{factory.__qualname__}"


def _find(value: Any, kind: _Kind) -> Any:
    """Return the object for a name; callables are returned unchanged."""
    factory = _import(value, kind) if isinstance(value, str) else value
    if isinstance(factory, KeyFault):
        return factory
    got = describe_value(value)
    # A number or a list, from a YAML with a missing colon.
    if not callable(factory):
        do = f"write `type: {kind.names()[0]}`"
        return KeyFault(kind.path, got, "a name, an import path or a class", do)
    for name, reason in kind.rejected.items():
        # Also where the class itself was passed, which passes every other check.
        if factory is kind.by_name(name):
            return KeyFault(kind.path, f"{name}, which {reason}", f"one of {', '.join(kind.names())}", kind.instead)
    is_class = isinstance(factory, type) and issubclass(factory, kind.base)
    # transformers has functions that build schedulers; an optimizer is built from its class, also for each group.
    if not is_class and not (kind is _SCHEDULERS and inspect.isfunction(factory)):
        return KeyFault(kind.path, got, kind.expected, kind.instead)
    return factory


def _import(value: str, kind: _Kind) -> Any:
    names = kind.names()
    # Rejected ones are found too, so that the message says why and not that they do not exist.
    if value in names or value in kind.rejected:
        return kind.by_name(value)
    module_name, _, attribute = value.rpartition(".")
    # Entry points are read only for names without a dot: reading them takes time in each start.
    if not module_name:
        group = kind.group
        added = registry.names(group)
        if value in added:
            return registry.find(group, value)
        names += added
        expected = f"one of {', '.join(names)}, or an import path"
        name_here = registry.addon("hint_for_component")(kind.path[0], value)
        do = f"write `{name_here}`" if name_here else suggest(value, names, "choose one of these names")
        return KeyFault(kind.path, describe_value(value), expected, do)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        package = module_name.partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == package and package in FLOORS
        do = f'pip install "{package}>={FLOORS[package]}"' if is_missing else "correct the path, or install it"
        return KeyFault(kind.path, f"{value!r}: {error}", "the import path of a class", do)
    # A typo in the class, or a name from another trainer behind a correct module.
    if not hasattr(module, attribute):
        name_here = registry.addon("hint_for_component")(kind.path[0], attribute)
        is_hint = name_here is not None and name_here != value
        do = f"write `{name_here}`" if is_hint else suggest(attribute, vars(module), "correct the path")
        return KeyFault(kind.path, f"{value!r}: {module_name} has no {attribute}", "the import path of a class", do)
    return getattr(module, attribute)
