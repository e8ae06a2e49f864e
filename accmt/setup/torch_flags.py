"""Sets global torch flags while a Trainer works, and restores them afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from accmt.data import preserve_generators
from accmt.data.seeding import keeping_generators
from accmt.errors import ModuleContractError, fail
from accmt.messages import speaking
from accmt.options import RunningSettings

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


_running: list[tuple[Any, Any]] = []


@contextmanager
def running(trainer: Any, module: Any) -> Iterator[None]:
    """Mark Trainer and module as running, and reject a nested run of either."""
    model = module
    if hasattr(module, "model"):
        model = getattr(module, "unwrapped_model", module)
    for other_trainer, other_model in _running:
        # A `fit` in a callback would replace model, optimizer and counters of the run around it.
        if trainer is other_trainer or model is other_model:
            shared = "Trainer" if trainer is other_trainer else "module"
            got = f"a call during a run of the same {shared}, from a callback or a step"
            do = "call it after `fit` has returned, or use another Trainer and module for the inner run"
            raise fail(ModuleContractError, "fit", got=got, expected="one run at a time", do=do)
    _running.append((trainer, model))
    try:
        yield
    finally:
        _running.pop()


@contextmanager
def working(settings: RunningSettings) -> Iterator[None]:
    """Run a method of the Trainer with the requested verbosity and torch flags; generators are restored."""
    # `current_device` would initialize CUDA, which a run on the CPU does not need.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with ExitStack() as stack:
        stack.enter_context(speaking(verbose=settings.verbose))
        stack.enter_context(preserve_generators())
        stack.enter_context(keeping_generators())
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch_flags(settings))
        yield


@contextmanager
def torch_flags(settings: RunningSettings) -> Iterator[None]:
    """Set determinism, cuDNN benchmarking and anomaly detection as configured.

    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html, also for the environment variable of cuBLAS.
    """
    flags = settings.torch_flags
    cudnn, autograd = torch.backends.cudnn, torch.autograd
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    choices, anomaly = (cudnn.deterministic, cudnn.benchmark), torch.is_anomaly_enabled()
    has_variable = _CUBLAS in os.environ
    if flags.deterministic:
        torch.use_deterministic_algorithms(mode=True, warn_only=flags.deterministic == "warn")
        cudnn.deterministic, cudnn.benchmark = True, False
        os.environ.setdefault(_CUBLAS, ":4096:8")
    if flags.benchmark is not None:
        cudnn.benchmark = flags.benchmark
    if flags.detect_anomaly:
        autograd.set_detect_anomaly(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=algorithms[0], warn_only=algorithms[1])
        cudnn.deterministic, cudnn.benchmark = choices
        autograd.set_detect_anomaly(mode=anomaly)
        if not has_variable:
            os.environ.pop(_CUBLAS, None)
