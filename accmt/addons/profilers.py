"""What takes the time of a run: a table of its phases, one of all functions, or a trace of all operations."""

from __future__ import annotations

import cProfile
import io
import math
import pstats
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accmt.addons.phase_times import PhaseTimes
from accmt.callbacks.base import Callback
from accmt.callbacks.stopwatch import StopwatchOfCallbacks
from accmt.errors import ArgumentError, explain
from accmt.files import dumps, write_text
from accmt.messages import say, warn
from accmt.processes import process_index

if TYPE_CHECKING:
    import torch

FOLDER = "profile"
"""Where in the run folder profiles are."""

SCHEDULE = {"wait": 1, "warmup": 1, "active": 3, "repeat": 1}
"""The optimizer steps that are traced unless the profiler says otherwise: three, after the first two."""

_FUNCTIONS_SAID = 10
_FUNCTIONS_KEPT = 100


class Profiler(Callback):
    """Measures from the start of a run to its end, failed ones included, and keeps what it finds in the run folder.

    A file that cannot be written is a warning: the run is worth more than its profile. With `fast_dev_run` none is.

    Processes: all that have one, each for itself: there is no communication.
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
        """Begin to measure."""
        raise NotImplementedError

    def end(self) -> None:
        """End, print and write."""
        raise NotImplementedError

    def keep(self, name: str, write: Callable[[Path], object], folder: Path | None = None) -> None:
        """Write a file, and say where it is.

        Args:
            name: Its name; a run that resumes adds from which step on.
            write: Called with the path.
            folder: Another folder than that in the run folder.
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
    """Tells what each phase of the run took.

    Args:
        times: Measures it; stands before all other callbacks, and a `StopwatchOfCallbacks` after them.
    """

    def __init__(self, times: PhaseTimes) -> None:
        self._times = times

    def begin(self) -> None:
        """Let the Trainer show the times."""
        self.trainer.profile = self._times

    def end(self) -> None:
        """Say the table, and write it as text and as JSON."""
        times = self._times
        say(f"what the time went into\n{times}")
        self.keep("phases.txt", lambda path: write_text(path, f"{times}\n"))
        self.keep("phases.json", lambda path: write_text(path, dumps(times.to_dict(), indent=2) + "\n"))


class FunctionProfiler(Profiler):
    """Measures every call of every function in the main thread of this process, by cProfile."""

    def __init__(self) -> None:
        self._profile = cProfile.Profile()

    def begin(self) -> None:
        """Begin to measure.

        Raises:
            ArgumentError: Another profiler is at work; Python has room for one.
        """
        if _is_profiled():
            got, do = "another profiler of functions is at work", "end that one, or leave profiler out"
            raise ArgumentError(explain('Trainer(profiler="advanced")', got, "none", do))
        self._profile.enable()

    def end(self) -> None:
        """Say the functions that take most time, and write all."""
        self._profile.disable()
        say(f"functions that took most time\n{_tabulate(self._profile, _FUNCTIONS_SAID, 'tottime')}")
        tables = [_tabulate(self._profile, _FUNCTIONS_KEPT, key) for key in ("tottime", "cumulative")]
        number = process_index()
        self.keep(f"functions-{number}.txt", lambda path: write_text(path, "\n".join(tables)))
        self.keep(f"functions-{number}.prof", self._profile.dump_stats)


class TraceProfiler(Profiler):
    """Traces operations of some steps by torch.profiler, as its schedule says.

    Args:
        profiler: An `accelerate.utils.ProfileKwargs`; a `torch.profiler.profile`; or "pytorch", which is the
            `ProfileKwargs` of the run's Accelerator, or else three steps.

    Source:
        https://docs.pytorch.org/docs/stable/profiler.html
    """

    def __init__(self, profiler: Any) -> None:
        self._profiler_argument = profiler
        self._num_traces = 0
        self._is_stepping = False

    def begin(self) -> None:
        """Begin with the schedule."""
        self._profile, self._folder = self._build()
        self._handler = self._profile.on_trace_ready
        self._profile.on_trace_ready = self._take_trace
        self._profile.start()

    def on_update_end(self) -> None:
        self._is_stepping = True
        self._profile.step()
        self._is_stepping = False

    def end(self) -> None:
        """End; what was traced of a run that ends in between is kept."""
        if not self._is_stepping:  # else its step or its handler failed, and stopping it would crash the process
            self._profile.stop()
        self._profile.on_trace_ready = self._handler
        if self._num_traces == 0 and not self._is_stepping:
            do = "train longer, or give a ProfileKwargs with another schedule_option"
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
    """Return the callbacks that profile a run; none where nothing is asked for.

    Args:
        profiler: As `Trainer(profiler=...)`.
        is_main_process: Elsewhere phases are not measured.

    Returns:
        Those to stand before, and those to stand after all others.
    """
    if profiler is None or (profiler == "simple" and not is_main_process):
        return [], []
    if profiler == "simple":
        times = PhaseTimes()
        return [times, _EndOfCallbacks(times)], [StopwatchOfCallbacks(times), PhaseProfiler(times)]
    return [], [FunctionProfiler() if profiler == "advanced" else TraceProfiler(profiler)]


class _EndOfCallbacks(Callback):
    """Tells what callbacks take after an evaluation from the saving of the model, which comes last of them."""

    order = math.nextafter(sys.float_info.max, 0.0)

    def __init__(self, times: PhaseTimes) -> None:
        self._times = times

    def on_evaluation_end(self) -> None:
        self._times.lap("callbacks")


def _is_profiled() -> bool:
    monitoring: Any = getattr(sys, "monitoring", None)  # where cProfile is at work from Python 3.12 on
    is_monitored = monitoring is not None and monitoring.get_tool(monitoring.PROFILER_ID) is not None
    return is_monitored or sys.getprofile() is not None


def _tabulate(profile: cProfile.Profile, num_functions: int, key: str) -> str:
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats(key).print_stats(num_functions)
    return text.getvalue().strip() + "\n"
