"""What a run with `same_bits` requires, fixes and records."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from accmt.engine.borrowed import keeping_processes_apart
from accmt.errors import ArgumentError, CheckpointError, ModuleContractError, fail
from accmt.messages import warn
from accmt.module import AcceleratorModule
from accmt.options import Settings
from accmt.processes import num_data_processes, num_processes
from accmt.run.features import Feature
from accmt.run.weighting import AccumulationWindow

_WHERE = "Trainer(same_bits=...)"
_THREADS = "OMP_NUM_THREADS"


class SameBits(Feature):
    """Rejects what would make the bits depend on the processes, and fixes threads and algorithms."""

    name = "same_bits"

    def __init__(self, run: Any) -> None:
        self._run = run
        self._buffers: dict[str, torch.Tensor] = {}
        self._has_checked = False

    @classmethod
    def for_run(cls, run: Any) -> SameBits:
        return cls(run)

    @classmethod
    def check(cls, settings: Settings, module: AcceleratorModule, train_data: Any) -> None:
        number = settings.optimization.same_bits or 1
        _check_numbers(number, settings.hps.train_batch_size)
        for got, do in _obstacles(settings, module, train_data):
            expected = "a run whose bits do not depend on the number of processes"
            raise fail(ArgumentError, f"Trainer(same_bits={number})", got=got, expected=expected, do=do)

    @contextmanager
    def during(self) -> Iterator[None]:
        threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        if (number := _threads_on(self._run.device)) is not None:
            torch.set_num_threads(number)
        if self._run.device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is used first
            torch.use_deterministic_algorithms(mode=True)
        try:
            with keeping_processes_apart("same_bits: a process has some of the units of a batch at a time"):
                yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(is_deterministic)

    def state_dict(self) -> dict[str, Any]:
        return {"units": self._run.settings.optimization.same_bits, **self._facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the run goes on with the units and threads with which it began.

        Raises:
            CheckpointError: It does not.
        """
        facts = {"units": self._run.settings.optimization.same_bits, **self._facts()}
        for name, what, do in (
            ("units", "same_bits", f"Trainer(same_bits={state['units']})"),
            ("threads", _THREADS, f"{_THREADS}={state['threads']} before the command"),
        ):
            if facts[name] != state[name]:
                got, expected = f"{facts[name]}", f"{state[name]}, with which the run began"
                raise fail(CheckpointError, f"{what} of a resumed run", got=got, expected=expected, do=do)
        changed = [f"{name}: {facts[name]} instead of {state[name]}" for name in facts if facts[name] != state[name]]
        if changed:
            warn(f"same_bits: from here on, the bits may differ from those of an unbroken run ({', '.join(changed)})")

    def on_training_start(self) -> None:
        """Keep the buffers, to see whether the first steps change them."""
        for name, buffer in self._run.unwrapped_model.named_buffers():
            self._buffers[name] = buffer.detach().clone()

    def before_optimizer_step(self, window: AccumulationWindow) -> None:
        """Reject buffers that the first steps change: each process changes its own, by its own units.

        Raises:
            ModuleContractError: There are some.
        """
        # What hooks of the step log does not get the weight of this process's last unit.
        self._run.module.logs.of_training.weight = 1.0
        if self._has_checked:
            return
        self._has_checked = True
        for name, buffer in self._run.unwrapped_model.named_buffers():
            before = self._buffers.get(name)
            if before is None or not torch.equal(before, buffer.detach()):
                got = f"self.model.{name} changes in the forward pass, by the samples that a process has"
                do = "change it in on_after_optimizer_step, by what is the same on all processes"
                expected = "buffers that do not depend on the processes"
                raise fail(ModuleContractError, "same_bits", got=got, expected=expected, do=do)
        self._buffers = {}

    def _facts(self) -> dict[str, Any]:
        device = self._run.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return {"threads": _threads_on(device), "device": name, "torch": str(torch.__version__)}


def _threads_on(device: torch.device) -> int | None:
    """Return the threads of a run, also before it begins; None on a GPU, which does not divide its work among them.

    A launcher gives each of several processes one thread, and a sum in several threads has another order. So a process
    that was started without one has one thread, too.
    """
    if device.type != "cpu":
        return None
    return torch.get_num_threads() if _THREADS in os.environ else 1


def _check_numbers(number: int, batch_size: int) -> None:
    """Check that units can be divided among the processes, and a batch into units.

    Raises:
        ArgumentError: They cannot.
    """
    count = num_data_processes()
    if number & (number - 1) or number % count:
        larger = 1 << max(number, count).bit_length() if number & (number - 1) or number < count else number
        nearest = sorted({larger // 2, larger} - {0} if larger // 2 >= count else {larger})
        expected = f"a power of two, at least {count}, the number of processes"
        if count & (count - 1):
            nearest, expected = [], "a number of processes that is a power of two"
        do = " or ".join(f"same_bits={candidate}" for candidate in nearest) or "start 1, 2, 4 or 8 processes"
        raise fail(ArgumentError, _WHERE, got=f"{number}, and {count} process(es)", expected=expected, do=do)
    if batch_size % number:
        lower = batch_size - batch_size % number
        do = " or ".join(f"batch_size: {size}" for size in (lower, lower + number) if size)
        got = f"batch_size: {batch_size}, the samples of all processes together, in {number} units"
        raise fail(ArgumentError, _WHERE, got=got, expected=f"a multiple of {number}", do=do)


def _obstacles(settings: Settings, module: AcceleratorModule, train_data: Any) -> Iterator[tuple[str, str]]:
    """Yield what would make the bits depend on the processes, each with what to do."""
    data = settings.data
    if module.uses_manual_optimization:
        yield "a module with manual optimization, which makes its own steps", "return the loss from training_step"
    if settings.optimization.window_maker is not None:
        yield f"grad_accumulation_steps={settings.optimization.window_maker!r}", "pass a number"
    if settings.hps.max_micro_batch_size is not None:
        yield "max_micro_batch_size, which splits by what fits into memory", "leave it out, and raise same_bits instead"
    if isinstance(train_data, DataLoader) or data.data_options.batch_sampler is not None:
        yield "a DataLoader or a batch sampler, which make batches of their own", "pass the dataset, and a sampler"
    if not data.data_options.shard:
        yield "data_options={'shard': False}: each process has its own data", "pass all data on every process"
    if settings.running.sync_batchnorm and num_processes() > 1:
        yield "sync_batchnorm: statistics of all processes", "use GroupNorm or LayerNorm"
    if settings.running.compiles:
        yield "compile: a compiled kernel may depend on the shapes that its process has seen", "leave it out"
    if settings.failures.spike_guard is not None:
        yield "spike_guard: it compares losses with the last ones of each process", "leave it out"
    if not settings.evaluation.report_loss_after_eval:
        yield "report_loss_after_eval=False: rows of the batches of each process", "leave it out"
    if num_data_processes() != num_processes():
        yield "tensor parallelism, whose sums are divided by the number of processes", 'parallelism={"fsdp": True}'
