"""Profilers: a table of phases, a table of functions, or a trace of operations."""

from __future__ import annotations

import cProfile
import io
import math
import pstats
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from accmt.addons.monitor import Moment, Stopwatch, StopwatchOfCallbacks
from accmt.callbacks.callback import Callback, StatelessCallback
from accmt.errors import ArgumentError, fail
from accmt.files import dumps, write_text
from accmt.messages import say, warn
from accmt.processes import process_index

# ---- Time per phase: a stopwatch with finer phases, which also counts calls


PHASES = (
    "data",
    "training_step",
    "backward",
    "update",
    "evaluation",
    "saving",
    "checkpoint",
    "logging",
    "callbacks",
    "other",
)

_OPENS_UPDATE = Moment("update", after="update", callbacks="callbacks")
_IN_UPDATE = Moment("update", callbacks="callbacks")
_OTHER = Moment("other", callbacks="callbacks")

PHASE_MOMENTS: dict[str, Moment] = {
    "on_fit_start": _OTHER,
    "on_epoch_start": _OTHER,
    "on_before_training_step": Moment("data", after="training_step", callbacks="callbacks"),
    "on_before_backward": Moment("training_step", after="backward", callbacks="callbacks"),
    "on_after_backward": Moment("backward", after="training_step", callbacks="callbacks"),
    "on_after_training_step": Moment("training_step", callbacks="callbacks"),
    "on_before_optimizer_step": _OPENS_UPDATE,
    "on_after_optimizer_step": _IN_UPDATE,
    "on_before_scheduler_step": _OPENS_UPDATE,
    "on_after_scheduler_step": _IN_UPDATE,
    "on_before_zero_grad": _OPENS_UPDATE,
    "on_after_zero_grad": _IN_UPDATE,
    "on_update_end": _IN_UPDATE,
    "on_log": Moment("logging", callbacks="logging", interrupts=True),
    "on_evaluation_start": Moment("other", after="evaluation", callbacks="callbacks"),
    "on_evaluation_end": Moment("evaluation", callbacks="callbacks"),
    "on_save_model": Moment("saving", callbacks="callbacks", is_certain=True, interrupts=True),
    "on_save_checkpoint": Moment("checkpoint", callbacks="callbacks", is_certain=True, interrupts=True),
    "on_epoch_end": _OTHER,
    "on_fit_end": _OTHER,
}

_ENDS_CALL = frozenset(
    {
        "on_before_training_step",
        "on_after_backward",
        "on_after_training_step",
        "on_update_end",
        "on_log",
        "on_evaluation_end",
        "on_save_model",
        "on_save_checkpoint",
    }
)
"""The hooks at which a call of the preceding phase ends."""


@dataclass(frozen=True)
class Phase:
    """The time of one phase.

    Attributes:
        seconds: The total time.
        share: The share of the run, from 0 to 1.
        calls: The number of calls; 0 for phases without a count (callbacks and other).
        mean_s: The mean seconds per call; None without calls.
        slowest_s: The seconds of the slowest call; None without calls.
    """

    seconds: float
    share: float
    calls: int
    mean_s: float | None
    slowest_s: float | None


