"""Builds the Accelerator of a run, or uses the user's."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from accmt.engine.parallelism import (
    Parallelism,
    accelerator_arguments,
    find_parallelism,
    forget_mesh_of_cpus,
    hidden_from_accelerate,
    is_set,
    require_effect,
    shard_on_cpu,
)
from accmt.engine.shards import as_shard, is_sharded
from accmt.engine.tensor_parallel import tensor_parallel_size
from accmt.errors import ArgumentError, DeviceError, fail, is_out_of_memory
from accmt.libraries.private_names import share_other_precision
from accmt.libraries.versions import make_accelerator, require
from accmt.messages import warn_once
from accmt.options import RunningSettings
from accmt.precisions import PRECISIONS, use_autocast
from accmt.processes import leave_process_group
from accmt.registry import find

if TYPE_CHECKING:
    from accelerate import Accelerator


# ---- The device of a run, tested before anything is built on it.


def touch(device: torch.device) -> None:
    """Compute something on a device: a busy, full or unsupported device raises its error here."""
    if device.type not in ("cpu", "meta"):
        torch.ones(1, device=device).add_(1).item()  # GPU errors appear when the result is read


@contextmanager
def explaining_device() -> Iterator[None]:
    """Explain errors of an unusable device.

    Raises:
        DeviceError: The device is busy, out of memory, or not supported by the installed torch or driver.
    """
    try:
        yield
    except RuntimeError as error:
        # torch raises a RuntimeError for each of these, and for many errors that have nothing to do with the device.
        is_full = is_out_of_memory(error)
        is_of_device = isinstance(error, torch.AcceleratorError) or "CUDA" in str(error) or "NVIDIA" in str(error)
        if not is_full and not is_of_device:
            raise
        expected = "a device with free memory"
        do = "find the process that uses it with `nvidia-smi` and end it, or choose another: CUDA_VISIBLE_DEVICES=1"
        if not is_full and "busy" not in str(error):
            expected = "a device that this torch can use"
            do = "check `nvidia-smi`: driver and torch must support that GPU; or hide it: CUDA_VISIBLE_DEVICES="
        got = str(error).splitlines()[0]  # the rest is about debugging kernels
        raise fail(DeviceError, "the device of the run", got=got, expected=expected, do=do) from error


_DRIVER = Path("/proc/driver/nvidia/version")
_current: weakref.ref[Accelerator] | None = None
_group: dist.ProcessGroup | None = None
_is_group_closed = False
_state: Any = None  # the plugin in Accelerate's shared state, which shows whether an accmt run created it


def build_accelerator(settings: RunningSettings) -> Accelerator:
    """Return the Accelerator for the settings and the launch.

    Several processes on machines without an accelerator device need `cpu=True`: without it Accelerate runs each process
    alone, as if it were the only one.
    """
    global _current, _group  # noqa: PLW0603 - for `accmt.accelerator`, and as there is one group in a process
    for name in ("accelerate", "safetensors", "huggingface_hub"):
        require(name)
    from accelerate import Accelerator, PartialState

    # Reject a second process group: the addresses of the first are still in the rendezvous store.
    # Source: https://docs.pytorch.org/docs/stable/distributed.html#reinitialization
    if _is_group_closed and dist.group.WORLD is None:
        got = "a launched program that has left its process group because a Trainer was closed"
        do = "close only the last Trainer: trainer.close(), or `with` around it"
        raise fail(ArgumentError, "a run after closing", got=got, expected="one close, after all work is done", do=do)
    user_accelerator = settings.accelerator
    parallelism = find_parallelism(settings)
    if isinstance(user_accelerator, Accelerator):
        accelerator = user_accelerator
        expected = settings.mixed_precision
        if expected not in (None, *PRECISIONS):  # of another package, which brings its own autocast
            expected = "no"
        if expected not in (None, accelerator.mixed_precision):
            _reject("mixed_precision", settings.mixed_precision, accelerator.mixed_precision)
        ddp = settings.parallelism and settings.parallelism.ddp
        if ddp:  # handlers are read when an Accelerator is built
            _reject("ddp", ddp, "its own kwargs_handlers")
        # Accelerate would divide the loss by this number again.
        if accelerator.gradient_accumulation_steps != 1:
            _reject("grad_accumulation_steps", "the Trainer's", accelerator.gradient_accumulation_steps)
    else:
        group_before = dist.group.WORLD
        with explaining_device():
            arguments = _arguments(user_accelerator, settings)
            with _in_precision(arguments.get("mixed_precision")):
                accelerator = _build(arguments, parallelism)
        if group_before is None:  # otherwise the program has created the group, and may use it after the run
            _group = dist.group.WORLD
        accelerator.gradient_accumulation_steps = 1  # the environment may set another value; the loop accumulates
    if settings.mixed_precision not in (None, *PRECISIONS):
        use_autocast(accelerator, find("accmt.precisions", settings.mixed_precision))
    _check_engine(accelerator)
    require_effect(accelerator, parallelism)
    if accelerator.device.type == "cpu":
        _warn_of_unused_gpu(user_accelerator)
    with explaining_device():
        touch(accelerator.device)
    # With several processes Accelerate 1.15 calls it cpu:0, so that torch copies each batch and weight that it moves.
    # Source: `PartialState.set_device` in accelerate/state.py.
    if accelerator.device.type == "cpu":
        accelerator.state.device = PartialState().device = torch.device("cpu")
    # Of the user's object too, because steps call it; a subclass of the user keeps its own `gather`.
    if type(accelerator) is Accelerator and accelerator.num_processes > 1:
        from accmt.engine.exact_accelerator import ExactAccelerator

        accelerator.__class__ = ExactAccelerator
    _current = weakref.ref(accelerator)
    return accelerator


@contextmanager
def _in_precision(precision: str | None) -> Iterator[None]:
    """Give an Accelerator its own precision instead of the previous run's, whose state Accelerate shares.

    A state that the program created with its own Accelerator is not changed.
    """
    global _state  # noqa: PLW0603 - Accelerate has one in a process, too
    from accelerate.state import AcceleratorState, is_initialized

    # An object in the shared state shows who created it; Accelerate replaces it whenever it resets that state.
    before = AcceleratorState().dynamo_plugin if is_initialized() else None
    if before is not None and before is _state:
        share_other_precision(precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower())
    yield
    if before is None:
        _state = AcceleratorState().dynamo_plugin


def _build(arguments: dict[str, Any], parallelism: Parallelism) -> Accelerator:
    forget_mesh_of_cpus()
    if parallelism.is_plain:
        return make_accelerator(arguments)
    if not arguments.get("cpu", False):
        return make_accelerator({**arguments, **accelerator_arguments(parallelism)})
    # Accelerate rejects these arguments on CPUs.
    unsharded = {name: value for name, value in arguments.items() if name not in accelerator_arguments(parallelism)}
    with hidden_from_accelerate():
        accelerator = make_accelerator(unsharded)
    shard_on_cpu(accelerator, parallelism)
    return accelerator


def current_accelerator() -> Accelerator | None:
    """Return the Accelerator of the most recent run in this process, while it exists and its state is valid."""
    accelerator = None if _current is None else _current()
    if accelerator is None or not accelerator.state.initialized:  # the program has reset Accelerate's state
        return None
    return accelerator


def as_trained(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that converts a tensor like those of a trained model in the current run: full, or a shard."""
    accelerator = current_accelerator()
    is_requested = accelerator is not None and (accelerator.is_fsdp2 or tensor_parallel_size(accelerator) > 1)
    return as_shard if is_requested or is_sharded(model) else torch.clone


