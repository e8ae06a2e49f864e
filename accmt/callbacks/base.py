"""The class that users derive their callbacks from."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accmt.callbacks.hooks import ALIASES, HOOKS, reject_unknown_hook
from accmt.errors import ModuleContractError, explain

if TYPE_CHECKING:
    from accmt.module import AcceleratorModule
    from accmt.protocols import TrainerProtocol
    from accmt.state import TrainingState


class Callback:
    """Acts at the moments of a run whose hooks it defines; `accmt.callbacks.hooks.HOOKS` is the table of them.

    A hook is a method with a name of the table. It names the keywords it wants, of those the table gives:

        class Watcher(Callback):
            def on_after_training_step(self, outputs):
                print(self.state.global_step, outputs)

    Attributes:
        order: Callbacks run in ascending order, equal ones in the order of the list.
        trainer: The Trainer, set before the first hook.
        module: The user's module.
        state: The counters of the run.
    """

    order: float = 0
    trainer: TrainerProtocol
    module: AcceleratorModule
    state: TrainingState

    def state_dict(self) -> dict[str, Any]:
        """Return what has to survive a crash: JSON values and tensors; of each process, where they differ."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, on every process, before `on_resume`."""


class MainProcessCallback(Callback):
    """A callback that acts on the main process only.

    Nothing in it may communicate with other processes: they would not answer.
    """


class LambdaCallback(Callback):
    """A callback made of functions.

    Args:
        order: As `Callback.order`.
        **functions: Hook names with functions, each called with the keywords that it names, and `trainer` if it does.

    Raises:
        ModuleContractError: A name is no hook, or its value is no function.

    Examples:
        >>> callback = LambdaCallback(on_log=lambda values, trainer: print(trainer.global_step, values))
    """

    def __init__(self, *, order: float = 0, **functions: Any) -> None:
        self.order = order
        for name, function in functions.items():
            if name not in HOOKS and name not in ALIASES:
                reject_unknown_hook(self, name)
            if not callable(function):
                got, do = f"{function!r} ({type(function).__name__})", f"{name}=lambda: ..."
                raise ModuleContractError(explain(f"LambdaCallback({name}=...)", got, "a function", do))
            setattr(self, name, self._give_trainer(function))

    def _give_trainer(self, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        if "trainer" not in signature.parameters:
            return function

        def hook(**data: Any) -> None:
            function(trainer=self.trainer, **data)

        others = [parameter for name, parameter in signature.parameters.items() if name != "trainer"]
        hook.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return hook
