"""The Trainer's arguments about the run as a whole, and about failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypedDict

import torch

from accmt.settings.checks import (
    raise_wrong_value,
    require_choice,
    require_flags,
    require_int,
    require_keywords,
    require_options,
    require_positive,
)
from accmt.settings.durations import read_max_time
from accmt.settings.handlers import Handler, read_handlers
from accmt.settings.hardware import require_accelerator, require_ddp_kwargs, require_parallelism, require_precision
from accmt.settings.how_often import Unit, read_every
from accmt.settings.profiler import require_profiler


class TorchFlags(TypedDict, total=False):
    """What is set in torch during a run; described at `torch_flags`."""

    deterministic: bool | Literal["warn"]
    benchmark: bool | None
    detect_anomaly: bool


class ParallelismOptions(TypedDict, total=False):
    """How the model is spread over processes; described at `parallelism`."""

    fsdp: bool | Mapping[str, Any]
    shard: int
    replicate: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class RunningSettings:
    """Device, precision, seed, length and appearance of a run.

    Args:
        accelerator: An `accelerate.Accelerator`, or a dict of its arguments; None builds one from the launch.
        mixed_precision: "no", "fp16" or "bf16"; None takes the launch's.
        ddp_kwargs: Arguments of `accelerate.DistributedDataParallelKwargs`.
        parallelism: Shards the model over the processes of a launch by FSDP2: a dict. "fsdp": True, or arguments of
            `accelerate.FullyShardedDataParallelPlugin`. "shard" and "replicate": the sizes of hybrid sharding; by
            default all processes shard. "tp": over how many processes the model is split by its plan for tensor
            parallelism; such processes share each batch. The product of the sizes is the number of processes.
        compile: Whether the model is compiled by `torch.compile`; a dict gives its arguments. "buckets": 64 among them
            pads batches to multiples of 64, so that there are few graphs, and says when one is made. "regional": True
            compiles the repeated layers one by one, which takes a fraction of the time, and leaves the rest as it is.
        seed: Seed of everything random; None draws one.
        torch_flags: A dict of what is set in torch during the run. "deterministic": True makes it use deterministic
            algorithms only, "warn" warns where there is none. "benchmark": sets `torch.backends.cudnn.benchmark`.
            "detect_anomaly": whether autograd looks for the operation that made a NaN; slow.
        gradient_checkpointing: Whether a transformers model recomputes activations to save memory; a dict gives
            arguments.
        sync_batchnorm: Whether batch norm uses the statistics of all processes, while the model is trained; on GPUs
            only. With one process it changes nothing.
        fast_dev_run: Runs so many batches (True: 1) of each kind, with one evaluation at the end, and writes nothing,
            to try a script.
        profiler: Finds what takes the time of `fit`: "simple" by phase, "advanced" by function, "pytorch" by operation,
            in a few steps; or an `accelerate.utils.ProfileKwargs` or a `torch.profiler.profile` that says more. What
            is found is kept in the run folder.
        min_length: Before which training does not end early: "2 epochs", "100 steps", or a list of both.
        max_time: Longest time, after which training ends at an optimizer step: "DD:HH:MM:SS" or "1h30m", a timedelta,
            or a dict of its arguments. Interruptions do not count, `min_length` comes first.
        callbacks: A `Callback` or a list of them.
        verbose: False silences messages and progress bars.
        enable_progress_bar: True shows a bar even where stderr is no terminal, False shows none; None shows a bar in a
            terminal, and elsewhere a line of the log every so often.
        enable_model_summary: Whether a table of the model's parts is printed at the start; a number is the depth to
            which parts of parts are shown: True is 1, -1 shows all.
    """

    accelerator: Any = None
    mixed_precision: str | None = None
    ddp_kwargs: Mapping[str, Any] | None = None
    parallelism: ParallelismOptions | None = None
    compile: bool | Mapping[str, Any] = False
    seed: int | None = None
    torch_flags: TorchFlags | None = None
    gradient_checkpointing: bool | Mapping[str, Any] = False
    sync_batchnorm: bool = False
    fast_dev_run: bool | int = False
    profiler: Any = None
    min_length: str | Sequence[str] | None = None
    max_time: str | timedelta | Mapping[str, float] | None = None
    callbacks: Any = None
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
        require_options("torch_flags", self.torch_flags, TorchFlags)
        require_choice("torch_flags.deterministic", self.deterministic, (False, True, "warn"))
        require_choice("torch_flags.benchmark", self.benchmark, (None, True, False))
        require_choice("torch_flags.detect_anomaly", self.detect_anomaly, (False, True))
        self._least  # noqa: B018 - raises what is wrong with it
        require_profiler(self.profiler)
        read_max_time(self.max_time)
        compiling: Any = self.compile
        if not isinstance(compiling, bool | Mapping):
            raise_wrong_value("compile", compiling, "True, False, or arguments of torch.compile", "compile=True")
        require_keywords("compile", self.compile_kwargs, torch.compile, "torch.compile")
        if self.compile_buckets is not None:
            require_int("compile.buckets", self.compile_buckets, at_least=1)
        if isinstance(self.compile, Mapping):
            require_choice("compile.regional", self.compile.get("regional", False), (False, True))
        require_ddp_kwargs(self.ddp_kwargs)
        require_options("parallelism", self.parallelism, ParallelismOptions)
        require_parallelism(self.parallelism)
        value: Any = self.gradient_checkpointing
        if not isinstance(value, bool | Mapping):
            expected = "True, False, or arguments of torch.utils.checkpoint.checkpoint by name"
            raise_wrong_value("gradient_checkpointing", value, expected, "gradient_checkpointing=True")

    @property
    def compile_kwargs(self) -> Mapping[str, Any]:
        """Arguments of `torch.compile`."""
        compiling = self.compile if isinstance(self.compile, Mapping) else {}
        return {name: value for name, value in compiling.items() if name not in ("buckets", "regional")}

    @property
    def compile_buckets(self) -> int | None:
        """The length to whose multiples batches are padded; None leaves them as they are."""
        return self.compile.get("buckets") if isinstance(self.compile, Mapping) else None

    @property
    def compiles_regions(self) -> bool:
        """Whether the repeated layers are compiled, and the rest is not."""
        return isinstance(self.compile, Mapping) and bool(self.compile.get("regional"))

    @property
    def compiles(self) -> bool:
        """Whether the model is compiled."""
        return self.compile is not False

    @property
    def deterministic(self) -> bool | Literal["warn"]:
        """Whether torch uses deterministic algorithms only."""
        return (self.torch_flags or {}).get("deterministic", False)

    @property
    def benchmark(self) -> bool | None:
        """What `torch.backends.cudnn.benchmark` is set to; None leaves it."""
        return (self.torch_flags or {}).get("benchmark")

    @property
    def detect_anomaly(self) -> bool:
        """Whether autograd looks for the operation that made a NaN."""
        return (self.torch_flags or {}).get("detect_anomaly", False)

    @property
    def min_epochs(self) -> int | None:
        """Epochs before which training does not end early."""
        return self._least.get("epoch")

    @property
    def min_steps(self) -> int | None:
        """Optimizer steps before which training does not end early."""
        return self._least.get("step")

    @property
    def _least(self) -> dict[Unit, int]:
        written: Any = [] if self.min_length is None else self.min_length
        written = written if isinstance(written, list | tuple) else [written]
        lengths = [read_every("min_length", text, ("epoch", "step"), also=", or a list of both") for text in written]
        if len({length.unit for length in lengths}) < len(lengths):
            do = 'min_length=["2 epochs", "500 steps"]'
            raise_wrong_value("min_length", self.min_length, "each unit once", do)
        return {length.unit: int(length.number) for length in lengths}


class Failures(TypedDict, total=False):
    """What happens when something goes wrong; described at `failures`."""

    on_nonfinite: Literal["stop", "skip", "rollback"] | None
    spike_guard: float | None
    on_bad_sample: Literal["raise", "skip"]
    on_long_sample: Literal["warn", "raise"]
    hang_timeout_s: float | None
    machine_timeout_s: float | None
    preempt_exit_code: int
    preflight: bool
    try_longest: bool | None
    compare_replicas: bool


@dataclass(frozen=True, kw_only=True)
class FailureSettings:
    """What happens when something goes wrong.

    Args:
        handlers: Errors at which a safe checkpoint of the last optimizer step is taken before they are raised: a
            `Handler`, its name, or a list.
        failures: A dict. "on_nonfinite": what happens after a training loss that is not finite: "stop" (the default)
            ends the run with an error that names the batch, "skip" leaves the optimizer step out before it is made (and
            waits for the device once per step), "rollback" goes back to the newest checkpoint and skips that step; None
            only warns. "spike_guard": treats a loss this many standard deviations above the mean of the process's last
            100 as not finite, from the 21st on. "on_bad_sample": "raise" (the default) ends the run where a sample
            cannot be read, with an error that names it; "skip" leaves it out of its batch, counts it (`bad_samples`)
            and warns; no effect on streams. "on_long_sample": with `max_tokens` in the hyper-parameters, "warn" (the
            default) makes a sample that is longer a micro-batch of its own, and warns once; "raise" ends the run.
            "hang_timeout_s": seconds without a finished batch after which the run counts as hung and ends, saying
            where. "machine_timeout_s": on several machines, seconds without a sign of life of one after which the
            others end; 120; None waits as long as torch does. "preempt_exit_code": exit code after SIGTERM or SIGUSR1,
            from 0 to 255; 143. "preflight": whether a run tries at its start to save and load its state in memory, and
            compares the room on the disk with what checkpoints and model will need; True. "try_longest": whether the
            largest micro-batch that the data can bring goes through forward and backward before training, without
            effect, so that memory runs out now if it does: the one of the longest samples, where lengths are known;
            None (the default) does so where the device has memory of its own. "compare_replicas": whether processes
            compare the weights and optimizer state that they hold alike, at each evaluation and checkpoint, and end
            the run where they differ; True. False is for training that lets replicas differ on purpose, such as
            local SGD.
    """

    handlers: Handler | str | Iterable[Handler | str] | None = None
    failures: Failures | None = None

    def __post_init__(self) -> None:
        read_handlers(self.handlers)
        require_options("failures", self.failures, Failures)
        require_choice("failures.on_nonfinite", self.on_nonfinite, ("stop", "skip", "rollback", None))
        if self.spike_guard is not None:
            require_positive("failures.spike_guard", self.spike_guard)
            if self.on_nonfinite is None:
                do = 'failures={"spike_guard": 6, "on_nonfinite": "rollback"}'
                expected = "on_nonfinite other than None beside it"
                raise_wrong_value("failures.spike_guard", self.spike_guard, expected, do)
        require_choice("failures.on_bad_sample", self.on_bad_sample, ("raise", "skip"))
        require_choice("failures.on_long_sample", self.on_long_sample, ("warn", "raise"))
        if self.hang_timeout_s is not None:
            require_positive("failures.hang_timeout_s", self.hang_timeout_s)
        if self.machine_timeout_s is not None:
            require_positive("failures.machine_timeout_s", self.machine_timeout_s)
        require_int("failures.preempt_exit_code", self.preempt_exit_code, at_least=0)
        if self.preempt_exit_code > 255:
            do = 'failures={"preempt_exit_code": 143}'
            raise_wrong_value("failures.preempt_exit_code", self.preempt_exit_code, "0 to 255", do)
        if not isinstance(self.preflight, bool):
            raise_wrong_value("failures.preflight", self.preflight, "True or False", 'failures={"preflight": False}')
        require_choice("failures.try_longest", self.try_longest, (True, False, None))
        require_choice("failures.compare_replicas", self.compare_replicas, (True, False))

    @property
    def on_nonfinite(self) -> Literal["stop", "skip", "rollback"] | None:
        """What happens after a training loss that is not finite; None only warns."""
        return (self.failures or {}).get("on_nonfinite", "stop")

    @property
    def spike_guard(self) -> float | None:
        """Standard deviations from which a loss is a spike; None is off."""
        return (self.failures or {}).get("spike_guard")

    @property
    def on_bad_sample(self) -> Literal["raise", "skip"]:
        """What happens where a sample cannot be read."""
        return (self.failures or {}).get("on_bad_sample", "raise")

    @property
    def on_long_sample(self) -> Literal["warn", "raise"]:
        """What happens to a sample longer than `max_tokens`."""
        return (self.failures or {}).get("on_long_sample", "warn")

    @property
    def hang_timeout_s(self) -> float | None:
        """Seconds without a finished batch after which the run counts as hung; None is off."""
        return (self.failures or {}).get("hang_timeout_s")

    @property
    def machine_timeout_s(self) -> float | None:
        """Seconds without a sign of life of a machine after which the others end; None is off."""
        return (self.failures or {}).get("machine_timeout_s", 120.0)

    @property
    def preempt_exit_code(self) -> int:
        """Exit code after SIGTERM or SIGUSR1."""
        return (self.failures or {}).get("preempt_exit_code", 143)

    @property
    def preflight(self) -> bool:
        """Whether a run tries at its start to save and load its state."""
        return (self.failures or {}).get("preflight", True)

    @property
    def try_longest(self) -> bool | None:
        """Whether the largest micro-batch is tried before training; None: where the device has memory of its own."""
        return (self.failures or {}).get("try_longest")

    @property
    def compare_replicas(self) -> bool:
        """Whether processes compare what they hold alike."""
        return (self.failures or {}).get("compare_replicas", True)

    @property
    def kinds(self) -> frozenset[Handler]:
        """The single kinds of errors at which a safe checkpoint is taken."""
        return read_handlers(self.handlers)
