"""Trainer arguments about failures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, TypeAlias

from accmt.messages import warn
from accmt.options.checks import Group, Off, Options, Range, raise_wrong_value, set_field


class Handler(Enum):
    """A kind of error at which a run takes a safe checkpoint before raising it.

    Attributes:
        KEYBOARD: Ctrl-C and preemption signals.
        CUDA_OUT_OF_MEMORY: A device ran out of memory.
        ANY: Any other `Exception`.
        ALL: All of them.
    """

    KEYBOARD = 1
    CUDA_OUT_OF_MEMORY = 2
    ANY = 3
    ALL = 4


def read_handlers(name: str, value: Any) -> frozenset[Handler]:
    """Return the kinds of errors in `Trainer(handlers=...)`, without `ALL`.

    Args:
        name: The argument.
        value: None, a `Handler`, its name in any case, or a list of these.

    Raises:
        ArgumentError: Something else.
    """
    if value is None:
        return frozenset()
    values = value if isinstance(value, list | tuple | set | frozenset) else [value]
    handlers = set()
    for handler in values:
        kind = handler.name if isinstance(handler, Handler) else str(handler).upper()
        if kind not in Handler.__members__:
            names = ", ".join(f"Handler.{known}" for known in Handler.__members__)
            expected = f"{names}, one of their names, or a list of them"
            raise_wrong_value(name, handler, expected, "handlers=Handler.ALL")
        handlers.add(Handler[kind])
    if Handler.ALL in handlers:
        handlers = set(Handler)
    return frozenset(handlers - {Handler.ALL})


Positive: TypeAlias = Annotated[float, Range(gt=0)]


@dataclass(frozen=True, kw_only=True)
class Failures(Options):
    """How a run reacts to failures.

    Args:
        on_nonfinite: What to do after a training loss that is not finite: "stop" ends the run with an error that names
            the batch, "skip" skips the optimizer step (and waits for the device once per step), "rollback" returns to
            the newest checkpoint and skips that step; None only warns.
        spike_guard: Treats a loss as not finite if it is more than this many standard deviations above the mean of the
            process's last 100 losses.
        on_bad_sample: "raise" ends the run with an error that names a sample that cannot be read; "skip" drops it from
            its batch, counts it (`bad_samples`) and warns; not for streams.
        on_long_sample: What to do with a sample longer than `max_tokens`: "warn" puts it into a separate micro-batch
            and warns once; "raise" ends the run.
        hang_timeout_s: Seconds without a finished batch after which the run ends; the message says where.
        machine_timeout_s: On several machines, seconds without a heartbeat from one machine after which the others end.
            None waits as long as torch does.
        preempt_exit_code: Exit code after SIGTERM or SIGUSR1, from 0 to 255.
        preflight: Whether to check at the start that the state can be stored, and that the disk has enough space.
        try_longest: Whether to run forward and backward on the largest possible micro-batch before training, so that an
            out-of-memory error occurs early. None does this only on devices with their own memory.
        compare_replicas: Whether processes compare their replicated weights and optimizer state at each evaluation and
            checkpoint. Set this to False if replicas differ on purpose, as in local SGD.
    """

    on_nonfinite: Annotated[Literal["stop", "skip", "rollback"] | None, Off()] = "stop"
    spike_guard: Annotated[Positive | None, Off(is_zero=True)] = None
    on_bad_sample: Literal["raise", "skip"] = "raise"
    on_long_sample: Literal["warn", "raise"] = "warn"
    hang_timeout_s: Annotated[Positive | None, Off(is_zero=True)] = None
    machine_timeout_s: Annotated[Positive | None, Off(is_zero=True)] = 120.0
    preempt_exit_code: Annotated[int, Range(ge=0, le=255)] = 143
    preflight: bool = True
    try_longest: bool | None = None
    compare_replicas: bool = True

    def check(self, name: str) -> None:
        """Warn about a spike guard without effect."""
        # Without a reaction to losses that are not finite, there is none to a spike either.
        if self.spike_guard is not None and self.on_nonfinite is None:
            set_field(self, "spike_guard", None)
            warn(f"{name}.spike_guard has no effect with on_nonfinite=None")


@dataclass(frozen=True, kw_only=True)
class FailureSettings(Group):
    """Failures.

    Args:
        handlers: Errors after which accmt saves a checkpoint of the last optimizer step: a `Handler`, its name, or a
            list.
        failures: How to react to a loss that is not finite, an unreadable sample, a hanging process and the like:
            `Failures(on_nonfinite="skip")`, or a dict.
    """

    handlers: Annotated[Handler | str | Iterable[Handler | str] | None, read_handlers, Off()] = None
    failures: Failures = None  # type: ignore[assignment]  # set in __post_init__

    @property
    def skips_bad_samples(self) -> bool:
        """Whether samples that cannot be read are skipped."""
        return self.failures.on_bad_sample == "skip"

    @property
    def kinds(self) -> frozenset[Handler]:
        """The kinds of errors at which a safe checkpoint is taken."""
        return read_handlers("handlers", self.handlers)
