"""How busy and how full processor and GPUs are, looked at twice a second at most, however often rows are logged."""

from __future__ import annotations

import math
from time import monotonic, sleep
from typing import Any

import torch

from accmt.callbacks.base import MainProcessCallback
from accmt.messages import warn, warn_once

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_OF_FIRST_LOOK = 0.1
GB = 1e9


class Use(MainProcessCallback):
    """Measures something that changes slowly; in between, rows get what was seen last.

    Processes: main only.
    """

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        self._next_look = -math.inf

    def look(self) -> dict[str, float]:
        """Return what is measured now."""
        raise NotImplementedError

    def measure(self) -> dict[str, float]:
        if monotonic() >= self._next_look:
            self._seen = self.look()
            self._next_look = monotonic() + SECONDS_BETWEEN_LOOKS
        return self._seen


class CpuUse(Use):
    """Measures the use of processor and memory."""

    def on_fit_start(self) -> None:
        import psutil

        self._process = psutil.Process()
        psutil.cpu_percent()  # what it returns is the use since the last call: this one only begins to measure
        sleep(SECONDS_OF_FIRST_LOOK)
        self.measure()

    def look(self) -> dict[str, float]:
        """Return the memory of this process in GB, and the use of all cores and of the machine's memory in percent."""
        import psutil

        resident = self._process.memory_info().rss / GB
        return {"CPU_PROCESS_0": resident, "CPU": psutil.cpu_percent(), "RAM": psutil.virtual_memory().percent}


class GpuUse(Use):
    """Measures the use of the main process's GPU as torch sees it, and of all GPUs of the machine as their driver does.

    Source:
        https://docs.nvidia.com/deploy/nvml-api/ for the driver's figures.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gpus: list[Any] = []

    def on_fit_start(self) -> None:
        if not torch.cuda.is_available():
            warn("monitor: gpu_utilization measures nothing, for there is no GPU; leave it out")
            return
        try:
            import pynvml
        except ImportError:
            warn("monitor: memory and use of all GPUs are not measured without nvidia-ml-py: pip install nvidia-ml-py")
            return
        try:
            pynvml.nvmlInit()
            self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:  # as in containers and virtual machines that have no such access
            warn(f"monitor: memory and use of all GPUs are not measured: the driver answers: {error}")

    def look(self) -> dict[str, float]:
        """Return memory in GB, and use in percent, of each GPU."""
        if not torch.cuda.is_available():
            return {}
        own = torch.cuda.current_device()
        values = {
            f"GPU_{own}": torch.cuda.memory_reserved() / GB,
            f"GPU_{own}_allocated": torch.cuda.memory_allocated() / GB,
        }
        return values | self._ask_driver()

    def _ask_driver(self) -> dict[str, float]:
        values = {}
        for number, gpu in enumerate(self._gpus):
            import pynvml

            try:
                values[f"GPU_{number}_used"] = pynvml.nvmlDeviceGetMemoryInfo(gpu).used / GB
                values[f"GPU_{number}_utilization"] = float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
            except pynvml.NVMLError as error:  # a part of a GPU (MIG) tells its memory only
                warn_once(f"monitor: not all of GPU_{number} is measured: the driver answers: {error}", about="NVML")
        return values
