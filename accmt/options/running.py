"""The Trainer's arguments about the run as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Literal

import torch

from accmt.errors import ArgumentError, explain, nearest
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

# ---- Checks the Trainer's arguments about device and precision.


def require_precision(value: Any) -> None:
    """Check `mixed_precision`.

    Raises:
        ArgumentError: No such precision; the message says what the one of another trainer is here.
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
    raise ArgumentError(explain(where, got, expected, do))


def require_ddp_kwargs(value: Any) -> None:
    """Check `ddp_kwargs`; Accelerate is imported for a dict only.

    Raises:
        ArgumentError: It is neither None nor a dict of arguments that exist.
    """
    require_mapping("ddp_kwargs", value)
    if value:
        from accelerate import DistributedDataParallelKwargs

        require_keywords("ddp_kwargs", value, DistributedDataParallelKwargs, "accelerate.DistributedDataParallelKwargs")


def require_fsdp(name: str, value: Any) -> None:
    """Check arguments of FSDP; Accelerate is imported for a dict of them only.

    Raises:
        ArgumentError: It is neither True nor a dict of arguments that exist.
    """
    if isinstance(value, Mapping):
        from accelerate import FullyShardedDataParallelPlugin

        require_keywords(name, value, FullyShardedDataParallelPlugin, "accelerate.FullyShardedDataParallelPlugin")
    elif value is not True:
        expected, do = "True, or arguments of FSDP2 by name", 'parallelism={"fsdp": True}, or leave `parallelism` out'
        raise ArgumentError(explain(write_place(name), repr(value), expected, do))


def require_accelerator(value: Any) -> None:
    """Check `accelerator`; Accelerate is imported for a dict only.

    Raises:
        ArgumentError: It is neither None, a dict of arguments that exist nor an object that prepares models.
    """
    if isinstance(value, Mapping) and value:
        from accelerate import Accelerator

        require_keywords("accelerator", value, Accelerator, "accelerate.Accelerator")
    is_object = hasattr(value, "prepare") and not isinstance(value, type)
    if value is None or isinstance(value, Mapping) or is_object:
        return
    got, expected = f"{value!r} ({type(value).__name__})", "an accelerate.Accelerator, or a dict of its arguments"
    do = "leave it out, and choose the hardware as the program starts: accmt launch -N 2 train.py"
    if value == "cpu":
        do = 'accelerator={"cpu": True}'
    elif isinstance(value, type):
        do = f"accelerator={value.__name__}()"
    raise ArgumentError(explain("Trainer(accelerator=...)", got, expected, do))


PROFILERS = ("simple", "advanced", "pytorch")


@dataclass(frozen=True, kw_only=True)
class TorchFlags(Options):
    """What is set in torch during a run.

    Args:
        deterministic: Whether torch uses deterministic algorithms only; "warn" warns where there is none.
        benchmark: What `torch.backends.cudnn.benchmark` is set to; None leaves it.
        detect_anomaly: Whether autograd looks for the operation that made a NaN; slow.
    """

    deterministic: bool | Literal["warn"] = False
    benchmark: bool | None = None
    detect_anomaly: bool = False


@dataclass(frozen=True, kw_only=True)
class ParallelismOptions(Options):
    """How the model is spread over the processes of a launch. The product of the sizes is the number of processes.

    Args:
        fsdp: True shards it by FSDP2; a dict gives arguments of `accelerate.FullyShardedDataParallelPlugin`.
        shard: How many processes shard a model together; None is all.
        replicate: How many such groups there are, each with a model of its own; None is one.
        tp: Over how many processes the model is split by its plan for tensor parallelism; such processes share each
            batch. None does not split.
        engine: Name of an engine that another package adds (entry-point group `accmt.engines`). It replaces the other
            options.
    """

    fsdp: bool | Mapping[str, Any] = True
    shard: Annotated[int, partial(require_int, at_least=1)] | None = None
    replicate: Annotated[int, partial(require_int, at_least=1)] | None = None
    tp: Annotated[int, partial(require_int, at_least=1)] | None = None
    engine: str | None = None

    def check(self, name: str) -> None:
        """Check FSDP's arguments; Accelerate is imported for a dict of them only."""
        require_fsdp(f"{name}.fsdp", self.fsdp)
        if self.engine is not None:
            require_choice(f"{name}.engine", self.engine, names("accmt.engines"))
            if (self.shard, self.replicate, self.tp) != (None, None, None):
                raise_wrong_value(name, self.to_dict(), "an engine alone", f'parallelism={{"engine": {self.engine!r}}}')


@dataclass(frozen=True, kw_only=True)
class RunningSettings:
    """Device, precision, seed, length and appearance of a run.

    Args:
        accelerator: An `accelerate.Accelerator`, or a dict of its arguments; None builds one from the launch.
        mixed_precision: "no", "fp16" or "bf16", or the name of a precision that another package adds (entry-point
            group `accmt.precisions`); None takes the launch's.
        ddp_kwargs: Arguments of `accelerate.DistributedDataParallelKwargs`.
        parallelism: Spreads the model over the processes of a launch: `ParallelismOptions(fsdp=True)`, or a dict of its
            arguments.
        compile: Whether the model is compiled by `torch.compile`; a dict gives its arguments. "buckets": 64 among them
            pads batches to multiples of 64, so that there are few graphs, and says when one is made. "regional": True
            compiles the repeated layers one by one, which takes a fraction of the time, and leaves the rest as it is.
        seed: Seed of everything random; None draws one.
        torch_flags: What is set in torch during the run: `TorchFlags(deterministic=True)`, or a dict of its arguments.
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
    torch_flags: TorchFlags = None  # type: ignore[assignment]  # which is read when this is made
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
        asked: Any = self.parallelism
        set_field(
            self, "parallelism", None if asked is None or asked == {} else ParallelismOptions.read("parallelism", asked)
        )
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
    names = ", ".join(f'"{name}"' for name in PROFILERS)
    expected = f"{names}, an accelerate.utils.ProfileKwargs or a torch.profiler.profile object, or None"
    raise_wrong_value("profiler", value, expected, f'profiler="{nearest(value, PROFILERS, cutoff=0)}"?')


def _is_instance(value: Any) -> bool:
    if isinstance(value, str):
        return False
    from accelerate.utils import ProfileKwargs
    from torch.profiler import profile

    return isinstance(value, ProfileKwargs | profile)
