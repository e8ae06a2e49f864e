"""Measurements of a run; each class adds its values to the training rows, and reads tensors only then."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic, perf_counter, sleep
from typing import Any, NamedTuple

import torch
from torch import nn

from accmt.callbacks import Callback, MainProcessCallback
from accmt.messages import warn, warn_once
from accmt.options.tracking import Monitor
from accmt.processes import num_data_processes, num_processes
from accmt.registry import MONITORED_VALUES, find

# ---- CPU and GPU utilization, sampled at most twice a second


SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_OF_FIRST_LOOK = 0.1
GB = 1e9


class Use(MainProcessCallback):
    """Measures something that changes slowly; rows in between repeat the last measurement.

    Processes: main only.
    """

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        self._next_look = -math.inf

    def look(self) -> dict[str, float]:
        """Return the current measurements."""
        raise NotImplementedError

    def measure(self) -> dict[str, float]:
        if monotonic() >= self._next_look:
            self._seen = self.look()
            self._next_look = monotonic() + SECONDS_BETWEEN_LOOKS
        return self._seen


class CpuUse(Use):
    """Measures CPU and memory usage."""

    def on_fit_start(self) -> None:
        import psutil

        self._process = psutil.Process()
        psutil.cpu_percent()  # returns the usage since the last call; this first call only starts the measurement
        sleep(SECONDS_OF_FIRST_LOOK)
        self.measure()

    def look(self) -> dict[str, float]:
        """Return the memory of this process in GB, and CPU and RAM usage of the machine in percent."""
        import psutil

        resident = self._process.memory_info().rss / GB
        return {"CPU_PROCESS_0": resident, "CPU": psutil.cpu_percent(), "RAM": psutil.virtual_memory().percent}


class GpuUse(Use):
    """Measures the main process's GPU as reported by torch, and all GPUs of the machine as reported by the driver.

    Source:
        https://docs.nvidia.com/deploy/nvml-api/ for the driver's figures.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gpus: list[Any] = []

    def on_fit_start(self) -> None:
        if not torch.cuda.is_available():
            warn("monitor: gpu_utilization has no effect because there is no GPU; leave it out")
            return
        try:
            import pynvml
        except ImportError:
            warn("monitor: GPU memory and utilization are not measured without nvidia-ml-py: pip install nvidia-ml-py")
            return
        try:
            pynvml.nvmlInit()
            self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:  # for example in containers and virtual machines without this access
            warn(f"monitor: GPU memory and utilization are not measured; the driver returned: {error}")

    def look(self) -> dict[str, float]:
        """Return memory in GB and utilization in percent of each GPU."""
        if not torch.cuda.is_available():
            return {}
        own = torch.cuda.current_device()
        values = {
            f"GPU_{own}": torch.cuda.memory_reserved() / GB,
            f"GPU_{own}_allocated": torch.cuda.memory_allocated() / GB,
        }
        for number, gpu in enumerate(self._gpus):
            import pynvml

            try:
                values[f"GPU_{number}_used"] = pynvml.nvmlDeviceGetMemoryInfo(gpu).used / GB
                values[f"GPU_{number}_utilization"] = float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
            except pynvml.NVMLError as error:  # a MIG instance reports its memory only
                warn_once(f"monitor: GPU_{number} is only partly measured; the driver returned: {error}", about="NVML")
        return values


# ---- Time per phase, measured in hooks so that the loop needs no clock


PURPOSES = ("data", "compute", "evaluation", "saving", "other")


class Moment(NamedTuple):
    """How a hook assigns the time around it to phases.

    Attributes:
        before: The phase before the hook, unless another one is known to be active.
        after: The phase after the hook; None if the next hook determines it.
        callbacks: The phase of the callbacks at this hook.
        is_certain: Whether `before` applies even if another phase is active.
        interrupts: Whether the phase before the hook continues after it.
    """

    before: str
    after: str | None = None
    callbacks: str = "other"
    is_certain: bool = False
    interrupts: bool = False


MOMENTS: dict[str, Moment] = {
    "on_fit_start": Moment("other"),
    "on_epoch_start": Moment("other"),
    "on_before_training_step": Moment("data"),
    "on_after_training_step": Moment("compute"),
    "on_update_end": Moment("compute"),
    "on_log": Moment("compute", interrupts=True),  # reading a row waits for the device
    "on_evaluation_start": Moment("other", after="evaluation"),
    "on_evaluation_end": Moment("evaluation"),
    "on_save_model": Moment("saving", is_certain=True, interrupts=True),
    "on_save_checkpoint": Moment("saving", is_certain=True, interrupts=True),
    "on_epoch_end": Moment("other"),
}
"""Checkpoints are written in the background; "saving" is only the time for which training pauses."""


