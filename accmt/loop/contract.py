"""Checks the user's module before the first batch, and adapts its steps to one call each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NoReturn

from torch import nn

from accmt.callbacks import find_hooks
from accmt.errors import ModuleContractError, explain
from accmt.module import AcceleratorModule
from accmt.state import TrainingState

_OPTIONAL = ("batch_idx", "state", "status_dict")
_CONTRACT = tuple(
    name for name in vars(AcceleratorModule) if not name.startswith("_") and callable(getattr(AcceleratorModule, name))
)


def check_module(module: Any, *, has_validation: bool) -> None:
    """Check all that can be known about a module without running it.

    Args:
        module: What the user passed to `fit`.
        has_validation: Whether validation data were given.

    Raises:
        ModuleContractError: The message shows the line to write.
    """
    _check_kind(module)
    _check_spelling(module)
    _check_model(module)
    if not defines(module, "training_step") and not defines(module, "step"):
        _refuse(module, "neither training_step nor step", "def training_step(self, batch): return loss")
    if has_validation and not defines(module, "validation_step") and not defines(module, "step"):
        _refuse(
            module,
            "validation data, but neither validation_step nor step",
            'def validation_step(self, batch): return {"loss": loss}',
        )
    find_hooks(module)


def defines(module: AcceleratorModule, name: str) -> bool:
    """Return whether the user's class or object defines `name` itself."""
    return getattr(type(module), name) is not getattr(AcceleratorModule, name) or name in vars(module)


def _check_kind(module: Any) -> None:
    if isinstance(module, type):
        do = f"trainer.fit({module.__name__}(...), ...)"
        raise ModuleContractError(explain("fit(module)", f"the class {module.__name__}", "an object of it", do))
    if not isinstance(module, AcceleratorModule):
        do = "class MyModule(AcceleratorModule): with self.model and training_step"
        raise ModuleContractError(explain("fit(module)", type(module).__name__, "an AcceleratorModule", do))


def _check_spelling(module: AcceleratorModule) -> None:
    own = {name for kind in type(module).__mro__ if kind not in AcceleratorModule.__mro__ for name in vars(kind)}
    for name in sorted(own - set(dir(AcceleratorModule))):
        nearest = get_close_matches(name, _CONTRACT, n=1, cutoff=0.9)
        if nearest and not name.startswith("_") and not defines(module, nearest[0]):
            _refuse(
                module,
                f"a method {name}, and no {nearest[0]}",
                f"rename it to {nearest[0]} (or to something less alike)",
            )


def _check_model(module: AcceleratorModule) -> None:
    model = getattr(module, "model", None)
    if model is None:
        _refuse(module, "no attribute `model`", "self.model = MyNetwork() in __init__")
    if not isinstance(model, nn.Module):
        _refuse(module, f"self.model is {type(model).__name__}", "self.model = an nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        _refuse(module, "no parameter of self.model requires a gradient", "leave at least one unfrozen")


def _refuse(module: AcceleratorModule, got: str, do: str) -> NoReturn:
    expected = "self.model, an nn.Module, and training_step (or step); validation_step (or step) with validation data"
    raise ModuleContractError(explain(type(module).__name__, got, expected, do))


def adapt_training_step(module: AcceleratorModule, state: TrainingState) -> Callable[[Any], Any]:
    """Return the training step as a function of the batch alone, whatever further parameters it takes.

    Raises:
        ModuleContractError: It takes a parameter that nothing fills.
    """
    step = module.training_step
    wanted = _further_parameters(module, "training_step", step)
    if not wanted:
        return step

    def call(batch: Any) -> Any:
        values = {"batch_idx": state.train_step, "state": state, "status_dict": state.state_dict}
        return step(batch, **{name: values[name]() if name == "status_dict" else values[name] for name in wanted})  # type: ignore[operator]

    return call


def _further_parameters(module: AcceleratorModule, name: str, step: Callable[..., Any]) -> list[str]:
    parameters = list(inspect.signature(step).parameters.values())
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [p.name for p in named[1:] if p.name not in _OPTIONAL and p.default is p.empty]
    if unknown or (not named and not parameters):
        _refuse(
            module,
            f"{name}{inspect.signature(step)}",
            f"def {name}(self, batch), with any of {', '.join(_OPTIONAL)} after it",
        )
    return [p.name for p in named[1:] if p.name in _OPTIONAL]


def adapt_validation_step(module: AcceleratorModule, name: str) -> Callable[[str, Any], Any]:
    """Return a validation step as a function of (key, batch), whether it takes the key or not.

    Args:
        module: The user's module.
        name: "validation_step" or "test_step".

    Raises:
        ModuleContractError: It takes neither `(batch)` nor `(key, batch)`.
    """
    step = getattr(module, name)
    if name == "validation_step" and not defines(module, "validation_step"):
        step = module.step
    parameters = [
        p for p in inspect.signature(step).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    required = [p for p in parameters if p.default is p.empty]
    if len(required) == 2:
        return step  # type: ignore[no-any-return]
    if len(required) > 2 or not parameters:
        _refuse(module, f"{name}{inspect.signature(step)}", f"def {name}(self, batch) or def {name}(self, key, batch)")
    return lambda _key, batch: step(batch)