class PhaseTimes(Stopwatch):
    """Adds up the time and counts the calls of each phase of a run; `str` returns a table.

    The device is synchronized at the end of each phase, so that its work counts for the phase that launched it.

    Attributes:
        seconds: Seconds since the start of the run, by phase.
        calls: The number of completed calls, by phase.
    """

    def __init__(self) -> None:
        super().__init__(PHASE_MOMENTS, PHASES)
        self.calls = dict.fromkeys(PHASES, 0)
        self._slowest = dict.fromkeys(PHASES, 0.0)
        self._in_call = dict.fromkeys(PHASES, 0.0)
        self._wait: Callable[[], Any] | None = None

    def lap(self, purpose: str) -> float:
        """Wait for the device, then add the time since the last lap to a phase."""
        if self._wait is None:
            self._wait = torch.get_device_module(self.trainer.device).synchronize
        self._wait()
        passed = super().lap(purpose)
        self._in_call[purpose] += passed
        return passed

    def leave(self, hook: str) -> None:
        """End the callbacks of a hook, and the call that ends there."""
        super().leave(hook)
        if hook in _ENDS_CALL:
            phase = self.moments[hook].before
            self.calls[phase] += 1
            self._slowest[phase] = max(self._slowest[phase], self._in_call[phase])
            self._in_call[phase] = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    @property
    def phases(self) -> dict[str, Phase]:
        """The time of each phase so far."""
        total = self.total_s or 1.0
        return {
            name: Phase(
                seconds=seconds,
                share=seconds / total,
                calls=self.calls[name],
                mean_s=(seconds - self._in_call[name]) / self.calls[name] if self.calls[name] else None,
                slowest_s=self._slowest[name] if self.calls[name] else None,
            )
            for name, seconds in self.seconds.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Return all times in the format of `profile/phases.json`."""
        return {"total_s": self.total_s, "phases": {name: asdict(phase) for name, phase in self.phases.items()}}

    def __str__(self) -> str:
        lines = [f"{'phase':<14}{'seconds':>11}{'share':>9}{'calls':>9}{'mean ms':>11}{'slowest ms':>13}"]
        for name, phase in self.phases.items():
            if not phase.calls and not phase.seconds:
                continue
            line = f"{name.replace('_', ' '):<14}{phase.seconds:>11,.3f}{phase.share:>9.1%}"
            if phase.mean_s is not None and phase.slowest_s is not None:
                line += f"{phase.calls:>9,}{phase.mean_s * 1000:>11,.3f}{phase.slowest_s * 1000:>13,.3f}"
            lines.append(line)
        return "\n".join([*lines, f"{'all':<14}{self.total_s:>11,.3f}"])


FOLDER = "profile"
"""The folder of profiles in the run folder."""

SCHEDULE = {"wait": 1, "warmup": 1, "active": 3, "repeat": 1}
"""The default schedule: trace three optimizer steps after the first two."""

_FUNCTIONS_SAID = 10
_FUNCTIONS_KEPT = 100


class Profiler(StatelessCallback):
    """Measures a run from start to end, including failed runs, and saves the profile in the run folder.

    If a file cannot be written, accmt warns, because the run is more important. `fast_dev_run` writes no files.

    Processes: independent on each process, without communication.
    """

    order = math.inf
    _first_step: int | None = None

    def on_fit_start(self) -> None:
        self.begin()
        self._first_step = self.state.global_step

    def on_fit_end(self) -> None:
        if self._first_step is not None:  # a run that failed before has nothing to show
            self.end()

    def begin(self) -> None:
        """Start measuring."""
        raise NotImplementedError

    def end(self) -> None:
        """Stop measuring, print the results and write them."""
        raise NotImplementedError

    def keep(self, name: str, write: Callable[[Path], object], folder: Path | None = None) -> None:
        """Write a file, and log its path.

        Args:
            name: The file name; a resumed run appends its first step.
            write: Called with the path.
            folder: The folder, if it is not the one in the run folder.
        """
        if self.trainer.settings.running.fast_dev_run:
            return
        path = (folder or self.trainer.log_dir / FOLDER) / name
        if self._first_step:
            path = path.with_stem(f"{path.stem}-from-{self._first_step}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
        except (OSError, RuntimeError) as error:  # torch's export raises the latter
            warn(f"the profile could not be written: {error}")
        else:
            say(f"profile: {path}")


class PhaseProfiler(Profiler):
    """Reports the time of each phase of the run.

    Args:
        times: Measures the phases; it runs before all other callbacks, and a `StopwatchOfCallbacks` after them.
    """

    def __init__(self, times: PhaseTimes) -> None:
        self._times = times

    def begin(self) -> None:
        """Make the times available as `trainer.profile`."""
        self.trainer.profile = self._times

    def end(self) -> None:
        """Print the table, and write it as text and JSON."""
        times = self._times
        say(f"time per phase\n{times}")
        self.keep("phases.txt", lambda path: write_text(path, f"{times}\n"))
        self.keep("phases.json", lambda path: write_text(path, dumps(times.to_dict(), indent=2) + "\n"))


class FunctionProfiler(Profiler):
    """Measures every function call in the main thread of this process with cProfile."""

    def __init__(self) -> None:
        self._profile = cProfile.Profile()

    def begin(self) -> None:
        """Start measuring.

        Raises:
            ArgumentError: Another profiler is active; Python supports only one at a time.
        """
        monitoring: Any = getattr(sys, "monitoring", None)  # used by cProfile from Python 3.12 on
        is_monitored = monitoring is not None and monitoring.get_tool(monitoring.PROFILER_ID) is not None
        if is_monitored or sys.getprofile() is not None:
            got, do = "another function profiler is active", "stop that profiler, or leave out profiler"
            raise fail(
                ArgumentError, 'Trainer(profiler="advanced")', got=got, expected="no other active profiler", do=do
            )
        self._profile.enable()

    def end(self) -> None:
        """Print the slowest functions, and write all tables."""
        self._profile.disable()
        say(f"functions that took the most time\n{_tabulate(self._profile, _FUNCTIONS_SAID, 'tottime')}")
        tables = [_tabulate(self._profile, _FUNCTIONS_KEPT, key) for key in ("tottime", "cumulative")]
        number = process_index()
        self.keep(f"functions-{number}.txt", lambda path: write_text(path, "\n".join(tables)))
        self.keep(f"functions-{number}.prof", self._profile.dump_stats)


class TraceProfiler(Profiler):
    """Traces the operations of some steps with torch.profiler, according to its schedule.

    Args:
        profiler: An `accelerate.utils.ProfileKwargs`, a `torch.profiler.profile`, or "pytorch", which uses the
            `ProfileKwargs` of the run's Accelerator if it has one, else traces three steps.

    Source:
        https://docs.pytorch.org/docs/stable/profiler.html
    """

    def __init__(self, profiler: Any) -> None:
        self._profiler_argument = profiler
        self._num_traces = 0
        self._is_stepping = False

    def begin(self) -> None:
        """Start the schedule."""
        self._profile, self._folder = self._build()
        self._handler = self._profile.on_trace_ready
        self._profile.on_trace_ready = self._take_trace
        self._profile.start()

    def on_update_end(self) -> None:
        self._is_stepping = True
        self._profile.step()
        self._is_stepping = False

    def end(self) -> None:
        """Stop; an incomplete trace is kept."""
        if not self._is_stepping:  # otherwise its step or its handler failed, and stopping it would crash the process
            self._profile.stop()
        self._profile.on_trace_ready = self._handler
        if self._num_traces == 0 and not self._is_stepping:
            do = "train longer, or pass a ProfileKwargs with another schedule_option"
            warn(f"nothing was traced: the run ended before the schedule's active steps; {do}")

    def _build(self) -> tuple[torch.profiler.profile, Path | None]:
        from accelerate.utils import ProfileKwargs
        from torch.profiler import profile

        if isinstance(self._profiler_argument, profile):
            return self._profiler_argument, None
        kwargs = self.trainer.run.accelerator.profile_handler or ProfileKwargs(schedule_option=SCHEDULE)
        if isinstance(self._profiler_argument, ProfileKwargs):
            kwargs = self._profiler_argument
        folder = kwargs.output_trace_dir
        return kwargs.build(), None if folder is None else self.trainer.settings.home / folder

    def _take_trace(self, profile: torch.profiler.profile) -> None:
        self._num_traces += 1
        if self._handler is not None:
            self._handler(profile)
        if self._handler is None or self._folder is not None:
            name = f"trace-{process_index()}-{self._num_traces}.json"
            self.keep(name, lambda path: profile.export_chrome_trace(str(path)), self._folder)


def build_profiler(profiler: Any, *, is_main_process: bool) -> tuple[list[Callback], list[Callback]]:
    """Return the callbacks that profile a run.

    Args:
        profiler: See `Trainer(profiler=...)`.
        is_main_process: On other processes, phases are not measured.

    Returns:
        The callbacks to run before all others, and those to run after all others.
    """
    if profiler is None or (profiler == "simple" and not is_main_process):
        return [], []
    if profiler == "simple":
        times = PhaseTimes()
        return [times, _EndOfCallbacks(times)], [StopwatchOfCallbacks(times), PhaseProfiler(times)]
    return [], [FunctionProfiler() if profiler == "advanced" else TraceProfiler(profiler)]


class _EndOfCallbacks(Callback):
    """Separates the time of callbacks after an evaluation from saving the model, which comes last."""

    order = math.nextafter(sys.float_info.max, 0.0)

    def __init__(self, times: PhaseTimes) -> None:
        self._times = times

    def on_evaluation_end(self) -> None:
        self._times.lap("callbacks")


def _tabulate(profile: cProfile.Profile, num_functions: int, key: str) -> str:
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats(key).print_stats(num_functions)
    return text.getvalue().strip() + "\n"