class Stopwatch(MainProcessCallback):
    """Adds up seconds by phase; the time between two hooks belongs to one phase.

    A `StopwatchOfCallbacks` measures the time of the callbacks between the two. Where the device runs asynchronously,
    the host waits for it when a row is read.

    Args:
        moments: The hooks at which time is taken.
        purposes: All phases that these use.

    Attributes:
        seconds: Seconds since the start of the run, by phase.
    """

    order = -math.inf

    def __init__(self, moments: Mapping[str, Moment] = MOMENTS, purposes: Sequence[str] = PURPOSES) -> None:
        self.seconds = dict.fromkeys(purposes, 0.0)
        self.moments = moments
        self._last: float | None = None
        self._in_work: str | None = None
        self._interrupted: list[str | None] = []
        for hook in moments:
            setattr(self, hook, partial(self.arrive, hook))

    def lap(self, purpose: str) -> float:
        """Add the time since the last lap to a phase, and return it in seconds; the first lap starts the clock."""
        now = perf_counter()
        passed = 0.0 if self._last is None else now - self._last
        self.seconds[purpose] += passed
        self._last = now
        return passed

    def arrive(self, hook: str) -> None:
        """End the phase before a hook and start that of its callbacks."""
        moment = self.moments[hook]
        self.lap(moment.before if moment.is_certain or self._in_work is None else self._in_work)
        self._interrupted.append(self._in_work)
        self._in_work = moment.callbacks

    def leave(self, hook: str) -> None:
        """End the phase of a hook's callbacks."""
        moment = self.moments[hook]
        self.lap(moment.callbacks)
        interrupted = self._interrupted.pop()
        self._in_work = interrupted if moment.interrupts else moment.after

    @property
    def training_s(self) -> float:
        """Seconds spent on training, without evaluation and saving."""
        return self.seconds["data"] + self.seconds["compute"] + self.seconds["other"]


class StopwatchOfCallbacks(MainProcessCallback):
    """Measures the time of the callbacks between a stopwatch and itself.

    Args:
        stopwatch: The stopwatch, which runs before all other callbacks; this one runs after them.
    """

    order = math.inf

    def __init__(self, stopwatch: Stopwatch) -> None:
        for hook in stopwatch.moments:
            setattr(self, hook, partial(stopwatch.leave, hook))


# ---- Model FLOPs utilization, gradient norm, throughput and other values


PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""Peak dense 16-bit FLOPS by a substring of the device's name; the first match applies.