def close_group() -> None:
    """Leave the process group that a run's Accelerator created; one that the program created is kept.

    Processes: all.
    """
    global _group, _is_group_closed  # noqa: PLW0603 - as there is one group in a process
    if _group is not None and dist.group.WORLD is _group:
        leave_process_group()
        _is_group_closed = True
    _group = None


def _arguments(user_accelerator: Any, settings: RunningSettings) -> dict[str, Any]:
    from accelerate import DistributedDataParallelKwargs

    arguments = dict(user_accelerator or {})
    # The loop accumulates; Accelerate would divide each loss by this number again.
    if arguments.get("gradient_accumulation_steps", 1) != 1:
        _reject("grad_accumulation_steps", "the Trainer's", arguments["gradient_accumulation_steps"])
    if settings.mixed_precision is not None:
        # One of two contradicting settings would be ignored silently.
        if arguments.get("mixed_precision", settings.mixed_precision) != settings.mixed_precision:
            _reject("mixed_precision", settings.mixed_precision, arguments["mixed_precision"])
        # A precision of another package brings its own autocast: Accelerate must not cast as well.
        arguments["mixed_precision"] = "no"
        if settings.mixed_precision in PRECISIONS:
            arguments["mixed_precision"] = settings.mixed_precision
    ddp = settings.parallelism and settings.parallelism.ddp
    if ddp:
        handlers = list(arguments.get("kwargs_handlers") or [])
        arguments["kwargs_handlers"] = [*handlers, DistributedDataParallelKwargs(**ddp)]
    # Without this, Accelerate runs each launched process on a CPU alone, as if it were the only one.
    if not torch.accelerator.is_available() and int(os.environ.get("LOCAL_RANK", -1)) >= 0:
        arguments.setdefault("cpu", True)
    return arguments


