"""The one object through which every row of a run passes on its way to the trackers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from accmt.errors import ArgumentError, TrackerError, explain
from accmt.files import require_writable_folder
from accmt.messages import warn
from accmt.tracking.history import HISTORY_FILE, History
from accmt.tracking.init_kwargs import kwargs_of_each
from accmt.tracking.run_folder import RunPlace
from accmt.tracking.specs import TrackerSpec
from accmt.tracking.values import CleanNames, flatten, to_floats, to_plain

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

RunStatus: TypeAlias = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class _Started:
    """A tracker that is running, and the names it was given."""

    spec: TrackerSpec
    tracker: GeneralTracker
    names: CleanNames


class Tracking:
    """Hands rows to `history.jsonl` and to the trackers of one run.

    A tracker that raises while the run goes on costs that row in that tracker and one warning; `history.jsonl` has it.

    Args:
        trackers: What `resolve_trackers` returned.
        track_name: Project or experiment.
        run_name: Name of the run, the same on every process.
        logging_dir: Folder of logs, or a URL as `is_url` tells it.
        tracker_kwargs: Further keywords of the Trainer, as in `kwargs_of_each`.
        is_main_process: Elsewhere nothing is created, and no method does anything.
        verbose: False holds back the trackers' own messages.

    Raises:
        ArgumentError: `logging_dir` is a URL and no tracker can use one.
        UnknownArgumentError: No tracker takes one of `tracker_kwargs`.

    Processes: construct it on all, so that a wrong argument stops all.
    """

    def __init__(
        self,
        trackers: Sequence[TrackerSpec],
        *,
        track_name: str,
        run_name: str,
        logging_dir: str | os.PathLike[str],
        tracker_kwargs: Mapping[str, Any],
        is_main_process: bool,
        verbose: bool = True,
    ) -> None:
        self._specs = list(trackers)
        self._place = RunPlace(os.fspath(logging_dir), track_name, run_name)
        self._kwargs = kwargs_of_each(self._specs, tracker_kwargs)
        self._is_main_process = is_main_process
        self._is_quiet = not verbose
        self._history: History | None = None
        self._started: list[_Started] = []
        self._warned: set[str] = set()
        if self._place.url is not None and not any(spec.takes_url for spec in self._specs):
            got = f"{self._place.logging_dir!r}, a URL, with trackers that cannot use one"
            expected = "a folder, or a tracker that has a server"
            raise ArgumentError(explain("Trainer(logging_dir=...)", got, expected, "log_with=MLFlow"))

    @property
    def run_folder(self) -> Path:
        """The folder of this run, the same on every process; `start` makes it."""
        return self._place.run_folder

    @property
    def loggers(self) -> list[GeneralTracker]:
        """The trackers that are running; empty before `start`, after `finish` and off the main process."""
        return [started.tracker for started in self._started]

    @property
    def run_ids(self) -> dict[str, str]:
        """The id of the run in each service that gives one, such as `{"mlflow": "0adacf..."}`."""
        ids = {started.spec.name: started.spec.run_id(started.tracker) for started in self._started}
        return {name: run_id for name, run_id in ids.items() if run_id is not None}

    def start(self, config: Mapping[str, Any]) -> None:
        """Make the run folder, start the trackers and store the configuration.

        Args:
            config: Settings of the run, nested as they are; trackers get them flat.

        Raises:
            SavingError: The run folder cannot be made.
            TrackerError: A tracker does not start; those before it are ended as FAILED.

        Processes: main only; returns at once elsewhere.
        """
        if not self._is_main_process:
            return
        require_writable_folder(self.run_folder, "logging_dir")
        self.run_folder.mkdir(parents=True, exist_ok=True)
        self._history = History(self.run_folder)
        self._history.add_config(to_plain(config))
        for spec, kwargs in zip(self._specs, self._kwargs, strict=True):
            self._start_tracker(spec, kwargs)
        flat = flatten(config)
        for started in self._started:
            renamed = CleanNames(started.spec.clean_name).rename(flat)
            self._deliver(started.spec.name, started.tracker.store_init_configuration, renamed)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Write one row; does nothing before `start` and after `finish`.

        Args:
            values: Numbers by name; entries that are None are left out.
            step: The update that they belong to.

        Raises:
            MetricError: A value is not one number.

        Processes: main only; returns at once elsewhere.
        """
        history = self._history
        if history is None:
            return
        row = to_floats(values)
        self._deliver(HISTORY_FILE, history.add_values, row, step)
        for started in self._started:
            self._deliver(started.spec.name, started.tracker.log, started.names.rename(row), step)

    def finish(self, status: RunStatus) -> None:
        """End the run everywhere; calling it again does nothing.

        Args:
            status: How the run ended, as `history.jsonl` and MLflow show it.

        Processes: main only; returns at once elsewhere.
        """
        history, self._history = self._history, None
        if history is None:
            return
        running, self._started = self._started, []
        self._deliver(HISTORY_FILE, history.add_status, status)
        for started in running:
            self._deliver(started.spec.name, started.spec.finish, started.tracker, status)
        with suppress(OSError):
            history.close()

    def get_tracker(self, name: str, *, unwrap: bool = False) -> Any:
        """Return a running tracker by name.

        Args:
            name: "tensorboard", "mlflow", or the name of a user's own tracker.
            unwrap: Whether what the tracker wraps is returned: a `SummaryWriter`, an MLflow run.

        Raises:
            ArgumentError: No tracker of that name is running.

        Processes: off the main process a tracker that does nothing is returned, as Accelerate does.
        """
        if not self._is_main_process:
            from accelerate.tracking import GeneralTracker

            return GeneralTracker(_blank=True)
        for started in self._started:
            if started.spec.name == name:
                return started.tracker.tracker if unwrap else started.tracker
        names = [started.spec.name for started in self._started]
        message = explain(f"get_tracker({name!r})", "no such tracker", f"one of {names}", "add it to log_with")
        raise ArgumentError(message)

    def dashboard_command(self) -> list[str]:
        """Return the command that shows the runs in a browser: of the first tracker that has one, else empty."""
        commands = (spec.dashboard_command(self._place) for spec in self._specs)
        return next((command for command in commands if command), [])

    def _start_tracker(self, spec: TrackerSpec, kwargs: Mapping[str, Any]) -> None:
        try:
            tracker = spec.build(self._place, kwargs, is_quiet=self._is_quiet)
            tracker.start()
        except BaseException as error:
            self.finish("FAILED")
            if not isinstance(error, Exception):
                raise
            got = f"{type(error).__name__}: {error}"
            do = f"check logging_dir={self._place.logging_dir!r} and the server, or leave {spec.name} out of log_with"
            raise TrackerError(explain(f"the tracker {spec.name}", got, "a tracker that starts", do)) from error
        self._started.append(_Started(spec, tracker, CleanNames(spec.clean_name)))

    def _deliver(self, receiver: str, action: Callable[..., object], *args: Any) -> None:
        try:
            action(*args)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, training goes on
            if receiver in self._warned:
                return
            self._warned.add(receiver)
            got = f"{type(error).__name__}: {error}"
            expected = f"rows that it accepts; training goes on, and {self.run_folder / HISTORY_FILE} has them all"
            do = "look at the tracker's server; further failures of this tracker are not reported"
            if receiver == HISTORY_FILE:
                expected = "room for the rows of the log; training goes on, and rows are missing from now on"
                do = f"make room in {self.run_folder}; further failures are not reported"
            warn(explain(f"the tracker {receiver}", got, expected, do))
