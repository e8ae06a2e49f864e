"""A device in host memory, on which a tensor in the wrong place and a wait for the device are errors.

It needs a C++ compiler and ninja, and takes a minute to build, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "pretend"


@cache
def load() -> Any:
    """Build the device, if that has not been done, and give it to torch."""
    from torch.utils import cpp_extension

    source = Path(__file__).parent / "device.cpp"
    built = cpp_extension.load("accmt_pretended_device", [str(source)], extra_cflags=["-O0", "-w"])
    built.register_hooks()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _describe_device())
    return built


def _describe_device() -> ModuleType:
    """Return what `torch.<name>` is, as `torch.cuda` is for CUDA: what torch and Accelerate ask of a device."""
    module = ModuleType(NAME)
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "current_device": 0,
        "device_count": 1,
        "get_amp_supported_dtype": [torch.bfloat16, torch.float16],
    }
    for name, answer in answers.items():
        setattr(module, name, lambda answer=answer: answer)
    for name in ("manual_seed", "manual_seed_all", "synchronize", "set_device", "set_rng_state"):
        setattr(module, name, lambda *_: None)
    module.get_rng_state = lambda *_: torch.get_rng_state()  # type: ignore[attr-defined]
    return module


def device() -> torch.device:
    """Return the device."""
    load()
    return torch.device(NAME, 0)


def make_accelerator() -> Any:
    """Return an Accelerator of that device."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    accelerator = Accelerator(cpu=True)
    AcceleratorState._shared_state["device"] = PartialState._shared_state["device"] = device()
    return accelerator


@contextmanager
def without_waits() -> Iterator[None]:
    """Make waiting for the device an error."""
    load().forbid_waits(True)
    try:
        yield
    finally:
        load().forbid_waits(False)
