"""What the Trainer was told about the run as a whole, and about failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from accmt.settings.checks import (
    raise_wrong_value,
    require_choice,
    require_flags,
    require_int,
    require_keywords,
    require_mapping,
    require_positive,
)
from accmt.settings.durations import read_max_time
from accmt.settings.handlers import Handler, read_handlers
from accmt.settings.hardware import require_accelerator, require_ddp_kwargs, require_precision
from accmt.settings.profiler import require_profiler


@dataclass(frozen=True, kw_only=True)
class RunningSettings:
    """Device, precision, seed, length and appearance of a run.

    Args:
        accelerator: An `accelerate.Accelerator`, or a dict of its arguments; None builds one from the launch.
        mixed_precision: "no", "fp16" or "bf16"; None takes the launch's.
        ddp_kwargs: Arguments of `accelerate.DistributedDataParallelKwargs`.
        compile: Whether the model is compiled by `torch.compile`.
        compile_kwargs: Arguments of `torch.compile`.
        seed: Seed of everything random; None draws one.
        deterministic: True makes torch use deterministic algorithms only, "warn" warns where there is none.
        benchmark: Sets `torch.backends.cudnn.benchmark` during the run.
        detect_anomaly: Whether autograd looks for the operation that made a NaN; slow.
        gradient_checkpointing: Whether a transformers model recomputes activations to save memory; a dict gives
            arguments.
        sync_batchnorm: Whether batch norm uses the statistics of all processes, while the model is trained; on GPUs
            only. With one process it changes nothing.
        fast_dev_run: Runs so many batches (True: 1) of each kind, with one evaluation at the end, and writes nothing,
            to try a script.
        profiler: Finds what takes the time of `fit`: "simple" by phase, "advanced" by function, "pytorch" by operation,
            in a few updates; or an `accelerate.utils.ProfileKwargs` or a `torch.profiler.profile` that says more. What
            is found is kept in the run folder.
        min_epochs: Epochs before which training does not end early.
        min_steps: Updates before which training does not end early.
        max_time: Longest time, after which training ends at an update: "DD:HH:MM:SS" or "1h30m", a timedelta, or
            a dict of its arguments. Interruptions do not count, `min_epochs` and `min_steps` come first.
        callbacks: A `Callback` or a list of them.
        preflight: Whether a run tries at its start to save and load its state in memory, and compares the room on the
            disk with what checkpoints and model will need.
        verbose: False silences messages and progress bars.
        enable_progress_bar: True shows a bar even where stderr is no terminal, False shows none, None decides by it.
        enable_model_summary: Whether a table of the model's parts is printed at the start; a number is the depth to
            which parts of parts are shown: True is 1, -1 shows all.
    """

    accelerator: Any = None
    mixed_precision: str | None = None
    ddp_kwargs: Mapping[str, Any] | None = None
    compile: bool = False
    compile_kwargs: Mapping[str, Any] | None = None
    seed: int | None = None
    deterministic: Any = False
    benchmark: bool | None = None
    detect_anomaly: bool = False
    gradient_checkpointing: Any = False
    sync_batchnorm: bool = False
    fast_dev_run: bool | int = False
    profiler: Any = None
    min_epochs: int | None = None
    min_steps: int | None = None
    max_time: Any = None
    callbacks: Any = None
    preflight: bool = True
    verbose: bool = True
    enable_progress_bar: bool | None = None
    enable_model_summary: bool | int = False

    def __post_init__(self) -> None:
        require_flags(self)
        require_precision(self.mixed_precision)
        require_accelerator(self.accelerator)
        if self.seed is not None:
            require_int("seed", self.seed, at_least=0)
        if not isinstance(self.fast_dev_run, int) or self.fast_dev_run < 0:
            raise_wrong_value("fast_dev_run", self.fast_dev_run, "True, or a number of batches", "fast_dev_run=True")
        if not isinstance(self.enable_model_summary, int) or self.enable_model_summary < -1:
            expected = "True or False, or a depth from 1; -1 shows all"
            raise_wrong_value("enable_model_summary", self.enable_model_summary, expected, "enable_model_summary=True")
        require_choice("deterministic", self.deterministic, (False, True, "warn"))
        require_profiler(self.profiler)
        read_max_time(self.max_time)
        require_mapping("compile_kwargs", self.compile_kwargs)
        require_keywords("compile_kwargs", self.compile_kwargs, torch.compile, "torch.compile")
        require_ddp_kwargs(self.ddp_kwargs)
        if not isinstance(self.gradient_checkpointing, bool | Mapping):
            expected = "True, False, or arguments of torch.utils.checkpoint.checkpoint by name"
            value = self.gradient_checkpointing
            raise_wrong_value("gradient_checkpointing", value, expected, "gradient_checkpointing=True")
        if self.compile_kwargs is not None and not self.compile:
            raise_wrong_value("compile_kwargs", self.compile_kwargs, "compile=True beside it", "compile=True")


@dataclass(frozen=True, kw_only=True)
class FailureSettings:
    """What happens when something goes wrong.

    Args:
        handlers: Errors at which a safe checkpoint of the last update is taken before they go on: a `Handler`, its
            name, or a list.
        on_nonfinite: What happens after a training loss that is not finite: "stop" ends the run with an error that
            names the batch, "skip" leaves the update out before it is made (and waits for the device once per update),
            "rollback" goes back to the newest checkpoint and skips the update. None only warns.
        spike_guard: Treats a loss this many standard deviations above the mean of the process's last 100 as not
            finite, from the 21st on; None is off.
        hang_timeout_s: Seconds without a finished batch after which the run counts as hung and ends, saying where;
            None is off.
        preempt_exit_code: Exit code after SIGTERM or SIGUSR1, from 0 to 255.
    """

    handlers: Any = None
    on_nonfinite: str | None = "stop"
    spike_guard: float | None = None
    hang_timeout_s: float | None = None
    preempt_exit_code: int = 143

    def __post_init__(self) -> None:
        read_handlers(self.handlers)
        require_choice("on_nonfinite", self.on_nonfinite, ("stop", "skip", "rollback", None))
        if self.spike_guard is not None:
            require_positive("spike_guard", self.spike_guard)
            if self.on_nonfinite is None:
                do = 'on_nonfinite="rollback"'
                raise_wrong_value("spike_guard", self.spike_guard, "on_nonfinite other than None beside it", do)
        if self.hang_timeout_s is not None:
            require_positive("hang_timeout_s", self.hang_timeout_s)
        require_int("preempt_exit_code", self.preempt_exit_code, at_least=0)
        if self.preempt_exit_code > 255:
            raise_wrong_value("preempt_exit_code", self.preempt_exit_code, "0 to 255", "preempt_exit_code=143")

    @property
    def kinds(self) -> frozenset[Handler]:
        """The single kinds of errors at which a safe checkpoint is taken."""
        return read_handlers(self.handlers)
