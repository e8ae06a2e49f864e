"""Callbacks: the base class, all hooks, and how a run finds and calls them."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from torch import nn

from accmt.errors import ModuleContractError, fail, nearest

if TYPE_CHECKING:
    from accmt import Trainer
    from accmt.module import AcceleratorModule
    from accmt.state import TrainingState


# ---- Table of hooks


HOOKS: dict[str, tuple[str, ...]] = {
    "on_fit_start": (),
    "on_fit_end": (),
    "on_epoch_start": (),
    "on_epoch_end": (),
    "on_before_training_step": ("batch",),
    "on_after_training_step": ("batch", "outputs"),
    "on_before_backward": ("loss",),
    "on_after_backward": ("loss",),
    "on_before_optimizer_step": ("optimizer",),
    "on_after_optimizer_step": ("optimizer",),
    "on_before_scheduler_step": ("scheduler",),
    "on_after_scheduler_step": ("scheduler",),
    "on_before_zero_grad": ("optimizer",),
    "on_after_zero_grad": ("optimizer",),
    "on_update_end": (),
    "on_log": ("values", "step"),
    "on_evaluation_start": (),
    "on_evaluation_end": ("metrics",),
    "on_validation_start": ("key",),
    "on_validation_end": ("key", "outputs"),
    "on_before_validation_step": ("batch",),
    "on_after_validation_step": ("batch", "outputs"),
    "on_save_model": ("folder",),
    "on_save_checkpoint": ("folder",),
    "on_resume": (),
    "on_keyboard_interrupt": ("error",),
    "on_cuda_out_of_memory": ("error",),
    "on_runtime_error": ("error",),
    "on_exception": ("error",),
}
"""Each hook with its keyword arguments; a method receives those that it declares."""

ONCE_PER_BATCH = frozenset(
    f"on_{moment}" for moment in ("before_training_step", "after_training_step", "before_backward", "after_backward")
) | {"on_before_validation_step", "on_after_validation_step"}
"""Hooks that act on a batch, which differs between processes; all other hooks act for all processes together."""

ALIASES: dict[str, str] = {"before_eval": "on_evaluation_start", "after_eval": "on_evaluation_end"}
"""Hook names of the original accmt. For those of other trainers, derive from `accmt.compat.OtherHookNames`."""

HOOK_PREFIXES = ("on_", "before_", "after_", "begin_")
"""A public method of a callback whose name starts with one of these must be a hook."""


def names_of_hooks(owner: object) -> Mapping[str, str]:
    """Return other names that an object may use for hooks, mapped to ours."""
    return {**ALIASES, **getattr(owner, "other_hook_names", {})}


def reject_unknown_hook(callback: object, attribute: str) -> NoReturn:
    """Raise an error about a method that is named like a hook but is not one.

    Raises:
        ModuleContractError: Always; the message suggests the closest hook, or what replaces another trainer's hook.
    """
    from accmt.registry import addon

    # By letters alone, `on_epoch_finish` is closest to `on_epoch_start`.
    spelled = re.sub("_begin$", "_start", re.sub("_(finish|finished|stop|done)$", "_end", attribute))
    hook = nearest(spelled, [*HOOKS, *ALIASES], cutoff=0) or attribute
    got = "a method that is named like a hook but is not one"
    do = f"did you mean {hook}? If it is not a hook, choose a name that does not start with {', '.join(HOOK_PREFIXES)}"
    got, do = addon("hint_for_hook")(attribute) or (got, do)
    where, expected = f"{type(callback).__name__}.{attribute}", "one of: " + ", ".join(HOOKS)
    raise fail(ModuleContractError, where, got=got, expected=expected, do=do)


# ---- Base classes of callbacks


class Callback:
    """Base class of callbacks; `accmt.callbacks.callback.HOOKS` lists all hooks and their keyword arguments.

    A hook is a method with a name from this table. Declare only the keyword arguments that you need:

        class Watcher(Callback):
            def on_after_training_step(self, outputs):
                print(self.state.global_step, outputs)

    Attributes:
        order: Callbacks run in ascending order; equal ones run in the order of the list.
        trainer: The Trainer; set before the first hook.
        module: Your module.
        state: The counters of the run.
        process_state: The names of attributes that differ between processes: a checkpoint contains each process's.
        brings_feature: The name of the feature that a run with this callback has, for add-ons of accmt.
    """

    process_state: tuple[str, ...] = ()
    brings_feature: ClassVar[str | None] = None
    order: float = 0
    trainer: Trainer
    module: AcceleratorModule
    state: TrainingState

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints: JSON values and tensors. The main process's is saved.

        Without it, attributes that hold plain data, tensors or modules and that training changes are saved.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore state from `state_dict`; called on every process before `on_resume`."""


