"""Resumes an optimizer and its scheduler under settings that may have changed since the checkpoint.

`Optimizer.load_state_dict` restores the saved arguments (rate, weight decay ...), and `LRScheduler.load_state_dict` the
saved length, so both would silently ignore changed settings. Here, a changed scheduler is replayed instead of patched:
the newly built one takes as many steps as the old one had taken. This ends exactly where a run with the new settings
from its start would be, for any scheduler class.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accmt.errors import CheckpointError, fail
from accmt.optimization.schedulers import SeveralSchedulers
from accmt.options.optimizer_and_scheduler_arguments import build_alike, members_of, state_of

_PROBE = torch.Size((2, 2))

GroupArguments = list[dict[str, Any]]

_DRIVEN = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "max_momentum", "base_momentum"})
"""Entries of parameter groups that schedulers change."""


def group_arguments(optimizer: Optimizer) -> GroupArguments:
    """Return the arguments of each parameter group; before a state is loaded, these are the new settings."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def restore_scheduler(
    optimizer: Optimizer,
    scheduler: Any,
    saved: dict[str, Any] | None,
    built: GroupArguments,
    *,
    changed: Mapping[str, tuple[Any, Any]],
    is_stretched: bool,
) -> list[str]:
    """Restore the scheduler's state and apply changed settings, after the optimizer's state was loaded.

    If nothing has changed, this is `scheduler.load_state_dict(saved)`. Changed optimizer arguments are reset, group by
    group, to the values the optimizer was built with. If the length of the run or an argument that schedulers change
    has changed, rates are from now on those of a run with the new settings from its start; this costs one scheduler
    step for each step taken before (half a second for 100,000). A scheduler that steps on a loss cannot be replayed: it
    continues from its state, and a changed `lr` scales its current rate.

    Args:
        optimizer: The optimizer, with the checkpoint's state.
        scheduler: The newly built scheduler, not stepped yet; None if there is none.
        saved: The checkpoint's scheduler state; None if it had none, and `scheduler` starts at its beginning.
        built: The result of `group_arguments` before the optimizer's state was loaded.
        changed: Changed optimizer arguments: name to (old value, new value).
        is_stretched: Whether the number of steps (or epochs) of the run has changed.

    Returns:
        A line for each argument that differs from the checkpoint but is not in `changed` (for example, after a change
        of `get_optimizer`), so that the checkpoint's value is kept.
    """
    loaded, names, new = group_arguments(optimizer), set(changed), built
    lines: list[str] = []
    steps = 0 if saved is None else _steps_taken(saved)
    is_moved = saved is None or is_stretched or not _DRIVEN.isdisjoint(changed)
    if scheduler is not None and is_moved and steps is not None and _steps_by_itself(scheduler):
        names |= _DRIVEN
        new = _walk(optimizer, scheduler, built, steps)
    elif scheduler is not None and saved is not None:
        lines = _compare_scheduler(scheduler, saved)
        scheduler.load_state_dict(saved)
        if "lr" in changed:  # lowered as much as the scheduler had lowered the old rate
            new = []
            for loaded_group, built_group in zip(loaded, built, strict=True):
                new.append({**built_group, "lr": _scaled_rate(loaded_group, built_group, *changed["lr"])})
    if "lr" in names:  # from which a scheduler computes each rate
        names.add("initial_lr")
    # After the scheduler, which writes into the groups while it is stepped or loaded.
    for group, loaded_group, new_group in zip(optimizer.param_groups, loaded, new, strict=True):
        group.update(loaded_group)
        for name in names & new_group.keys():
            group[name] = new_group[name]
    if changed:
        _add_missing_state(optimizer)
    if not {"fused", "capturable"}.isdisjoint(names):
        _move_step_counts(optimizer)
    names |= _names_of_state(optimizer)
    return lines + _compare_groups(loaded, built, names, has_scheduler=scheduler is not None)


def _move_step_counts(optimizer: Optimizer) -> None:
    """Move step counts to the device of their parameters, where fused kernels and captured graphs need them.

    Source: `Optimizer._process_value_according_to_param_policy` in torch/optim/optimizer.py.
    """
    for group in optimizer.param_groups:
        if not (group.get("fused") or group.get("capturable")):
            continue
        for parameter in group["params"]:
            state = state_of(optimizer).get(parameter, {})
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(device=parameter.device, dtype=torch.float32)


def _names_of_state(optimizer: Optimizer) -> set[str]:
    """Return the entries of groups that are not arguments, but state that changes with the optimizer's steps."""
    arguments: dict[str, inspect.Parameter] = {}
    entries: set[str] = set()
    for member in members_of(optimizer):
        arguments |= inspect.signature(type(member).__init__).parameters
        entries.update(getattr(member, "defaults", ()))
    if any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values()):  # any entry may be an argument
        return set()
    return entries - arguments.keys()


