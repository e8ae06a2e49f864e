"""`Trainer.tune`: finds a batch size that fits in memory, and a learning rate to begin with, in short trial fits."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from accmt.callbacks import Callback
from accmt.errors import ArgumentError, explain, is_out_of_memory
from accmt.messages import say, warn
from accmt.module import AcceleratorModule
from accmt.options import HyperParameters, Settings
from accmt.options.trial_runs import without_traces
from accmt.processes import broadcast_object, num_data_processes
from accmt.protocols import TrainerProtocol
from accmt.recovery.restart import Restart, free_finished
from accmt.setup.datasets import find_train_data
from accmt.setup.module_checks import require_module
from accmt.setup.torch_flags import working

Search = Literal["power", "binsearch"]

_STEPS = 3  # the third has the optimizer's memory, and what the allocator keeps
_MAX_SIZE = 2**20
_DIVERGED = 4.0
_SMOOTHING = 0.9
_QUIET: dict[str, Any] = {"verbose": False, "max_time": None, "enable_model_summary": False, "profiler": None}


@dataclass(frozen=True)
class Tuning:
    """What `Trainer.tune` found.

    Attributes:
        batch_size: Training samples of a batch on one process that fit; None if that was not asked for.
        lr: The learning rate at which the loss falls fastest; None if that was not asked for, or nothing fell.
        curve: (learning rate, training loss) of each step of the search for it.
    """

    batch_size: int | None = None
    lr: float | None = None
    curve: tuple[tuple[float, float], ...] = ()


def tune(
    trainer: TrainerProtocol,
    module: AcceleratorModule,
    train_dataset: Any,
    search: Search | None,
    rates: tuple[float, float, int] | None,
) -> Tuning:
    """Do what `Trainer.tune` says.

    Args:
        trainer: Its hyper-parameters get what is found.
        module: The module.
        train_dataset: As for `fit`.
        search: How to look for a batch size; None does not.
        rates: The lowest and the highest learning rate and the steps in between; None does not look for one.
    """
    if trainer.settings.running.fast_dev_run:
        return Tuning()
    require_module(module, "tune")
    hps = trainer.settings.hps
    module.trainer, module.state = trainer, trainer.state  # which its own loaders may go by
    data = find_train_data(module, train_dataset)
    size, rate, curve = None, None, list[tuple[float, float]]()
    with working(trainer.settings.running):
        if search is not None:
            size = _search_batch_size(trainer, module, data, search)
            hps.set_train_batch_size(size)
            say(f"tune: batches of {size} samples fit")
        if rates is not None:
            curve = sweep_rates(trainer, module, data, *rates)
            rate = suggest_rate(curve)
            _take_rate(hps, rate)
    return Tuning(size, rate, tuple(curve))


def _search_batch_size(trainer: TrainerProtocol, module: AcceleratorModule, data: Any, search: Search) -> int:
    if search not in ("power", "binsearch"):
        expected, do = '"power", "binsearch" or None', 'batch_size="power"'
        raise ArgumentError(explain("Trainer.tune(batch_size=...)", repr(search), expected, do))
    if trainer.settings.hps.packing:
        got, expected = "packing in the hyper-parameters", "batches whose memory their size decides"
        do = "set max_tokens, the tokens of a row, to what fits, and leave batch_size out"
        raise ArgumentError(explain("Trainer.tune(batch_size=...)", got, expected, do))
    start, limit = trainer.settings.hps.train_batch_size, _largest_batch(data)
    return find_batch_size(lambda size: _fits_in_memory(trainer, module, data, size), start, limit, search)


def _take_rate(hps: HyperParameters, rate: float | None) -> None:
    if rate is None:
        warn(f"tune: the loss falls at no learning rate, so lr stays {hps.optim_kwargs.get('lr')}")
        return
    hps.set_learning_rate(rate)
    say(f"tune: the loss falls fastest at lr {rate:.3g}")


def find_batch_size(fits: Callable[[int], bool], start: int, limit: int, search: Search) -> int:
    """Return a size of batches that fits in memory.

    "power" doubles `start` until it does not fit (or halves it until it does); "binsearch" then looks between the two
    for the largest that does.

    Args:
        fits: Tries a size.
        start: The first size.
        limit: The largest that makes sense.
        search: How to search.

    Raises:
        ArgumentError: A single sample does not fit.
    """
    good, bad, size = 0, limit + 1, min(start, limit)
    while good < size < bad:
        good, bad = (size, bad) if fits(size) else (good, size)
        size = min(2 * size, limit) if bad > limit else size // 2 if good == 0 else good
    while search == "binsearch" and bad - good > 1 and good > 0:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    if good == 0:
        got, do = "a single sample runs out of memory", "a smaller model, mixed_precision, or gradient_checkpointing"
        raise ArgumentError(explain("Trainer.tune(batch_size=...)", got, "a batch that fits", do))
    return good


def _fits_in_memory(trainer: TrainerProtocol, module: AcceleratorModule, data: Any, size: int) -> bool:
    """Train a few steps with batches of a size, and return whether they fitted.

    Processes: collective; it has to fit on all.
    """
    hps = _changed_hps(
        trainer.settings, batch_size=size, max_steps=_STEPS, max_micro_batch_size="auto", max_tokens=None
    )
    try:
        trial = _try(trainer, module, data, callbacks=_EndIfSmaller(size), hps=hps)
    except Exception as error:
        if is_out_of_memory(error):
            return False
        raise
    return trial.train_step_batch_size == size


class _EndIfSmaller(Callback):
    """Ends a trial of a size that did not fit, which would continue with smaller micro-batches, down to a single one.

    Batch norm cannot train on a single sample.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def on_fit_start(self) -> None:
        if self.trainer.train_step_batch_size < self._size:
            raise Restart  # with no checkpoint to continue from


