"""The Trainer's arguments about the run as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, Literal, TypedDict

import torch

from accmt.options.accelerate_arguments import (
    require_accelerator,
    require_ddp_kwargs,
    require_parallelism,
    require_precision,
)
from accmt.options.checks import (
    raise_wrong_value,
    require_choice,
    require_flags,
    require_int,
    require_keywords,
    require_options,
)
from accmt.options.units import Unit, read_every, read_max_time

PROFILERS = ("simple", "advanced", "pytorch")


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


def require_profiler(value: Any) -> None:
    """Check what is to profile a run.

    Raises:
        ArgumentError: `value` is neither None, one of `PROFILERS`, an `accelerate.utils.ProfileKwargs` nor a
            `torch.profiler.profile`.
    """
    if value is None or (isinstance(value, str) and value in PROFILERS) or _is_instance(value):
        return
    nearest = get_close_matches(str(value), PROFILERS, n=1, cutoff=0.0)[0]
    names = ", ".join(f'"{name}"' for name in PROFILERS)
    expected = f"{names}, an accelerate.utils.ProfileKwargs or a torch.profiler.profile object, or None"
    raise_wrong_value("profiler", value, expected, f'profiler="{nearest}"?')


def _is_instance(value: Any) -> bool:
    if isinstance(value, str):
        return False
    from accelerate.utils import ProfileKwargs
    from torch.profiler import profile

    return isinstance(value, ProfileKwargs | profile)
