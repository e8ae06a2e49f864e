"""How much of the machine a run uses: processors, memory, GPUs, and the share of a device's peak (MFU)."""

from __future__ import annotations

import math
from time import monotonic, sleep
from typing import Any

import torch

from accmt.callbacks import MainProcessCallback
from accmt.callbacks.monitor import Stopwatch
from accmt.messages import warn, warn_once
from accmt.processes import num_data_processes, num_processes

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


# ---- Model FLOPs utilization


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
