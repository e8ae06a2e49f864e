"""What a Trainer tells of its callbacks."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from accmt.callbacks import Callback, Hooks, build_callbacks, describe_hooks
from accmt.errors import CallbackNotFoundError, explain
from accmt.messages import say, speaking
from accmt.trainer.properties import TrainerView

C = TypeVar("C", bound=Callback)

RAISE: Final = object()
"""The default of `get_callback`: no callback is an error."""


class TrainerCallbacks(TrainerView):
    """Finds and lists the callbacks of a Trainer; those of the module are known once a run was begun."""

    def get_callback(self, cls: type[C], default: Any = RAISE) -> C | Any:
        """Return the first callback of a class, or of one derived from it.

        Args:
            cls: The class.
            default: What is returned where there is none.

        Raises:
            CallbackNotFoundError: There is none, and no default.
        """
        callbacks = self._own_callbacks()
        found = next((callback for callback in callbacks if isinstance(callback, cls)), default)
        if found is RAISE:
            where = f"get_callback({cls.__name__})"
            expected = "one of: " + (", ".join(type(callback).__name__ for callback in callbacks) or "there are none")
            do = f"Trainer(callbacks={cls.__name__}(...)), or get_callback({cls.__name__}, default=None)"
            raise CallbackNotFoundError(explain(where, "no callback of that class", expected, do))
        return found

    get_hook = get_callback

    def describe_callbacks(self) -> str:
        """Return who acts at each hook, in that order, as a Markdown table; it is said, too, unless `verbose=False`.

        Once a run was begun, the module and accmt's own callbacks are in it.

        Raises:
            ModuleContractError: A callback has a method that looks like a hook and is none.
        """
        hooks = Hooks(self._own_callbacks(), is_main_process=self.is_main) if self._run is None else self._run.hooks
        table = describe_hooks(hooks.callbacks)
        with speaking(verbose=self.settings.running.verbose):
            say(f"callbacks by hook\n{table}")
        return table

    describe_hooks = describe_callbacks

    def _own_callbacks(self) -> list[Callback]:
        return build_callbacks(self.settings.running.callbacks) if self._run is None else list(self._run.callbacks)
