"""The Trainer's arguments about failures: what happens when something goes wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Annotated, Any, Literal

from accmt.options.checks import Options, raise_wrong_value, require_int, require_positive, set_field


class Handler(Enum):
    """A kind of error that a run takes a safe checkpoint at, before the error is raised.

    Attributes:
        KEYBOARD: Ctrl-C, and the signals of pre-emption.
        CUDA_OUT_OF_MEMORY: A device without memory left.
        ANY: Every `Exception` that is none of these.
        ALL: All of them.
    """

    KEYBOARD = 1
    CUDA_OUT_OF_MEMORY = 2
    ANY = 3
    ALL = 4


def read_handlers(value: Any) -> frozenset[Handler]:
    """Return the single kinds that `Trainer(handlers=...)` names.

    Args:
        value: None, a `Handler`, its name in any case, or a list of these.

    Raises:
        ArgumentError: Something else.
    """
    values = [] if value is None else value if isinstance(value, list | tuple | set | frozenset) else [value]
    handlers = {_read_one(one) for one in values}
    if Handler.ALL in handlers:
        handlers = set(Handler)
    return frozenset(handlers - {Handler.ALL})


def _read_one(value: Any) -> Handler:
    if isinstance(value, Handler):
        return value
    name = value.upper() if isinstance(value, str) else ""
    if name not in Handler.__members__:
        names = ", ".join(f"Handler.{known}" for known in Handler.__members__)
        raise_wrong_value("handlers", value, f"{names}, the name of one, or a list", "handlers=Handler.ALL")
    return Handler[name]


@dataclass(frozen=True, kw_only=True)
class Failures(Options):
    """What happens when something goes wrong.

    Args:
        on_nonfinite: What happens after a training loss that is not finite: "stop" ends the run with an error that
            names the batch, "skip" leaves the optimizer step out before it is made (and waits for the device once per
            step), "rollback" goes back to the newest checkpoint and skips that step; None only warns.
        spike_guard: Treats a loss this many standard deviations above the mean of the process's last 100 as not
            finite, from the 21st on; None is off.
        on_bad_sample: "raise" ends the run where a sample cannot be read, with an error that names it; "skip" leaves it
            out of its batch, counts it (`bad_samples`) and warns; no effect on streams.
        on_long_sample: With `max_tokens` in the hyper-parameters, "warn" makes a sample that is longer a micro-batch of
            its own, and warns once; "raise" ends the run.
        hang_timeout_s: Seconds without a finished batch after which the run counts as hung and ends, saying where;
            None is off.
        machine_timeout_s: On several machines, seconds without a sign of life of one after which the others end; None
            waits as long as torch does.
        preempt_exit_code: Exit code after SIGTERM or SIGUSR1, from 0 to 255.
        preflight: Whether a run tries at its start to save and load its state in memory, and compares the room on the
            disk with what checkpoints and model will need.
        try_longest: Whether the largest micro-batch that the data can bring goes through forward and backward before
            training, without effect, so that memory runs out now if it does: the one of the longest samples, where
            lengths are known; None does so where the device has memory of its own.
        compare_replicas: Whether processes compare the weights and optimizer state that they hold alike, at each
            evaluation and checkpoint, and end the run where they differ. False is for training that lets replicas
            differ on purpose, such as local SGD.
    """

    on_nonfinite: Literal["stop", "skip", "rollback"] | None = "stop"
    spike_guard: Annotated[float, require_positive] | None = None
    on_bad_sample: Literal["raise", "skip"] = "raise"
    on_long_sample: Literal["warn", "raise"] = "warn"
    hang_timeout_s: Annotated[float, require_positive] | None = None
    machine_timeout_s: Annotated[float, require_positive] | None = 120.0
    preempt_exit_code: Annotated[int, partial(require_int, at_least=0, at_most=255)] = 143
    preflight: bool = True
    try_longest: bool | None = None
    compare_replicas: bool = True

    def check(self, name: str) -> None:
        """Refuse a guard for losses after which nothing happens."""
        if self.spike_guard is not None and self.on_nonfinite is None:
            expected, do = "on_nonfinite other than None beside it", 'Failures(spike_guard=6, on_nonfinite="rollback")'
            raise_wrong_value(f"{name}.spike_guard", self.spike_guard, expected, do)


@dataclass(frozen=True, kw_only=True)
class FailureSettings:
    """What happens when something goes wrong.

    Args:
        handlers: Errors at which a safe checkpoint of the last optimizer step is taken before they are raised: a
            `Handler`, its name, or a list.
        failures: What happens at a loss that is not finite, a sample that cannot be read, a process that hangs, and
            the like: `Failures(on_nonfinite="skip")`, or a dict of its arguments.
    """

    handlers: Handler | str | Iterable[Handler | str] | None = None
    failures: Failures = None  # type: ignore[assignment]  # which is read when this is made

    def __post_init__(self) -> None:
        set_field(self, "failures", Failures.read("failures", self.failures))
        read_handlers(self.handlers)

    @property
    def kinds(self) -> frozenset[Handler]:
        """The single kinds of errors at which a safe checkpoint is taken."""
        return read_handlers(self.handlers)
