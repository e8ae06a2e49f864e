"""The device of a run, tried before anything is built on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from accmt.errors import DeviceError, explain, is_out_of_memory


def touch(device: torch.device) -> None:
    """Compute something on a device: one that is busy, full or too old for this torch raises its error here."""
    if device.type not in ("cpu", "meta"):
        torch.ones(1, device=device).add_(1).item()  # errors of a GPU show when its result is read


@contextmanager
def explaining_device() -> Iterator[None]:
    """Say what to do about a device that cannot be used.

    Raises:
        DeviceError: It is busy, has no memory left, or does not fit the installed torch or driver.
    """
    try:
        yield
    except RuntimeError as error:
        is_full = is_out_of_memory(error)
        is_of_device = any(word in str(error) for word in ("CUDA", "NVIDIA")) or isinstance(
            error, torch.AcceleratorError
        )
        if not is_full and not is_of_device:
            raise
        expected = "a device with free memory"
        do = "see with `nvidia-smi` which process holds it, and end that one, or choose another: CUDA_VISIBLE_DEVICES=1"
        if not is_full and "busy" not in str(error):
            expected = "a device that this torch can use"
            do = "see `nvidia-smi`: driver and torch must be made for that GPU; or leave it out: CUDA_VISIBLE_DEVICES="
        got = str(error).splitlines()[0]  # what follows is about debugging kernels
        raise DeviceError(explain("the device of the run", got, expected, do)) from error
