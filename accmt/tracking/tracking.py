"""Writes every row of a run to `history.jsonl`, from where the trackers get it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

from accmt.errors import ArgumentError, SavingError, fail
from accmt.files import FolderLock, FolderTakenError, current_folder, require_writable_folder
from accmt.messages import say
from accmt.registry import addon
from accmt.secrets import hide
from accmt.tracking.history import DELIVERY_FILE, HISTORY_FILE, History, RunPlace, count_attempts, read_rows
from accmt.tracking.values import to_floats, to_plain

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

RunStatus: TypeAlias = Literal["FINISHED", "FAILED", "KILLED", "PREEMPTED", "RUNNING"]
"""How a run ended; "RUNNING" if only a process beside it ends."""


_FLUSH_AFTER_A_FAILED_START_S = 5.0


class _NoDeliveries:
    """Those of a run without trackers."""

    loggers: Sequence[GeneralTracker] = ()
    run_ids: Sequence[tuple[str, str]] = ()

    def get(self, name: str) -> NoReturn:
        raise fail(
            ArgumentError, f"get_tracker({name!r})", got="no trackers", expected="one of a run", do="add it to log_with"
        )

    def held_back(self, place: RunPlace) -> Sequence[str]:
        return ()

    dashboard_command = held_back

    def start(self, *_: Any) -> None:
        pass

    give_up = notify = finish = warn_of_rows_left = start


class Tracking:
    """Writes the rows of one run to `history.jsonl`; `accmt.addons.trackers` delivers them to its trackers from there.

    `log` writes to the file and returns.

    Args:
        trackers: The trackers, and `tracker_kwargs` their keywords: see `accmt.addons.trackers.deliveries.Deliveries`.
        logging_dir: The logging folder, relative to `home` (None: the working folder), or a URL; see `is_url`.
        is_main_process: On other processes, nothing is created and methods do nothing.
        verbose: False suppresses the trackers' own messages.
        offline: What to do if a tracker's server cannot be reached at the start.
        folder: The folder of the rows, if another process writes those of the run to its own folder. Trackers to which
            only one process can log then wait for `accmt sync`.

    Processes: create it on all processes, so that a wrong argument stops all of them.
    """

    def __init__(
        self,
        trackers: Sequence[Any],
        *,
        track_name: str,
        run_name: str,
        logging_dir: str | os.PathLike[str],
        tracker_kwargs: Mapping[str, Any],
        is_main_process: bool,
        verbose: bool = True,
        offline: Literal["auto"] | bool = "auto",
        home: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        self._place = RunPlace(os.fspath(logging_dir), track_name, run_name, folder, home=home or current_folder())
        self._deliveries: Any = _NoDeliveries()
        if trackers or tracker_kwargs:  # which no tracker may accept
            self._deliveries = addon("deliveries")(trackers, tracker_kwargs, is_quiet=not verbose, offline=offline)
        self._is_main_process = is_main_process
        self._history: History | None = None
        self._lock: FolderLock | None = None
        self._attempt = 1
        self._resumed: dict[str, Any] | None = None
        self._last_step: int | None = None
        if self._place.url is not None and not any(spec.takes_url for spec in trackers):
            got = f"the URL {self._place.logging_dir!r}, which none of the trackers supports"
            expected = "a folder, or a tracker with a server"
            do = "log_with=MLFlow; for object storage, a URL as `model_path` publishes history.jsonl with the model"
            raise fail(ArgumentError, "Trainer(logging_dir=...)", got=got, expected=expected, do=do)

    @property
    def run_name(self) -> str:
        """The name of this run; the same on every process."""
        return self._place.run_name

    @property
    def run_folder(self) -> Path:
        """The folder of this run; the same on every process. `start` creates it."""
        return self._place.shown_folder

    @property
    def attempt(self) -> int:
        """How often the run was started or resumed, from 1; only on the main process, and after `start`."""
        return self._attempt

    @property
    def loggers(self) -> list[GeneralTracker]:
        """The trackers of the run; a tracker that has not been reached yet is replaced by one that does nothing.

        Empty before `start`, after `finish` and on other processes than the main one.
        """
        return [] if self._history is None else list(self._deliveries.loggers)

    @property
    def run_ids(self) -> dict[str, str]:
        """The id of the run in each service that has one, such as `{"mlflow": "0adacf..."}`; kept after `finish`."""
        return dict(self._deliveries.run_ids)

    @property
    def media(self) -> Any:
        """Logs images, tables and files; None before `start`, after `finish`, and except on the main process."""
        if self._history is None:
            return None
        return addon("media_log")(self._history, self._deliveries.notify)

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable state that a resumed run needs to continue this one.

        Processes: all; only the main process has more than the name.
        """
        return {
            "run_name": self._place.run_name,
            "run_ids": self.run_ids,
            "attempt": self.attempt,
            "line": 0 if self._history is None else self._history.num_lines,
            "step": self._last_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of a checkpoint when `start` is called; rows logged after the checkpoint are superseded.

        The state of a run with another name is ignored, because this is then a new run.
        """
        if state["run_name"] == self._place.run_name:
            self._resumed = dict(state)
            self._last_step = state["step"]

    def start(self, config: Mapping[str, Any]) -> str:
        """Create the run folder, start the trackers and store the configuration.

        A server that does not respond delays this by at most ten seconds.

        Args:
            config: The nested settings of the run; trackers get them flattened.

        Returns:
            The name of the run. It gets a suffix if its folder belongs to another run.

        Raises:
            SavingError: The run folder cannot be created, or the run is resumed while another process writes to it.
            TrackerError: A tracker failed to start for another reason than an unreachable server (with
                `offline=False`, for any reason); the other trackers are ended as FAILED.

        Processes: main only; does nothing on others.
        """
        if not self._is_main_process:
            return self.run_name
        # If the folder belongs to another run, use the first free one of `<name>-2`, `<name>-3` ...
        model_path, wanted, number = hide(to_plain(config.get("model_path"))), self._place, 1
        while not self._lock_folder(model_path):
            number += 1
            self._place = replace(wanted, run_name=f"{wanted.run_name}-{number}")
        if number > 1:
            say(f"{wanted.shown_folder} belongs to another run: this run is named {self.run_name!r}")
        try:
            self._history = history = History(self._place.run_folder)
            history.is_ours_alone()  # keeps `accmt sync` away during the run
            self._begin_attempt(history)
            resumed_ids = None if self._resumed is None else self._resumed["run_ids"]
            self._deliveries.start(history, self._place, self._attempt, resumed_ids)
        except BaseException:  # also Ctrl-C: the trackers that have started would show a running run
            self.finish("FAILED", flush_s=_FLUSH_AFTER_A_FAILED_START_S)
            raise
        history.add_config(hide(to_plain(config)))
        self._deliveries.notify()
        return self.run_name

    def call_run(self, name: str) -> None:
        """Set the run name that `start` returned on the main process."""
        self._place = replace(self._place, run_name=name)

    def _lock_folder(self, model_path: Any) -> bool:
        folder, holder = self._place.run_folder, "this process"
        require_writable_folder(folder, "logging_dir")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = FolderLock.take(folder, "logs")
            is_free = lock is None or not lock.is_shared
        except FolderTakenError as error:
            lock, is_free, holder = None, False, str(error)
        history = folder / HISTORY_FILE
        if is_free and self._resumed is None and history.is_file():
            # It is another run's if that finished, or trained another model. A job that is restarted before its first
            # checkpoint starts over in its folder.
            rows = list(read_rows(history))
            paths = [row["config"].get("model_path") for row in rows if "config" in row]
            if _came_to_its_end(history) or paths[-1:] != [model_path]:
                is_free = not any("step" in row for row in rows)  # without a row, there is nothing to keep
        if is_free:
            self._lock = lock
            return True
        if lock is not None:
            lock.release()
        if self._resumed is not None:  # two processes resume one run; with another name, its rows would be elsewhere
            got, expected = f"another run is writing to it ({holder})", "a folder that no other run writes to"
            do = "wait for that run, or stop it"
            raise fail(SavingError, f"run folder {folder}", got=got, expected=expected, do=do)
        return False

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Write one row; does nothing before `start` and after `finish`.

        Processes: main only; does nothing on others.
        """
        if self._history is None:
            return
        self._history.add_values(to_floats(values), step)
        self._last_step = step
        self._deliveries.notify()

    def finish(self, status: RunStatus, *, flush_s: float = 30.0) -> None:
        """End the run in all trackers; calling it again does nothing.

        Args:
            flush_s: How long to wait until all rows are delivered; after that, a warning reports what is left.

        Processes: main only; does nothing on others.
        """
        history, self._history = self._history, None
        if history is None:
            self._unlock()
            return
        history.add_status(status, how="interrupted" if status == "KILLED" else None)  # a real kill writes nothing
        try:
            self._deliveries.finish(status, flush_s)
        finally:
            history.close()  # after the trackers, which read from it
            self._unlock()
        self._deliveries.warn_of_rows_left(flush_s)
        if self.held_back() and self._place.folder is None:
            say(f"offline: to deliver the rows to {', '.join(self.held_back())}, run `accmt sync {self.run_folder}`")

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def get_tracker(self, name: str, *, unwrap: bool = False) -> Any:
        """Return a tracker of the run by name.

        Args:
            name: "tensorboard", "mlflow", or the name of your tracker.
            unwrap: Whether to return the object that the tracker wraps: a `SummaryWriter`, an MLflow run.

        Raises:
            ArgumentError: The run has no such tracker.

        Processes: on other processes than the main one, and for a tracker whose server has not been reached yet, this
            returns a tracker that does nothing, as Accelerate does.
        """
        logger = self._deliveries.get(name)
        return getattr(logger, "tracker", logger) if unwrap else logger

    def dashboard_command(self) -> list[str]:
        """Return the command of the first tracker that can show the runs in a browser, else an empty list."""
        return list(self._deliveries.dashboard_command(self._place))

    def held_back(self) -> list[str]:
        """Return the trackers whose rows wait for `accmt sync`."""
        return list(self._deliveries.held_back(self._place))

    def _begin_attempt(self, history: History) -> None:
        """Count this attempt at the run, and supersede the rows that come after its beginning."""
        before = count_attempts(history.path)
        if (history.path.parent / DELIVERY_FILE).exists() and isinstance(self._deliveries, _NoDeliveries):
            self._deliveries = addon("deliveries")([], {}, is_quiet=True, offline=True)  # closes the earlier run's
        if self._resumed is not None:
            self._attempt = 1 + max(self._resumed["attempt"], before)
            history.add_rewind(self._resumed["line"], self._resumed["step"], self._attempt)
        elif before:
            self._deliveries.give_up(history)
            if not _came_to_its_end(history.path):
                history.add_rewind(0, None, self._attempt)  # it had no checkpoint, so it starts over


def _came_to_its_end(history: Path) -> bool:
    status = None
    for row in read_rows(history):
        if "status" in row or "config" in row:  # a run that is resumed begins with another configuration
            status = row.get("status")
    return status == "FINISHED"
