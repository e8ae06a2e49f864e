"""`Trainer.tune`: finds a batch size that fits in memory and an initial learning rate with short trial runs."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from accmt.callbacks import StatelessCallback
from accmt.checks.table import require_module
from accmt.errors import ArgumentError, fail, is_out_of_memory
from accmt.loaders import find_train_data
from accmt.messages import say, warn
from accmt.module import AcceleratorModule
from accmt.options import Settings
from accmt.options.settings import without_traces
from accmt.processes import broadcast_object, num_data_processes
from accmt.run.restart import Restart, free_finished
from accmt.setup.torch_flags import working

if TYPE_CHECKING:
    from accmt import Trainer

Search = Literal["power", "binsearch"]

_STEPS = 3  # the third has the optimizer's memory, and what the allocator keeps
_MAX_SIZE = 2**20
_DIVERGED = 4.0
_SMOOTHING = 0.9
_QUIET: dict[str, Any] = {"verbose": False, "max_time": None, "enable_model_summary": False, "profiler": None}


@dataclass(frozen=True)
class Tuning:
    """The result of `Trainer.tune`.

    Attributes:
        batch_size: The training batch size per process that fits in memory; None if it was not searched.
        lr: The learning rate at which the loss falls fastest; None if it was not searched, or the loss never fell.
        curve: (learning rate, training loss) of each step of the search.
    """

    batch_size: int | None = None
    lr: float | None = None
    curve: tuple[tuple[float, float], ...] = ()


def tune(
    trainer: Trainer,
    module: AcceleratorModule,
    train_dataset: Any,
    search: Search | None,
    rates: tuple[float, float, int] | None,
) -> Tuning:
    """Implement `Trainer.tune`.

    Args:
        trainer: The Trainer; its hyper-parameters are updated with the results.
        module: The module.
        train_dataset: As for `fit`.
        search: How to search for a batch size; None skips it.
        rates: The lowest and highest learning rate and the number of steps; None skips the search.
    """
    if trainer.settings.running.fast_dev_run:
        return Tuning()
    require_module(module, "tune")
    hps = trainer.settings.hps
    module.trainer, module.state = trainer, trainer.state  # its dataloaders may need them
    data = find_train_data(module, train_dataset, hps)
    size, rate, curve = None, None, list[tuple[float, float]]()
    with working(trainer.settings.running):
        if search is not None:
            if search not in ("power", "binsearch"):
                expected, do = '"power", "binsearch" or None', 'batch_size="power"'
                raise fail(ArgumentError, "Trainer.tune(batch_size=...)", got=repr(search), expected=expected, do=do)
            if trainer.settings.hps.packing:
                got, expected = "packing in the hyper-parameters", "batches whose memory depends on batch_size"
                do = "set max_tokens, the number of tokens per row, to what fits, and leave out batch_size"
                raise fail(ArgumentError, "Trainer.tune(batch_size=...)", got=got, expected=expected, do=do)
            try:
                limit = max(1, len(data) // num_data_processes())
            except (TypeError, NotImplementedError):
                limit = _MAX_SIZE
            start = hps.train_batch_size
            size = find_batch_size(lambda size: _fits_in_memory(trainer, module, data, size), start, limit, search)
            hps.set_train_batch_size(size)
            say(f"tune: batches of {size} samples fit in memory")
        if rates is not None:
            curve = sweep_rates(trainer, module, data, *rates)
            rate = suggest_rate(curve)
            if rate is None:
                lr = hps.optim_kwargs.get("lr")
                warn(f"tune: the loss does not fall at any learning rate; lr stays at {lr}")
            else:
                hps.set_learning_rate(rate)
                say(f"tune: the loss falls fastest at lr {rate:.3g}")
    return Tuning(size, rate, tuple(curve))


def find_batch_size(fits: Callable[[int], bool], start: int, limit: int, search: Search) -> int:
    """Return a batch size that fits in memory.

    "power" doubles `start` until it does not fit (or halves it until it does); "binsearch" then searches between the
    two for the largest that fits.

    Args:
        fits: Returns whether a size fits.
        start: The first size to try.
        limit: The largest size to try.
        search: The search method.

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
        got, do = "out of memory with a single sample", "use a smaller model, mixed_precision or gradient_checkpointing"
        raise fail(ArgumentError, "Trainer.tune(batch_size=...)", got=got, expected="a batch that fits", do=do)
    return good


def _fits_in_memory(trainer: Trainer, module: AcceleratorModule, data: Any, size: int) -> bool:
    """Train a few steps with a batch size, and return whether it fits.

    Processes: collective; it must fit on all.
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


class _EndIfSmaller(StatelessCallback):
    """Ends a trial whose batch size does not fit; it would otherwise continue with ever smaller micro-batches.

    Batch norm cannot train on a single sample.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def on_fit_start(self) -> None:
        if self.trainer.train_step_batch_size < self._size:
            raise Restart  # with no checkpoint to continue from


def sweep_rates(
    trainer: Trainer, module: AcceleratorModule, data: Any, lowest: float, highest: float, steps: int
) -> list[tuple[float, float]]:
    """Train with an exponentially increasing learning rate until the loss diverges.

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
    """Return the learning rate at which the loss falls fastest; None if it never falls.

    This fits a straight line to each window of a quarter of the curve, over the logarithm of the learning rate, because
    the noise between batches is larger than the change from one step to the next. It returns the middle of the steepest
    window.

    Args:
        curve: (learning rate, loss) pairs with increasing learning rates.
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


class _Sweep(StatelessCallback):
    """Increases the learning rate before each step, and records the losses."""

    def __init__(self, lowest: float, highest: float, steps: int) -> None:
        self.curve: list[tuple[float, float]] = []
        self._rates = np.geomspace(lowest, highest, steps).tolist()
        self._mean = self._lowest = math.inf

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        rate = self._rates[min(self.state.global_step, len(self._rates) - 1)]
        begin = self.trainer.settings.hps.learning_rate
        for group in optimizer.param_groups:
            is_of_hps = "name" in group and begin  # keep the ratio between its learning rate and that of `optim`
            own = rate * (group["initial_lr"] / begin if is_of_hps else 1.0)
            if isinstance(group["lr"], torch.Tensor):  # needed by some compiled optimizers
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
    """Return a copy of the hyper-parameters for a short run, with some values changed."""
    hps = copy.copy(settings.hps)
    for name, value in {"epochs": -1, "step_scheduler_per_epoch": False, **changes}.items():
        setattr(hps, name, value)
    return hps


def _try(trainer: Trainer, module: AcceleratorModule, data: Any, *, callbacks: Any = None, **groups: Any) -> Trainer:
    """Run with other settings, without validation, files and trackers, then restore the module's weights."""
    before = {name: tensor.detach().cpu().clone() for name, tensor in module.model.state_dict().items()}
    is_training, trial = module.model.training, copy.copy(trainer)
    with tempfile.TemporaryDirectory() as folder:
        trial.settings = _quiet(trainer.settings, Path(folder), callbacks, groups)
        trial.__dict__.update(registered_savings=[], chosen_checkpoint=None, _run=None)
        try:
            trial.fit(module, data)
        finally:
            if trial._run is not None:
                free_finished(trial.run.stepper.optimizer)
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
