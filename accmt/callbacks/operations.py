"""Model FLOPs utilization: what share of a device's peak the operations of the model make up."""

from __future__ import annotations

from typing import Any

import torch

from accmt.callbacks.base import MainProcessCallback
from accmt.callbacks.stopwatch import Stopwatch
from accmt.messages import warn
from accmt.processes import num_data_processes, num_processes

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
"""Dense operations a second in 16 bits, by what the device's name contains; the first that fits.

Source: the data sheets on https://www.nvidia.com/en-us/data-center/
"""


class ModelOperations(MainProcessCallback):
    """Counts the operations of the first step's batches, and takes those of others to be as many a sample.

    Args:
        stopwatch: Tells the time in which the run trained.
        peak: Operations a second of one device; None looks it up by the device's name.

    Processes: main only; the others' work is taken to be alike.

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
            warn(f"monitor: mfu is not measured, for the peak of this device ({name}) is not known: mfu=312e12, say")
        elif self.trainer.settings.running.compiles:
            self._peak = 0.0
            warn("monitor: mfu is not measured, for the operations of a compiled model cannot be counted")

    def on_before_training_step(self) -> None:
        if self._peak and self._per_sample is None and self._counter is None:
            from torch.utils.flop_counter import FlopCounterMode

            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_update_end(self) -> None:
        samples = self.state.samples_seen - self._first_samples
        counter = self._stop()
        if counter is not None and samples:
            # Operations on a tensor that is split are counted as a whole, on each process that has a part of it.
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
