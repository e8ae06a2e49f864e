"""Trainer arguments about the run as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Literal

import torch

from accmt.errors import ArgumentError, fail, nearest
from accmt.options.checks import (
    Options,
    raise_wrong_value,
    require_choice,
    require_flags,
    require_int,
    require_keywords,
    require_mapping,
    set_field,
    write_place,
)
from accmt.options.units import Unit, read_every, read_max_time
from accmt.precision import PRECISIONS
from accmt.registry import addon, names

# ---- Checks of arguments about device and precision.


def require_precision(value: Any) -> None:
    """Check `mixed_precision`.

    Raises:
        ArgumentError: No such precision; the message translates the values of other trainers.
    """
    choices = (None, *PRECISIONS, *(() if value in (None, *PRECISIONS) else names("accmt.precisions")))
    if value in choices:
        return
    do = addon("hint_for_precision")(value)
    if do is None:
        require_choice("mixed_precision", value, choices)
        return
    expected = "one of " + ", ".join(map(repr, choices))
    where, got = "Trainer(mixed_precision=...)", f"{value!r} ({type(value).__name__})"
    raise fail(ArgumentError, where, got=got, expected=expected, do=do)


def require_ddp(name: str, value: Any) -> None:
    """Check arguments of DDP; imports Accelerate only for a dict.

    Raises:
        ArgumentError: It is neither None nor a dict with valid arguments.
    """
    require_mapping(name, value)
    if value:
        from accelerate import DistributedDataParallelKwargs

        require_keywords(name, value, DistributedDataParallelKwargs, "accelerate.DistributedDataParallelKwargs")


def require_fsdp(name: str, value: Any) -> None:
    """Check arguments of FSDP; imports Accelerate only for a dict.

    Raises:
        ArgumentError: It is neither True nor a dict with valid arguments.
    """
    if isinstance(value, Mapping):
        from accelerate import FullyShardedDataParallelPlugin

        require_keywords(name, value, FullyShardedDataParallelPlugin, "accelerate.FullyShardedDataParallelPlugin")
    elif value is not True:
        expected, do = "True, or a dict with FSDP2 arguments", 'parallelism={"fsdp": True}, or leave `parallelism` out'
        raise fail(ArgumentError, write_place(name), got=repr(value), expected=expected, do=do)


def require_accelerator(value: Any) -> None:
    """Check `accelerator`; imports Accelerate only for a dict.

    Raises:
        ArgumentError: It is neither None, a dict with valid arguments, nor an object that prepares models.
    """
    if isinstance(value, Mapping) and value:
        from accelerate import Accelerator

        require_keywords("accelerator", value, Accelerator, "accelerate.Accelerator")
    is_object = hasattr(value, "prepare") and not isinstance(value, type)
    if value is None or isinstance(value, Mapping) or is_object:
        return
    got, expected = f"{value!r} ({type(value).__name__})", "an accelerate.Accelerator, or a dict with its arguments"
    do = "leave it out, and choose the hardware at launch: accmt launch -N 2 train.py"
    if value == "cpu":
        do = 'accelerator={"cpu": True}'
    elif isinstance(value, type):
        do = f"accelerator={value.__name__}()"
    raise fail(ArgumentError, "Trainer(accelerator=...)", got=got, expected=expected, do=do)


PROFILERS = ("simple", "advanced", "pytorch")


@dataclass(frozen=True, kw_only=True)
class TorchFlags(Options):
    """Torch settings during a run.

    Args:
        deterministic: Whether torch uses only deterministic algorithms. "warn" prints a warning if there is none for an
            operation.
        benchmark: The value of `torch.backends.cudnn.benchmark`; None leaves it unchanged.
        detect_anomaly: Whether autograd looks for the operation that produced a NaN. This is slow.
    """

    deterministic: bool | Literal["warn"] = False
    benchmark: bool | None = None
    detect_anomaly: bool = False


@dataclass(frozen=True, kw_only=True)
class ParallelismOptions(Options):
    """How the model is distributed over processes. The product of the sizes is the number of processes.

    Args:
        fsdp: True shards the model with FSDP2; a dict sets arguments of `accelerate.FullyShardedDataParallelPlugin`.
        shard: Number of processes that share the shards of one model replica. None means all processes.
        replicate: Number of model replicas. None means one.
        tp: Number of processes over which the model is split by its tensor-parallel plan; they process the same
            batches. None does not split.
        ddp: Arguments of `accelerate.DistributedDataParallelKwargs`, for a model that is not sharded. It replaces the
            options above.
        engine: Name of an engine from another package (entry-point group `accmt.engines`). It replaces the other
            options.
    """

    fsdp: bool | Mapping[str, Any] = True
    shard: Annotated[int, partial(require_int, at_least=1)] | None = None
    replicate: Annotated[int, partial(require_int, at_least=1)] | None = None
    tp: Annotated[int, partial(require_int, at_least=1)] | None = None
    ddp: Mapping[str, Any] | None = None
    engine: str | None = None

    def check(self, name: str) -> None:
        """Check arguments of FSDP and DDP; imports Accelerate only for a dict."""
        require_fsdp(f"{name}.fsdp", self.fsdp)
        require_ddp(f"{name}.ddp", self.ddp)
        if self.engine is not None:
            require_choice(f"{name}.engine", self.engine, names("accmt.engines"))
            if (self.shard, self.replicate, self.tp, self.ddp) != (None, None, None, None):
                raise_wrong_value(name, self.to_dict(), "only `engine`", f'parallelism={{"engine": {self.engine!r}}}')
        if self.ddp is not None and (self.fsdp, self.shard, self.replicate, self.tp) != (True, None, None, None):
            do = f'parallelism={{"ddp": {dict(self.ddp)!r}}}, or leave "ddp" out to shard the model'
            raise_wrong_value(name, self.to_dict(), "`ddp`, or how the model is sharded", do)


@dataclass(frozen=True, kw_only=True)
class RunningSettings:
    """Device, precision, seed, run length and output.

    Args:
        accelerator: An `accelerate.Accelerator`, or a dict of its arguments; None builds one from the launch settings.
        mixed_precision: "no", "fp16" or "bf16", or the name of a precision from another package (entry-point group
            `accmt.precisions`); None uses the launch setting.
        parallelism: Shards the model over processes, or sets DDP's arguments: `ParallelismOptions(fsdp=True)`, or a
            dict of its arguments.
        compile: Whether to compile the model with `torch.compile`. A dict sets its arguments. `{"buckets": 64}` pads
            batches to multiples of 64, which limits the number of graphs. `{"regional": True}` compiles only the
            repeated layers, so that compilation takes a fraction of the time.
        seed: Random seed for everything. None draws a random seed.
        torch_flags: Torch settings during the run: `TorchFlags(deterministic=True)`, or a dict of its arguments.
        gradient_checkpointing: Whether a transformers model recomputes activations to save memory. A dict sets
            arguments of `torch.utils.checkpoint.checkpoint`.
        sync_batchnorm: Whether batch norm uses the statistics of all processes during training. It works on GPUs only,
            and has no effect with one process.
        fast_dev_run: Tests a script: runs this many batches (True: 1) of each kind, with one evaluation at the end, and
            writes nothing.
        profiler: Profiles `fit`: "simple" by phase, "advanced" by function, "pytorch" by operation for a few steps; or
            an `accelerate.utils.ProfileKwargs` or a `torch.profiler.profile` for custom settings. Results are saved in
            the run folder.
        min_length: Minimum length of training before it can end early: "2 epochs", "100 steps", or a list of both.
        max_time: Maximum training time, after which training ends at the next optimizer step: "DD:HH:MM:SS" or "1h30m",
            a timedelta, or a dict of its arguments. The time between interrupted runs does not count, and `min_length`
            takes precedence.
        callbacks: A `Callback` or a list of them.
        verbose: False silences messages and progress bars.
        enable_progress_bar: True shows a progress bar even if stderr is not a terminal; False never shows one. None
            shows a bar in a terminal, and prints occasional log lines otherwise.
        enable_model_summary: Whether to print a table of the model's modules at the start. A number sets the depth;
            True means 1, and -1 shows all levels.
    """

    accelerator: Any = None
    mixed_precision: str | None = None
    parallelism: ParallelismOptions | None = None
    compile: bool | Mapping[str, Any] = False
    seed: int | None = None
    torch_flags: TorchFlags = None  # type: ignore[assignment]  # set in __post_init__
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
        set_field(self, "torch_flags", TorchFlags.read("torch_flags", self.torch_flags))
        self._least  # noqa: B018 - raises if invalid
        require_profiler(self.profiler)
        read_max_time(self.max_time)
        compiling: Any = self.compile
        if not isinstance(compiling, bool | Mapping):
            raise_wrong_value(
                "compile", compiling, "True, False, or a dict with arguments of torch.compile", "compile=True"
            )
        require_keywords("compile", self.compile_kwargs, torch.compile, "torch.compile")
        if self.compile_buckets is not None:
            require_int("compile.buckets", self.compile_buckets, at_least=1)
        if isinstance(self.compile, Mapping):
            require_choice("compile.regional", self.compile.get("regional", False), (False, True))
        asked: Any = self.parallelism
        set_field(
            self, "parallelism", None if asked is None or asked == {} else ParallelismOptions.read("parallelism", asked)
        )
        value: Any = self.gradient_checkpointing
        if not isinstance(value, bool | Mapping):
            expected = "True, False, or a dict with arguments of torch.utils.checkpoint.checkpoint"
            raise_wrong_value("gradient_checkpointing", value, expected, "gradient_checkpointing=True")

    @property
    def compile_kwargs(self) -> Mapping[str, Any]:
        """Arguments of `torch.compile`."""
        compiling = self.compile if isinstance(self.compile, Mapping) else {}
        return {name: value for name, value in compiling.items() if name not in ("buckets", "regional")}

    @property
    def compile_buckets(self) -> int | None:
        """Batches are padded to multiples of this length; None does not pad."""
        return self.compile.get("buckets") if isinstance(self.compile, Mapping) else None

    @property
    def compiles_regions(self) -> bool:
        """Whether only the repeated layers are compiled."""
        return isinstance(self.compile, Mapping) and bool(self.compile.get("regional"))

    @property
    def compiles(self) -> bool:
        """Whether the model is compiled."""
        return self.compile is not False

    @property
    def min_epochs(self) -> int | None:
        """Training does not end early before this many epochs."""
        return self._least.get("epoch")

    @property
    def min_steps(self) -> int | None:
        """Training does not end early before this many optimizer steps."""
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
    """Check `profiler`.

    Raises:
        ArgumentError: `value` is neither None, one of `PROFILERS`, an `accelerate.utils.ProfileKwargs` nor a
            `torch.profiler.profile`.
    """
    if value is None or (isinstance(value, str) and value in PROFILERS):
        return
    if not isinstance(value, str):
        from accelerate.utils import ProfileKwargs
        from torch.profiler import profile

        if isinstance(value, ProfileKwargs | profile):
            return
    names = ", ".join(f'"{name}"' for name in PROFILERS)
    expected = f"{names}, an accelerate.utils.ProfileKwargs or a torch.profiler.profile object, or None"
    raise_wrong_value("profiler", value, expected, f'profiler="{nearest(value, PROFILERS, cutoff=0)}"?')
