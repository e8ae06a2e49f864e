"""Trainer arguments about the run as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from accmt.errors import nearest
from accmt.options.checks import (
    Expected,
    Group,
    Off,
    Options,
    Range,
    raise_wrong_value,
    require_choice,
    require_keywords,
    set_field,
    write_argument,
)
from accmt.options.units import Unit, read_every, read_max_time
from accmt.precisions import PRECISIONS
from accmt.registry import addon, names

# ---- Checks of arguments about device and precision.


def require_precision(name: str, value: Any) -> None:
    """Check `mixed_precision`.

    Raises:
        ArgumentError: No such precision; the message translates the values of other trainers.
    """
    choices = [None, *PRECISIONS]
    if value in choices:
        return
    choices += names("accmt.precisions")
    do = addon("hint_for_precision")(value)
    if do is None or value in choices:
        require_choice(name, value, choices)
    else:
        raise_wrong_value(name, value, "one of " + ", ".join(map(repr, choices)), do)


def require_fsdp(name: str, value: Any) -> None:
    """Check arguments of FSDP; imports Accelerate only for a dict.

    Raises:
        ArgumentError: It is neither True nor a dict with valid arguments.
    """
    if isinstance(value, Mapping):
        require_keywords(name, value, "accelerate.FullyShardedDataParallelPlugin")
    elif value is not True:
        # `fsdp: False` beside other sizes asks for shards and for none.
        do = f"{write_argument(name, 'True')}, or leave `parallelism` out"
        raise_wrong_value(name, value, "True, or a dict with FSDP2 arguments", do)


def require_accelerator(name: str, value: Any) -> None:
    """Check `accelerator`; imports Accelerate only for a dict.

    Raises:
        ArgumentError: It is neither a dict with valid arguments, nor an object that prepares models.
    """
    if isinstance(value, Mapping):
        require_keywords(name, value, "accelerate.Accelerator")
    elif isinstance(value, type):  # the parentheses are missing
        do = f"accelerator={value.__name__}()"
        raise_wrong_value(name, value, "an accelerate.Accelerator, or a dict with its arguments", do)
    # Other trainers take the name or the number of devices here, which accmt gets from the launcher.
    elif not hasattr(value, "prepare"):
        do = "leave it out, and choose the hardware at launch: accmt launch -N 2 train.py"
        if value == "cpu":
            do = 'accelerator={"cpu": True}'
        raise_wrong_value(name, value, "an accelerate.Accelerator, or a dict with its arguments", do)


def require_engine(name: str, value: Any) -> None:
    """Check the name of an engine.

    Raises:
        ArgumentError: No package adds an engine of this name.
    """
    known = names("accmt.engines")
    # Without any, there would be no name to suggest.
    if not known:
        raise_wrong_value(name, value, "an engine of an installed package; there is none", "leave `engine` out")
    require_choice(name, value, known)


def require_compile(name: str, value: Any) -> None:
    """Check `compile`.

    Raises:
        ArgumentError: It is neither True, False nor a dict with valid arguments.
    """
    if isinstance(value, bool):
        return
    if not isinstance(value, Mapping):
        raise_wrong_value(name, value, "True, False, or a dict with arguments of torch.compile", "compile=True")
    arguments = dict(value)
    buckets = arguments.pop("buckets", None)
    # True is 1, and multiples of 1 compile a graph for each length.
    if buckets is not None and (type(buckets) is not int or buckets < 1):
        do = write_argument("compile.buckets", 64)
        raise_wrong_value("compile.buckets", buckets, "a whole number of at least 1", do)
    require_choice("compile.regional", arguments.pop("regional", False), (False, True))
    require_keywords(name, arguments, "torch.compile")


def require_max_time(name: str, value: Any) -> None:
    """Check `max_time`.

    Raises:
        ArgumentError: It is not a time above 0.
    """
    read_max_time(value)


def read_min_length(name: str, value: Any) -> dict[Unit, int]:
    """Return the minimum number of each unit.

    Raises:
        ArgumentError: It is neither a number with a unit, nor a list of two with different units.
    """
    lengths: dict[Unit, int] = {}
    for text in value if isinstance(value, list | tuple) else [value]:
        length = read_every(name, text, ("epoch", "step"), also=", or a list of both")
        # Of two numbers of epochs, it would be unclear whether the smaller or the larger one counts.
        if length.unit in lengths:
            raise_wrong_value(name, value, "each unit once", 'min_length=["2 epochs", "500 steps"]')
        lengths[length.unit] = int(length.number)
    return lengths


PROFILERS = ("simple", "advanced", "pytorch")

_require_ddp = partial(require_keywords, owner="accelerate.DistributedDataParallelKwargs")
_RECOMPUTATION = Expected("True, False, or a dict with arguments of torch.utils.checkpoint.checkpoint", "True")
_BATCHES = Expected("True, or a number of batches", "True")
_DEPTH = Expected("True or False, or a depth from 1; -1 shows all", "True")


def require_profiler(name: str, value: Any) -> None:
    """Check `profiler`.

    Raises:
        ArgumentError: `value` is neither one of `PROFILERS`, an `accelerate.utils.ProfileKwargs` nor a
            `torch.profiler.profile`.
    """
    if value in PROFILERS:
        return
    if not isinstance(value, str):
        from accelerate.utils import ProfileKwargs
        from torch.profiler import profile

        if isinstance(value, ProfileKwargs | profile):
            return
    expected = f"one of {PROFILERS}, an accelerate.utils.ProfileKwargs or a torch.profiler.profile object, or None"
    raise_wrong_value(name, value, expected, f'profiler="{nearest(value, PROFILERS, cutoff=0)}"')


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


Size: TypeAlias = Annotated[int, Range(ge=1)]
"""A number of processes or replicas."""


@dataclass(frozen=True, kw_only=True)
class ParallelismOptions(Options):
    """How the model is distributed over processes. The product of the sizes is the number of processes.

    Args:
        fsdp: True shards the model with FSDP2; a dict sets arguments of `accelerate.FullyShardedDataParallelPlugin`.
        shard: Number of processes that share the shards of one model replica. None means all processes.
        replicate: Number of model replicas. None means one.
        tp: Number of processes over which the model is split by its tensor-parallel plan; they process the same
            batches.
        ddp: Arguments of `accelerate.DistributedDataParallelKwargs`, for a model that is not sharded.
        engine: Name of another package's engine (entry-point group `accmt.engines`). It replaces the other options.
    """

    fsdp: Annotated[bool | Mapping[str, Any], require_fsdp] = True
    shard: Annotated[Size | None, Off()] = None
    replicate: Annotated[Size | None, Off()] = None
    tp: Annotated[Size | None, Off()] = None
    ddp: Annotated[Mapping[str, Any] | None, _require_ddp] = None
    engine: Annotated[str | None, require_engine, Off()] = None

    def check(self, name: str) -> None:
        """Reject two ways to distribute the model at once."""
        if self.engine is not None and (self.shard, self.replicate, self.tp, self.ddp) != (None, None, None, None):
            raise_wrong_value(name, self.to_dict(), "only `engine`", f'parallelism={{"engine": {self.engine!r}}}')
        if self.ddp is not None and (self.fsdp, self.shard, self.replicate, self.tp) != (True, None, None, None):
            do = f'parallelism={{"ddp": {dict(self.ddp)!r}}}, or leave "ddp" out to shard the model'
            raise_wrong_value(name, self.to_dict(), "`ddp`, or how the model is sharded", do)

    def to_dict(self) -> dict[str, Any]:
        """Return the values that differ from their defaults; `fsdp` alone too, since no values mean no sharding."""
        return super().to_dict() or {"fsdp": True}


@dataclass(frozen=True, kw_only=True)
class RunningSettings(Group):
    """Device, precision, seed, run length and output.

    Args:
        accelerator: An `accelerate.Accelerator`, or a dict of its arguments; None builds one from the launch settings.
        mixed_precision: "no", "fp16" or "bf16", or the name of another package's precision (entry-point group
            `accmt.precisions`); None uses the launch setting.
        parallelism: Shards the model over processes, or sets DDP's arguments: `ParallelismOptions(fsdp=True)`, or a
            dict.
        compile: Whether to compile the model with `torch.compile`; a dict sets its arguments. `{"buckets": 64}` pads
            batches to multiples of 64, which limits the number of graphs. `{"regional": True}` compiles only the
            repeated layers, in a fraction of the time.
        seed: Random seed for everything. None draws a random seed.
        torch_flags: Torch settings during the run: `TorchFlags(deterministic=True)`, or a dict.
        gradient_checkpointing: Whether a transformers model recomputes activations to save memory. A dict sets
            arguments of `torch.utils.checkpoint.checkpoint`.
        sync_batchnorm: Whether batch norm uses the statistics of all processes during training. GPUs only.
        fast_dev_run: Tests a script: runs this many batches (True: 1) of each kind, with one evaluation, and writes
            nothing.
        profiler: Profiles `fit`: "simple" by phase, "advanced" by function, "pytorch" by operation for a few steps; or
            an `accelerate.utils.ProfileKwargs` or a `torch.profiler.profile`.
        min_length: Minimum length of training before it can end early: "2 epochs", "100 steps", or a list of both.
        max_time: Maximum training time over all starts, after which training ends at the next optimizer step:
            "DD:HH:MM:SS" or "1h30m", a timedelta, or a dict of its arguments. `min_length` takes precedence.
        callbacks: A `Callback` or a list of them.
        verbose: False silences messages and progress bars.
        enable_progress_bar: True shows a progress bar even if stderr is not a terminal; False never. None shows a bar
            in a terminal, and prints occasional lines otherwise.
        enable_model_summary: Whether to print a table of the model's modules at the start. A number sets the depth; -1
            shows all levels.
    """

    accelerator: Annotated[Any, require_accelerator, Off()] = None
    mixed_precision: Annotated[str | None, require_precision, Off("no")] = None
    parallelism: Annotated[ParallelismOptions | None, Off()] = None
    compile: Annotated[bool | Mapping[str, Any], require_compile] = False
    seed: Annotated[int, Range(ge=0)] | None = None
    torch_flags: Annotated[TorchFlags, Off()] = None  # type: ignore[assignment]  # set in __post_init__
    gradient_checkpointing: Annotated[bool | Mapping[str, Any], _RECOMPUTATION] = False
    sync_batchnorm: bool = False
    fast_dev_run: Annotated[bool | Annotated[int, Range(ge=0)], _BATCHES] = False
    profiler: Annotated[Any, require_profiler, Off()] = None
    min_length: Annotated[str | Sequence[str] | None, read_min_length, Off()] = None
    max_time: Annotated[str | timedelta | Mapping[str, float] | None, require_max_time, Off()] = None
    callbacks: Annotated[Any, Off()] = None
    verbose: bool = True
    enable_progress_bar: bool | None = None
    enable_model_summary: Annotated[bool | Annotated[int, Range(ge=-1)], _DEPTH] = False

    def __post_init__(self) -> None:
        if self.parallelism is not None:
            set_field(self, "parallelism", addon("read_parallelism")(self.parallelism))
        super().__post_init__()

    @property
    def compile_kwargs(self) -> Mapping[str, Any]:
        """Arguments of `torch.compile`."""
        arguments = dict(self._compile_options)
        # accmt's own, which torch.compile would reject.
        arguments.pop("buckets", None)
        arguments.pop("regional", None)
        return arguments

    @property
    def compile_buckets(self) -> int | None:
        """Batches are padded to multiples of this length; None does not pad."""
        return self._compile_options.get("buckets")

    @property
    def compiles_regions(self) -> bool:
        """Whether only the repeated layers are compiled."""
        return bool(self._compile_options.get("regional"))

    @property
    def _compile_options(self) -> Mapping[str, Any]:
        if isinstance(self.compile, Mapping):
            return self.compile
        return {}

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
        if self.min_length is None:
            return {}
        return read_min_length("min_length", self.min_length)