def _reject(name: str, trainer: Any, accelerator: Any) -> None:
    got = f"{name}: {trainer!r} in the Trainer, {accelerator!r} in the Accelerator"
    do = f"set {name} only in the Trainer"
    raise fail(ArgumentError, "Trainer(accelerator=...)", got=got, expected="one setting", do=do)


def _warn_of_unused_gpu(user_accelerator: Any) -> None:
    """Warn once that the machine has a GPU that torch cannot use; the run would silently train on the CPU."""
    match user_accelerator:
        case None:
            is_on_purpose = False
        case Mapping():
            is_on_purpose = bool(user_accelerator.get("cpu"))
        case _:  # an Accelerator, which has its device already
            is_on_purpose = True
    if is_on_purpose or is_set("ACCELERATE_USE_CPU"):
        return
    if not _DRIVER.exists() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return
    if torch.version.cuda is None:
        why, do = "this torch is built without CUDA", "install one with CUDA: https://pytorch.org/get-started/locally"
    else:
        why = f"torch (for CUDA {torch.version.cuda}) finds none that it can use"
        do = "update the driver, which may be too old for that CUDA version, or check `nvidia-smi`"
    warn_once(f"the machine has an NVIDIA GPU, but the run uses the CPU: {why}; {do}", about="unused GPU")


def _check_engine(accelerator: Accelerator) -> None:
    # These are for Accelerate's loaders, which accmt does not use: they would be ignored.
    for name in ("split_batches", "dispatch_batches"):
        if getattr(accelerator.dataloader_config, name):
            _reject(name, "each process builds its part of a global batch", f"{name}=True")
    launched = int(os.environ.get("WORLD_SIZE", 1))
    # Without this, each process would train alone, and all would write the same files.
    if accelerator.num_processes < launched:
        got = f"{launched} processes were launched, but this Accelerator has {accelerator.num_processes}"
        do = "on machines without a GPU: accelerator=Accelerator(cpu=True), or leave `accelerator` out"
        expected = "one Accelerator for all processes"
        raise fail(ArgumentError, "Trainer(accelerator=...)", got=got, expected=expected, do=do)
    # torch has the operations, so that the run would only be many times slower.
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        expected, do = "fp16 on a GPU: CPUs have no fast fp16 arithmetic", 'mixed_precision="bf16"'
        raise fail(ArgumentError, "mixed_precision", got="fp16 on a CPU", expected=expected, do=do)
