"""What a run measures of itself: each part adds its values to the rows of training values, and reads nothing before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accmt.callbacks.base import Callback, MainProcessCallback
from accmt.callbacks.operations import ModelOperations
from accmt.callbacks.stopwatch import Stopwatch, StopwatchOfCallbacks
from accmt.callbacks.utilization import CpuUse, GpuUse
from accmt.options.monitor import Monitor
from accmt.processes import num_data_processes
from accmt.registry import find
from accmt.sharded_tensors import total_norm


class LearningRate(MainProcessCallback):
    """Measures the learning rate, of each group of parameters, that the next step takes."""

    def measure(self) -> dict[str, float]:
        rates = [float(group["lr"]) for group in self.module.optimizer.param_groups]
        if len(rates) == 1:
            return {"learning_rate": rates[0]}
        return {f"learning_rate_{number}": rate for number, rate in enumerate(rates)}


class GradientNorm(Callback):
    """Measures the norm of the gradient before clipping, of those steps only that end a row.

    Args:
        order: Of the norm; infinite is the largest element.

    Processes: all; gradients are reduced before, and where each holds a part of them, their norm is made of all parts.
    """

    def __init__(self, order: float) -> None:
        self._order_of_norm = order
        self._norm: torch.Tensor | None = None

    def on_fit_start(self) -> None:
        self.trainer.run.stepper.before_clipping = self._take

    def measure(self) -> dict[str, float]:
        norm, self._norm = self._norm, None
        return {} if norm is None else {"grad_norm": float(norm)}

    def _take(self, parameters: list[nn.Parameter]) -> None:
        every = self.trainer.settings.tracking.log_steps
        may_end_row = every == -1 or (self.state.global_step + 1) % every == 0 or self.state.is_last_training_batch
        if may_end_row:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            self._norm = total_norm(gradients, self._order_of_norm)


class Epochs(MainProcessCallback):
    """Measures how many epochs are done, with the fraction of the current one."""

    def measure(self) -> dict[str, float]:
        num_micro_batches = self.trainer.run.train_loader.source.num_micro_batches
        return {"epoch": self.state.epoch + (self.state.train_step / num_micro_batches if num_micro_batches else 0.0)}


class Throughput(MainProcessCallback):
    """Measures what is trained on in a second, since the last row, by all processes.

    Args:
        stopwatch: Tells the time in which the run trained.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._tokens = 0
        self._before: dict[str, float] = {}
        self._before_s = 0.0
        self._padded_before = 0

    def on_fit_start(self) -> None:
        self._before, self._before_s = self._counts(), self._stopwatch.training_s

    def on_before_training_step(self, batch: Any) -> None:
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(tokens, torch.Tensor):
            # Padding included; other processes are taken to have as many, which saves asking them.
            self._tokens += tokens.numel() * num_data_processes()

    def measure(self) -> dict[str, float]:
        counts, now_s = self._counts(), self._stopwatch.training_s
        before, passed_s = self._before, now_s - self._before_s
        self._before, self._before_s = counts, now_s
        done = {name: _since(n, before.get(name, 0)) for name, n in counts.items()}
        rates = {f"{name}_per_s": n / passed_s for name, n in done.items() if passed_s > 0}
        return rates | self._padding(done.get("real_tokens", 0))

    def _padding(self, real: float) -> dict[str, float]:
        """Return the share of padding since the last row, where a token budget knows it."""
        padded = getattr(self.trainer.run.train_loader.maker, "padded_tokens", 0)
        done, self._padded_before = _since(padded, self._padded_before), padded
        return {"padding": 1 - real / done} if done else {}

    def _counts(self) -> dict[str, float]:
        tokens = {"tokens": self._tokens} if self._tokens else {}
        real = getattr(self.trainer.run.train_loader.maker, "real_tokens", None)
        tokens |= {} if real is None else {"real_tokens": real}
        batches = self.state.batch_iteration * num_data_processes()
        return {"samples": self.state.samples_seen, "batches": batches, **tokens}


def _since(number: float, before: float) -> float:
    """Return what was counted since; loaders that are reloaded count from 0 again."""
    return number - before if number >= before else number


class TimeSplit(MainProcessCallback):
    """Measures what the time since the last row was spent on.

    Args:
        stopwatch: Knows.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._before = dict(stopwatch.seconds)

    def measure(self) -> dict[str, float]:
        now, before = dict(self._stopwatch.seconds), self._before
        self._before = now
        return {f"seconds_{purpose}": seconds - before[purpose] for purpose, seconds in now.items()}


class CheckpointRows(MainProcessCallback):
    """Makes a row of each checkpoint, so that it is seen where it was taken."""

    def on_save_checkpoint(self) -> None:
        step = self.state.global_step
        for hook in self.trainer.run.hooks.on_log:
            hook(values={"checkpoint": float(step)}, step=step)


class Measurements(Callback):
    """Adds what is measured to the rows of training values, before any other callback sees them.

    Args:
        measures: What is measured; each has a method `measure`.
        loss_name: The training loss, which only those rows have.
    """

    order = -math.inf

    def __init__(self, measures: list[Any], loss_name: str) -> None:
        self._measures = measures
        self._loss_name = loss_name

    def on_log(self, values: dict[str, float]) -> None:
        if self._loss_name in values and not self.state.now.is_evaluating:
            for measure in self._measures:
                values.update(measure.measure())


def build_monitor(monitor: Monitor, loss_name: str, *, is_main_process: bool) -> tuple[list[Callback], list[Callback]]:
    """Return the callbacks that measure what a monitor asks for; none where it asks for nothing.

    Args:
        monitor: What to measure.
        loss_name: The training loss in the rows.
        is_main_process: Elsewhere, only what needs all processes is measured.

    Returns:
        Those to stand before, and those to stand after all others.
    """
    stopwatch = Stopwatch()
    order = monitor.norm_order
    measures: list[Callback] = [
        *([GradientNorm(order)] if order is not None else []),
        *([LearningRate()] if monitor.learning_rate else []),
        *([Epochs()] if monitor.epoch else []),
        *([Throughput(stopwatch)] if monitor.throughput else []),
        *([TimeSplit(stopwatch)] if monitor.time_split else []),
        *([ModelOperations(stopwatch, None if monitor.mfu is True else monitor.mfu)] if monitor.mfu else []),
        *([CpuUse()] if monitor.cpu_utilization else []),
        *([GpuUse()] if monitor.gpu_utilization else []),
        *(find("accmt.monitored_values", name)() for name in monitor.added),
    ]
    acting = [measure for measure in measures if is_main_process or not isinstance(measure, MainProcessCallback)]
    first: list[Callback] = [*measures, Measurements(acting, loss_name)] if measures else []
    last: list[Callback] = []
    if monitor.throughput or monitor.time_split or monitor.mfu:
        first, last = [stopwatch, *first], [StopwatchOfCallbacks(stopwatch)]
    if monitor.checkpoint:
        last.insert(0, CheckpointRows())
    return first, last
