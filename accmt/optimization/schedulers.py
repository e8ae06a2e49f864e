"""Builds the learning-rate scheduler; lengths are in optimizer steps, or in epochs if it is stepped per epoch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accmt.errors import HyperParameterError, fail
from accmt.options import HyperParameters
from accmt.options.optimizer_and_scheduler_arguments import parameters_of, watches_a_result
from accmt.options.optimizer_and_scheduler_names import is_listed

_NEEDS_TOTAL = frozenset({"num_training_steps", "total_steps"})


DEFAULT_MONITOR = "valid_loss"
"""The value that `ReduceLROnPlateau` monitors, unless it has a `monitor`."""


def monitored_by(scheduler: ReduceLROnPlateau) -> str:
    """Return the name of the result that a scheduler monitors."""
    return getattr(scheduler, "monitor", None) or DEFAULT_MONITOR


def build_scheduler(
    hps: HyperParameters,
    optimizer: Optimizer,
    *,
    total_steps: int | None,
    steps_per_epoch: int | None,
    num_epochs: int | None = None,
) -> LRScheduler | None:
    """Build the scheduler of `hps`, stepped once after each optimizer step (or epoch) on any number of processes.

    The learning rate at step k is that of the torch or transformers scheduler after k steps; the schedule ends with
    step `total_steps`.

    Args:
        optimizer: The optimizer whose learning rate is scheduled.
        total_steps: Optimizer steps of the whole run, after limits and accumulation; None if unknown.
        steps_per_epoch: Optimizer steps of one epoch; None if unknown.
        num_epochs: Epochs of the whole run; None computes them from the steps and `steps_per_epoch`.

    Returns:
        The scheduler, or None if `hps` has none.

    Raises:
        HyperParameterError: The scheduler needs a length that is unknown, or rejects its arguments or the optimizer.
    """
    factory = hps.scheduler_class
    if factory is None:
        return None
    # One rate would silently replace the different rates of groups; those of `optim.groups` have a name.
    rates = [group["lr"] for group in optimizer.param_groups if "name" in group]
    absolute = [name for name in ("max_lr", "base_lr") if isinstance(hps.scheduler_kwargs.get(name), int | float)]
    if absolute and len(set(rates)) > 1:
        written = ", ".join(f"{rate:g}" for rate in rates)
        got = f"one {absolute[0]} for groups with different rates: {written}"
        do = f"pass a list of {len(rates)} values in this order, or choose a scheduler that multiplies the rates"
        where = hps.where("scheduler", absolute[0])
        raise fail(HyperParameterError, where, got=got, expected="a rate for each group", do=do)
    lengths = _lengths(hps, total_steps, steps_per_epoch, num_epochs)
    parameters = parameters_of(factory)
    arguments = dict(hps.scheduler_kwargs)
    if "num_warmup_steps" in parameters:
        warmup = arguments.pop("warmup_ratio", arguments.get("num_warmup_steps", 0))
        # `num_warmup_steps: 0.1` is a ratio, too, as in transformers.
        is_ratio = "num_warmup_steps" not in arguments or isinstance(warmup, float)
        if is_ratio and warmup != 0:
            total = lengths["num_training_steps"]
            if total is None:  # a stream
                raise _unknown_length(hps, "warmup_ratio", "use `num_warmup_steps:` instead, or add `max_steps:`")
            # As an exact decimal: 0.1 * 30 would round up to 4.
            warmup = math.ceil(Fraction(str(warmup)) * total)
        arguments["num_warmup_steps"] = int(warmup)
    arguments |= _filled(hps, parameters, arguments, lengths)
    monitor = None
    if watches_a_result(factory):
        monitor = arguments.pop("monitor", None)
    try:
        scheduler: LRScheduler = factory(optimizer, **arguments)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise _refusal(hps, optimizer, error) from error
    if total_steps is None or total_steps > 1:  # else the scheduler is never stepped
        _try_step(hps, optimizer, arguments)
    if monitor is not None:
        scheduler.monitor = monitor  # type: ignore[attr-defined]  # the attribute that a module's get_scheduler sets too
    return scheduler


def _try_step(hps: HyperParameters, optimizer: Optimizer, arguments: dict[str, Any]) -> None:
    """Step another such scheduler once: some divide by an argument of 0 only then, when training has begun.

    Raises:
        HyperParameterError: It does.
    """
    factory = hps.scheduler_class
    rates = [group["lr"] for group in optimizer.param_groups]
    if factory is None or None in rates or not is_listed(factory):
        return
    groups = [{"params": [torch.nn.Parameter(torch.zeros(()))], "lr": float(rate)} for rate in rates]
    trial_optimizer = torch.optim.SGD(groups, momentum=0.9)
    try:
        scheduler = factory(trial_optimizer, **arguments)
        if not isinstance(scheduler, ReduceLROnPlateau):
            trial_optimizer.step()  # torch expects it before a scheduler step
            scheduler.step()
    except ArithmeticError as error:
        zeros = [name for name, value in arguments.items() if isinstance(value, int | float) and value == 0]
        if len(zeros) > 1:  # which of them is wrong is unknown
            zeros = []
        raise _refusal(hps, optimizer, error, *zeros) from error
    except (TypeError, ValueError):  # of SGD: the scheduler is one for the user's optimizer
        return


class SeveralSchedulers:
    """One scheduler for each of several optimizers, with one state.

    Attributes:
        schedulers: The schedulers, in the order in which `get_scheduler` returned them.
    """

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        self.schedulers = tuple(schedulers)

    def step(self) -> None:
        """Step all schedulers."""
        for scheduler in self.schedulers:
            scheduler.step()

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rates of all groups of their optimizers."""
        return list(chain.from_iterable(scheduler.get_last_lr() for scheduler in self.schedulers))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all schedulers."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states of all schedulers."""
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)