def sweep_rates(
    trainer: TrainerProtocol, module: AcceleratorModule, data: Any, lowest: float, highest: float, steps: int
) -> list[tuple[float, float]]:
    """Train with a learning rate that rises exponentially from step to step, until the loss diverges.

    Processes: collective.

    Returns:
        (learning rate, training loss over all processes) of each step.

    Source:
        L. N. Smith, Cyclical Learning Rates for Training Neural Networks, https://arxiv.org/abs/1506.01186
    """
    sweep = _Sweep(lowest, highest, steps)
    hps = _changed_hps(trainer.settings, max_steps=steps, scheduler=None, scheduler_class=None, scheduler_kwargs={})
    tracking = replace(trainer.settings.tracking, log_every=1)
    _try(trainer, module, data, callbacks=sweep, hps=hps, tracking=tracking)
    return sweep.curve


def suggest_rate(curve: Sequence[tuple[float, float]]) -> float | None:
    """Return the learning rate at which the loss falls fastest; None where it never falls.

    A straight line is put through each quarter of the curve, over the logarithm of the rate: single batches differ more
    than the loss changes from one to the next. The middle of the steepest is returned.

    Args:
        curve: (learning rate, loss) pairs with rising rates.
    """
    width = max(3, len(curve) // 4)
    rates, losses = np.log([rate for rate, _ in curve]), [loss for _, loss in curve]
    slopes = [
        np.polyfit(rates[begin : begin + width], losses[begin : begin + width], 1)[0]
        for begin in range(len(curve) - width + 1)
    ]
    if not slopes or min(slopes) >= 0:
        return None
    return curve[int(np.argmin(slopes)) + width // 2][0]


class _Sweep(Callback):
    """Raises the learning rate before each step, and records the losses."""

    def __init__(self, lowest: float, highest: float, steps: int) -> None:
        self.curve: list[tuple[float, float]] = []
        self._rates = np.geomspace(lowest, highest, steps).tolist()
        self._mean = self._lowest = math.inf

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        rate = self._rates[min(self.state.global_step, len(self._rates) - 1)]
        begin = self.trainer.settings.hps.learning_rate
        for group in optimizer.param_groups:
            is_of_hps = "name" in group and begin  # its rate keeps its proportion to that of `optim`
            own = rate * (group["initial_lr"] / begin if is_of_hps else 1.0)
            if isinstance(group["lr"], torch.Tensor):  # which some optimizers compile into their step
                group["lr"].fill_(own)
            else:
                group["lr"] = own

    def on_log(self, values: Mapping[str, float], step: int) -> None:
        loss = broadcast_object(values.get(self.trainer.settings.tracking.train_loss_metric_name, math.nan))
        self._mean = loss if not self.curve else _SMOOTHING * self._mean + (1 - _SMOOTHING) * loss
        self._lowest = min(self._lowest, self._mean)
        if not math.isfinite(loss) or self._mean > self._lowest + (_DIVERGED - 1) * abs(self._lowest):
            self.trainer.should_stop = True
        else:
            self.curve.append((self._rates[step - 1], loss))


def _changed_hps(settings: Settings, **changes: Any) -> Any:
    """Return a copy of the hyper-parameters for a short run, with other values."""
    hps = copy.copy(settings.hps)
    for name, value in {"epochs": -1, "step_scheduler_per_epoch": False, **changes}.items():
        setattr(hps, name, value)
    return hps


def _try(
    trainer: TrainerProtocol, module: AcceleratorModule, data: Any, *, callbacks: Any = None, **groups: Any
) -> TrainerProtocol:
    """Run with other settings, without validation, files and trackers, and give the module its weights back."""
    before = {name: tensor.detach().cpu().clone() for name, tensor in module.model.state_dict().items()}
    is_training, trial = module.model.training, copy.copy(trainer)
    with tempfile.TemporaryDirectory() as folder:
        trial.settings = _quiet(trainer.settings, Path(folder), callbacks, groups)
        trial.registered_savings, trial.chosen_checkpoint, trial._run = [], None, None
        try:
            trial.fit(module, data)
        finally:
            if trial._run is not None:
                free_finished(trial.run)
            module.model.load_state_dict(before)
            module.model.train(is_training)
    return trial


def _quiet(settings: Settings, folder: Path, callbacks: Any, groups: dict[str, Any]) -> Settings:
    quiet = without_traces(replace(settings, **groups))
    return replace(
        quiet,
        tracking=replace(quiet.tracking, logging_dir=str(folder / "logs"), run_name="tuning"),
        saving=replace(quiet.saving, model_path=str(folder / "model")),
        data=replace(quiet.data, limit_batches={"train": quiet.data.limits.train, "val": 0}),
        running=replace(quiet.running, **_QUIET, callbacks=callbacks),
        handling=replace(quiet.handling, failures=replace(quiet.failures, on_nonfinite=None, spike_guard=None)),
    )


def _largest_batch(data: Any) -> int:
    """Return how many samples a batch of one process can have at most."""
    try:
        return max(1, len(data) // num_data_processes())
    except (TypeError, NotImplementedError):
        return _MAX_SIZE