Source: the data sheets on https://www.nvidia.com/en-us/data-center/
"""


class ModelOperations(MainProcessCallback):
    """Counts the FLOPs of the first step, and assumes the same number per sample for all others.

    Args:
        stopwatch: Measures the time spent on training.
        peak: FLOPS of one device; None looks it up by the device's name.

    Processes: main only; the others are assumed to do the same amount of work.

    Source:
        https://arxiv.org/abs/2204.02311, appendix B, for the quantity; operations are counted by
        `torch.utils.flop_counter`, so what a model recomputes in backward counts too.
    """

    def __init__(self, stopwatch: Stopwatch, peak: float | None) -> None:
        self._stopwatch = stopwatch
        self._peak = peak or 0.0
        self._counter: Any = None
        self._per_sample: float | None = None
        self._first_samples = self._before = 0
        self._before_s = 0.0

    def on_fit_start(self) -> None:
        self._first_samples = self._before = self.state.samples_seen
        device = self.module.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._peak = self._peak or next((peak for part, peak in PEAKS.items() if part in name), 0.0)
        if not self._peak:
            warn(f"monitor: mfu is not measured: the peak FLOPS of {name} are unknown; set them, e.g. mfu=312e12")
        elif self.trainer.settings.running.compiles:
            self._peak = 0.0
            warn("monitor: mfu is not measured: the FLOPs of a compiled model cannot be counted")

    def on_before_training_step(self) -> None:
        if self._peak and self._per_sample is None and self._counter is None:
            from torch.utils.flop_counter import FlopCounterMode

            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_update_end(self) -> None:
        samples = self.state.samples_seen - self._first_samples
        counter = self._stop()
        if counter is not None and samples:
            # Operations on a sharded tensor are counted in full on each process that has a shard.
            batches = self.state.num_processes * num_data_processes() / num_processes()
            self._per_sample = counter.get_total_flops() * batches / samples

    def on_fit_end(self) -> None:
        self._stop()  # where the first step failed

    def measure(self) -> dict[str, float]:
        now, now_s = self.state.samples_seen, self._stopwatch.training_s
        samples, passed_s = now - self._before, now_s - self._before_s
        self._before, self._before_s = now, now_s
        if self._per_sample is None or passed_s <= 0:
            return {}
        return {"mfu": self._per_sample * samples / passed_s / (self._peak * self.state.num_processes)}

    def _stop(self) -> Any:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)
        return counter


class LearningRate(MainProcessCallback):
    """Logs the learning rate of the next step for each parameter group."""

    def measure(self) -> dict[str, float]:
        rates = [float(group["lr"]) for group in self.module.optimizer.param_groups]
        if len(rates) == 1:
            return {"learning_rate": rates[0]}
        return {f"learning_rate_{number}": rate for number, rate in enumerate(rates)}


class GradientNorm(Callback):
    """Measures the gradient norm before clipping, only at steps that are logged.

    Args:
        order: The order of the norm; infinity gives the largest element.

    Processes: all; gradients are already reduced, and the norm of sharded gradients includes all shards.
    """

    def __init__(self, order: float) -> None:
        self._order_of_norm = order
        self._norm: torch.Tensor | None = None

    def on_fit_start(self) -> None:
        self.trainer.run.stepper.before_clipping(self._take)

    def measure(self) -> dict[str, float]:
        norm, self._norm = self._norm, None
        return {} if norm is None else {"grad_norm": float(norm)}

    def _take(self, parameters: list[nn.Parameter]) -> None:
        every = self.trainer.settings.tracking.log_steps
        is_last = self.state.now.is_last_training_batch  # or a function, which would read on
        may_end_row = every == -1 or (self.state.global_step + 1) % every == 0 or bool(is_last)
        if may_end_row:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            self._norm = self.trainer.run.engine.total_norm(gradients, self._order_of_norm)


class Epochs(MainProcessCallback):
    """Logs the number of completed epochs, including the fraction of the current one."""

    def measure(self) -> dict[str, float]:
        num_micro_batches = self.trainer.run.train_loader.source.num_micro_batches
        return {"epoch": self.state.epoch + (self.state.train_step / num_micro_batches if num_micro_batches else 0.0)}


class Throughput(MainProcessCallback):
    """Measures samples, batches and tokens per second of all processes since the last row.

    Args:
        stopwatch: Measures the time spent on training.
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
            # Includes padding. Other processes are assumed to have as many, which saves a collective.
            self._tokens += tokens.numel() * num_data_processes()

    def measure(self) -> dict[str, float]:
        counts, now_s = self._counts(), self._stopwatch.training_s
        before, passed_s = self._before, now_s - self._before_s
        self._before, self._before_s = counts, now_s
        done = {name: _since(n, before.get(name, 0)) for name, n in counts.items()}
        rates = {f"{name}_per_s": n / passed_s for name, n in done.items() if passed_s > 0}
        # Batches made by a token budget also know the share of padding.
        padded = getattr(self.trainer.run.train_loader.maker, "padded_tokens", 0)
        padded_done, self._padded_before = _since(padded, self._padded_before), padded
        return rates | ({"padding": 1 - done.get("real_tokens", 0) / padded_done} if padded_done else {})

    def _counts(self) -> dict[str, float]:
        tokens = {"tokens": self._tokens} if self._tokens else {}
        real = getattr(self.trainer.run.train_loader.maker, "real_tokens", None)
        tokens |= {} if real is None else {"real_tokens": real}
        batches = self.state.batch_iteration * num_data_processes()
        return {"samples": self.state.samples_seen, "batches": batches, **tokens}


def _since(number: float, before: float) -> float:
    """Return the increase of a counter; reloaded loaders count from 0 again."""
    return number - before if number >= before else number


class TimeSplit(MainProcessCallback):
    """Logs the time per phase since the last row.

    Args:
        stopwatch: Measures the phases.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._before = dict(stopwatch.seconds)

    def measure(self) -> dict[str, float]:
        now, before = dict(self._stopwatch.seconds), self._before
        self._before = now
        return {f"seconds_{purpose}": seconds - before[purpose] for purpose, seconds in now.items()}


class CheckpointRows(MainProcessCallback):
    """Logs a row for each checkpoint, so that plots show when it was saved."""

    def on_save_checkpoint(self) -> None:
        step = self.state.global_step
        for hook in self.trainer.run.hooks.on_log:
            hook(values={"checkpoint": float(step)}, step=step)


class Measurements(Callback):
    """Adds measurements to the training rows before any other callback sees them.

    Args:
        measures: Objects with a method `measure`.
        loss_name: The training loss, which only training rows have.
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
    """Return the callbacks that measure what a monitor selects.

    Args:
        monitor: What to measure.
        loss_name: The name of the training loss in the rows.
        is_main_process: On other processes, only what needs all processes is measured.

    Returns:
        The callbacks to run before all others, and those to run after all others.
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
        *(find(MONITORED_VALUES, name)() for name in monitor.added),
    ]
    acting = [measure for measure in measures if is_main_process or not isinstance(measure, MainProcessCallback)]
    first: list[Callback] = [*measures, Measurements(acting, loss_name)] if measures else []
    last: list[Callback] = []
    if monitor.throughput or monitor.time_split or monitor.mfu:
        first, last = [stopwatch, *first], [StopwatchOfCallbacks(stopwatch)]
    if monitor.checkpoint:
        last.insert(0, CheckpointRows())
    return first, last