def _lengths(
    hps: HyperParameters, total_steps: int | None, steps_per_epoch: int | None, num_epochs: int | None
) -> dict[str, int | None]:
    """Return the lengths of the run in scheduler steps, by the names of schedulers' arguments; None if unknown."""
    epochs = num_epochs
    if num_epochs is None and hps.epochs != -1:  # -1: until `max_steps`
        epochs = hps.epochs
    if num_epochs is None and total_steps is not None and steps_per_epoch is not None:
        epochs = math.ceil(total_steps / steps_per_epoch)
    total = total_steps
    if hps.step_scheduler_per_epoch:
        total, steps_per_epoch = epochs, 1
    lengths = dict.fromkeys(("num_training_steps", "total_steps", "T_max"), total)
    return {**lengths, "epochs": epochs, "steps_per_epoch": steps_per_epoch}


def _filled(
    hps: HyperParameters,
    parameters: dict[str, inspect.Parameter],
    arguments: dict[str, Any],
    lengths: dict[str, int | None],
) -> dict[str, int]:
    """Return the arguments that depend on the run, if the scheduler has them."""
    filled = {}
    for name, value in lengths.items():
        if name not in parameters or name in arguments:  # what the user has set stays
            continue
        if value is not None:
            filled[name] = value
        elif name in _NEEDS_TOTAL or parameters[name].default is inspect.Parameter.empty:
            raise _unknown_length(hps, name, "add `max_steps:`, or choose a scheduler without an end, such as Constant")
    return filled


def _unknown_length(hps: HyperParameters, argument: str, do: str) -> HyperParameterError:
    got = "data without a length, or a window maker: the number of steps is unknown"
    expected = f"a known number of steps, from which {argument} is computed"
    return fail(HyperParameterError, hps.where("scheduler"), got=got, expected=expected, do=do)


def _refusal(hps: HyperParameters, optimizer: Optimizer, error: Exception, *key: str) -> HyperParameterError:
    if any(group["lr"] is None for group in optimizer.param_groups):  # Adafactor: torch's error is one of arithmetic
        got = f"a scheduler for {type(optimizer).__name__} without lr, which chooses its own learning rate"
        expected, do = "a learning rate to schedule", "add `lr:` to optim"
        return fail(HyperParameterError, hps.where("scheduler"), got=got, expected=expected, do=do)
    name = hps.to_dict()["hps"]["scheduler"]["type"]
    expected = f"arguments and an optimizer accepted by {name}"
    do = "correct the arguments, choose another scheduler, or override get_scheduler"
    return fail(HyperParameterError, hps.where("scheduler", *key), got=f"{name}: {error}", expected=expected, do=do)
