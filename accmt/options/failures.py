"""The Trainer's arguments about failures: what happens when something goes wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypedDict

from accmt.options.checks import raise_wrong_value, require_choice, require_int, require_options, require_positive


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