def _compare_scheduler(scheduler: Any, saved: Mapping[str, Any]) -> list[str]:
    """Return a line for each scheduler argument that differs from the checkpoint, whose value is used."""
    lines: list[str] = []
    if isinstance(scheduler, SeveralSchedulers):
        for member, state in zip(scheduler.schedulers, saved["schedulers"], strict=False):
            lines += _compare_scheduler(member, state)
        return lines
    built = scheduler.state_dict()
    for name in inspect.signature(type(scheduler).__init__).parameters:
        # `last_epoch` is an argument, but counts the steps.
        if name == "last_epoch" or name not in built or name not in saved:
            continue
        if not _is_same(saved[name], built[name]):
            where = f"{name} of the scheduler {type(scheduler).__name__}"
            lines.append(f"{where}: keeping the checkpoint's {saved[name]!r} instead of the new {built[name]!r}")
    return lines


def _steps_taken(saved: Mapping[str, Any]) -> int | None:
    """Return how many steps a scheduler has taken; for chained schedulers, only the inner ones count."""
    if "last_epoch" in saved:
        return int(saved["last_epoch"])
    chained = saved.get("_schedulers")  # of torch's SequentialLR and ChainedScheduler
    if not chained:
        return None
    return _steps_taken(chained[0])


def _steps_by_itself(scheduler: Any) -> bool:
    """Return whether a scheduler depends only on its steps, not on a loss."""
    if not isinstance(scheduler, LRScheduler):
        return False
    for parameter in inspect.signature(scheduler.step).parameters.values():
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            return False
    return True


def _walk(optimizer: Optimizer, scheduler: LRScheduler, built: GroupArguments, steps: int) -> GroupArguments:
    """Step a newly built scheduler from its start, and return the resulting arguments."""
    for group, arguments in zip(optimizer.param_groups, built, strict=True):
        group.update(arguments)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*lr_scheduler.step")  # torch expects optimizer steps in between
        for _ in range(steps):
            scheduler.step()
    return group_arguments(optimizer)


def _scaled_rate(loaded: Mapping[str, Any], built: Mapping[str, Any], old: Any, new: Any) -> Any:
    if "initial_lr" in loaded and "initial_lr" in built:  # a group of hyper-parameters
        old, new = loaded["initial_lr"], built["initial_lr"]
    elif old is None and new is None:  # only arguments of groups have changed
        return loaded["lr"]
    if not old or new is None:  # a rate of 0 cannot be scaled, nor can Adafactor's, which it computes itself
        return built["lr"]
    return loaded["lr"] * (new / old)


def _add_missing_state(optimizer: Optimizer) -> None:
    """Add entries that changed arguments such as `amsgrad` require to the state, with their initial values.

    A step of a new optimizer of the same class on a few numbers with zero gradients shows these values.

    Raises:
        CheckpointError: They are not zeros.
    """
    for member in members_of(optimizer):
        for group in member.param_groups:
            first_states: dict[Any, dict[str, Any]] = {}
            for parameter in group["params"]:
                entries, kind = state_of(optimizer).get(parameter), (parameter.dtype, parameter.device)
                if not entries:  # frozen until now: its first step makes all of them
                    continue
                if kind not in first_states:
                    first_states[kind] = _first_state(member, group, *kind)
                first_state = first_states[kind]
                for name in first_state.keys() - entries.keys():
                    entries[name] = _begin(first_state[name], parameter, f"{name!r} of {type(member).__name__}")


def _first_state(
    optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Return a weight's state after the first step, with a zero gradient."""
    weight = torch.nn.Parameter(torch.zeros(_PROBE, dtype=dtype, device=device))
    weight.grad = torch.zeros_like(weight)
    try:
        alike = build_alike(optimizer, group, weight)
        alike.step()
    except Exception:  # noqa: BLE001 - one that takes no such weight or arguments shows nothing here
        return {}
    return dict(state_of(alike).get(weight, {}))


def _begin(entry: Any, parameter: torch.Tensor, what: str) -> torch.Tensor:
    if isinstance(entry, torch.Tensor) and entry.shape == _PROBE and not entry.any():
        return torch.zeros_like(parameter, dtype=entry.dtype, requires_grad=False)
    got = f"no {what}, which a changed argument requires"
    reset = 'Trainer(checkpoint_options={"reset_optimizer_on_resume": True})'
    do = f"undo the change, or start with a new optimizer: {reset}"
    raise fail(
        CheckpointError, "the optimizer's state", got=got, expected="all entries that the optimizer needs", do=do
    )


def _compare_groups(
    loaded: GroupArguments, built: GroupArguments, ignored: set[str], *, has_scheduler: bool
) -> list[str]:
    """Return a line per argument whose checkpoint value differs from the new one, unless a scheduler changes it."""
    lines: dict[str, str] = {}
    for number, (loaded_group, built_group) in enumerate(zip(loaded, built, strict=True)):
        driven = {"lr"} if has_scheduler else set()
        if "max_momentum" in loaded_group:  # of OneCycleLR and CyclicLR
            driven |= {"momentum", "betas"}
        for name in (loaded_group.keys() & built_group.keys()) - ignored - driven - lines.keys():
            old, new = loaded_group[name], built_group[name]
            if not _is_same(old, new):
                where = f"{name} of the optimizer's parameter group {number}"
                lines[name] = f"{where}: keeping the checkpoint's {old} instead of the new {new}"
    return [lines[name] for name in sorted(lines)]


def _is_same(old: Any, new: Any) -> bool:
    if isinstance(old, Sequence) and isinstance(new, Sequence):  # betas from YAML are a list, the default is a tuple
        return list(old) == list(new)
    return bool(old == new)