def name_by_class(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Name callbacks by class and, from the second of a class on, number, so that the next start finds their state."""
    named: dict[str, Callback] = {}
    counts: Counter[type[Callback]] = Counter()
    for callback in callbacks:
        kind = type(callback)
        counts[kind] += 1
        name = kind.__name__
        if counts[kind] > 1:
            name += f"#{counts[kind]}"
        named[name] = callback
    return named


class MainProcessCallback(Callback):
    """A callback that runs on the main process only.

    It must not communicate with other processes, because they do not run it.
    """


class StatelessCallback(Callback):
    """A callback whose attributes are not in checkpoints, such as a view or a measurement of the current launch."""


class LambdaCallback(Callback):
    """A callback made of functions.

    Args:
        order: See `Callback.order`.
        **functions: Functions by hook name. Each receives the keyword arguments that it declares, including `trainer`.

    Raises:
        ModuleContractError: A name is not a hook, or its value is not a function.

    Examples:
        >>> callback = LambdaCallback(on_log=lambda values, trainer: print(trainer.global_step, values))
    """

    def __init__(self, *, order: float = 0, **functions: Any) -> None:
        self.order = order
        for name, function in functions.items():
            if name not in HOOKS and name not in ALIASES:  # a misspelt name would never be called
                reject_unknown_hook(self, name)
            if not callable(function):
                got, do = f"{function!r} ({type(function).__name__})", f"{name}=lambda: ..."
                raise fail(ModuleContractError, f"LambdaCallback({name}=...)", got=got, expected="a function", do=do)
            setattr(self, name, self._give_trainer(function))

    def _give_trainer(self, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        if "trainer" not in signature.parameters:
            return function

        def hook(**data: Any) -> None:
            function(trainer=self.trainer, **data)

        parameters = dict(signature.parameters)
        del parameters["trainer"]
        # A hook receives the keywords of its signature.
        hook.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
        return hook


Hook = Callable[..., Any]


class Hooks:
    """The hooks of a run: each is a tuple of functions, called in order with the keywords of the table.

    There is one attribute per name in `HOOKS`, which the loop iterates over: `for hook in hooks.on_epoch_end: hook()`.
    `callbacks` are those that are active on this process, in order.

    Args:
        callbacks: The callbacks and the user's module, in order.
        is_main_process: Whether `MainProcessCallback`s are active on this process.
        seed: Seeds the generators for a purpose. It is called before each user hook that acts for all processes, so
            that random numbers in a hook are the same on all processes, and after a resume.

    Raises:
        ModuleContractError: A method is named like a hook but is not one, or requires an argument that its hook does
            not pass.
    """

    if TYPE_CHECKING:

        def __getattr__(self, hook: str) -> tuple[Hook, ...]: ...

    def __init__(
        self,
        callbacks: Sequence[object],
        *,
        builtin: Sequence[object] = (),
        is_main_process: bool = True,
        seed: Callable[[str], None] | None = None,
    ) -> None:
        active = [*callbacks, *builtin]
        if not is_main_process:
            active = [callback for callback in active if not isinstance(callback, MainProcessCallback)]
        hooks: dict[str, list[Hook]] = {name: [] for name in HOOKS}
        self.callbacks = tuple(sorted(active, key=_order_of))
        builtin_ids = set(map(id, builtin))  # by identity: a user's class may define `__eq__`
        for callback in self.callbacks:
            for name, methods in find_hooks(callback).items():
                where = f"{type(callback).__qualname__}.{name}"
                if seed is not None and id(callback) not in builtin_ids and name not in ONCE_PER_BATCH:
                    hooks[name].append(_seeding(seed, where))
                hooks[name] += methods
        for name, methods in hooks.items():
            setattr(self, name, tuple(methods))


def _seeding(seed: Callable[[str], None], purpose: str) -> Hook:
    return lambda **_: seed(purpose)


def _order_of(callback: object) -> float:
    return callback.order if isinstance(callback, Callback) else 0  # in a module, `order` may mean something else


def find_hooks(callback: object) -> dict[str, list[Hook]]:
    """Return the hooks that an object defines, by our names; a hook defined under several names has several functions.

    Raises:
        ModuleContractError: A method is named like a hook but is not one, or requires an argument that its hook does
            not pass.
    """
    hooks: dict[str, list[Hook]] = {}
    names = names_of_hooks(callback)
    for attribute in dir(callback):
        if not attribute.startswith(HOOK_PREFIXES) or isinstance(getattr(type(callback), attribute, None), property):
            continue
        name = names.get(attribute, attribute)
        method = getattr(callback, attribute)
        if name in HOOKS and callable(method) and not isinstance(method, nn.Module):
            hooks.setdefault(name, []).append(_with_wanted_keywords(callback, attribute, method, HOOKS[name]))
        elif name not in HOOKS and not isinstance(method, partial) and inspect.isroutine(method):
            # A layer or a value with such a name is fine; from Python 3.14 on, a partial is a routine too.
            reject_unknown_hook(callback, attribute)
    return hooks


def describe_hooks(callbacks: Sequence[object]) -> str:
    """Return a Markdown table of all hooks and the callbacks that define them, in the order of `callbacks`.

    Raises:
        ModuleContractError: See `find_hooks`.
    """
    rows_of_hooks: dict[str, list[str]] = {name: [] for name in HOOKS}
    for callback in callbacks:
        for name, methods in find_hooks(callback).items():
            rows_of_hooks[name] += [f"| {name} | {type(callback).__name__} | {_order_of(callback):g} |"] * len(methods)
    lines = ["| hook | callback | order |", "|---|---|---|"]
    for name, rows in rows_of_hooks.items():
        lines += rows or [f"| {name} | (none) | |"]
    return "\n".join(lines)


def _with_wanted_keywords(callback: object, attribute: str, method: Hook, keywords: tuple[str, ...]) -> Hook:
    parameters = inspect.signature(method).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    unfilled = required - (named & set(keywords))
    if unfilled:  # a TypeError in the middle of the run, and perhaps on one process only
        from accmt.registry import addon

        hints = addon("hints_for_parameters")(unfilled)
        do = "; ".join([f"def {attribute}({', '.join(('self', *keywords))})", *hints])
        where, expected = f"{type(callback).__name__}.{attribute}", ", ".join(keywords) or "no parameters"
        raise fail(
            ModuleContractError, where, got=f"parameters {sorted(unfilled)}", expected=f"any of: {expected}", do=do
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters) or named >= set(keywords):  # no further call per step
        return method
    wanted = [name for name in keywords if name in named]

    def hook(**data: Any) -> Any:
        return method(**{name: data[name] for name in wanted})

    hook.__wrapped__ = method  # type: ignore[attr-defined]
    return hook


def build_callbacks(value: Any) -> list[Any]:
    """Return the Trainer's `callbacks` (None, one callback or several) as a list.

    Raises:
        ModuleContractError: An entry is a class or not a callback.
    """
    if value is None:
        return []
    callbacks: list[Callback] = []
    for callback in value if isinstance(value, list | tuple) else [value]:
        if isinstance(callback, type):  # the parentheses are missing: its methods would be called without `self`
            got, do = f"the class {callback.__name__}", f"callbacks={callback.__name__}()"
            raise fail(ModuleContractError, "Trainer(callbacks=...)", got=got, expected="an instance", do=do)
        adapted = callback
        if not isinstance(callback, Callback):
            from accmt.registry import addon

            adapted = addon("adapt_callback")(callback)
        callbacks.append(adapted)
    return callbacks
