"""Writes every row of a run to `history.jsonl` and delivers it to the trackers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from accmt.errors import ArgumentError, MissingPackageError, SavingError, TrackerError, explain, fail
from accmt.files import FolderLock, FolderTakenError, current_folder, require_writable_folder
from accmt.messages import say, warn
from accmt.registry import addon
from accmt.secrets import hide, hide_text
from accmt.tracking.delivery import Delivery, wait_for_the_end
from accmt.tracking.delivery_state import Account, DeliveryFile, Rewinding, count_rows_left
from accmt.tracking.history import HISTORY_FILE, History, RunPlace, read_rows
from accmt.tracking.spec import RunStart, TrackerSpec, UserTracker, kwargs_of_each, name_error
from accmt.tracking.values import to_floats, to_plain

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

RunStatus: TypeAlias = Literal["FINISHED", "FAILED", "KILLED", "PREEMPTED", "RUNNING"]
"""How a run ended; "RUNNING" if only a process beside it ends."""


_START_S = 30.0
_REMOTE_START_S = 10.0
_FLUSH_AFTER_A_FAILED_START_S = 5.0
_END_AFTER_A_FAILED_START_S = 1.0


class Tracking:
    """Writes rows to `history.jsonl`, and delivers them from there to the trackers of one run.

    `log` writes to the file and returns; one thread per tracker delivers. A tracker that is slow, unreachable or
    raises errors delays nothing and loses nothing: rows wait in the file and are delivered in order when it accepts
    them again, if necessary by a resumed run or by `accmt sync <run folder>`.

    Args:
        logging_dir: The logging folder, relative to `home` (None: the working folder), or a URL; see `is_url`.
        is_main_process: On other processes, nothing is created and methods do nothing.
        verbose: False suppresses the trackers' own messages.
        offline: What to do if a tracker's server cannot be reached at the start: "auto" trains and delivers later,
            False raises an error. True contacts no server; rows wait for `accmt sync`.
        folder: The folder of the rows, if another process writes those of the run to its own folder. Trackers to which
            only one process can log then wait for `accmt sync`.

    Processes: create it on all processes, so that a wrong argument stops all of them.
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
        offline: Literal["auto"] | bool = "auto",
        home: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        self._place = RunPlace(os.fspath(logging_dir), track_name, run_name, folder, home=home or current_folder())
        self._trackers: dict[str, tuple[TrackerSpec, dict[str, Any]]] = {}  # by unique names
        for spec, kwargs in zip(trackers, kwargs_of_each(trackers, tracker_kwargs), strict=True):
            # Two of a user's trackers may have one name.
            number = 1 + sum(known.name == spec.name for known, _ in self._trackers.values())
            key = spec.name if number == 1 else f"{spec.name}_{number}"
            self._trackers[key] = (spec, kwargs)
        self._is_main_process = is_main_process
        self._is_quiet = not verbose
        self._offline = offline
        self._history: History | None = None
        self._lock: FolderLock | None = None
        self._delivery_file: DeliveryFile | None = None
        self._deliveries: list[Delivery] = []
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
        return 1 if self._delivery_file is None else self._delivery_file.attempt

    @property
    def loggers(self) -> list[GeneralTracker]:
        """The trackers of the run; a tracker that has not been reached yet is replaced by one that does nothing.

        Empty before `start`, after `finish` and on other processes than the main one.
        """
        return [] if self._history is None else [self._logger(key) for key in self._trackers]

    @property
    def run_ids(self) -> dict[str, str]:
        """The id of the run in each service that has one, such as `{"mlflow": "0adacf..."}`; kept after `finish`."""
        if self._delivery_file is None:
            return {}
        accounts = self._delivery_file.accounts
        return {key: account.run_id for key, account in accounts.items() if account.run_id is not None}

    @property
    def media(self) -> Any:
        """Logs images, tables and files; None before `start`, after `finish`, and except on the main process."""
        if self._history is None:
            return None
        return addon("media_log")(self._history, self._notify)

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
            self._delivery_file = self._open_delivery_file(history)
            self._delivery_file.save()
            self._start_trackers(history, self._delivery_file)
        except BaseException:  # also Ctrl-C: the trackers that have started would show a running run
            self.finish("FAILED", flush_s=_FLUSH_AFTER_A_FAILED_START_S)
            raise
        history.add_config(hide(to_plain(config)))
        self._notify()
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
        self._notify()

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
        deliveries, self._deliveries = self._deliveries, []
        history.add_status(status, how="interrupted" if status == "KILLED" else None)  # a real kill writes nothing
        try:
            wait_for_the_end(deliveries, status, flush_s)
        finally:
            for delivery in deliveries:
                delivery.detach(status)
            history.close()  # after the trackers, which read from it
            self._unlock()
        for delivery in deliveries:
            delivery.warn_of_rows_left(flush_s)
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

        Processes: on other processes than the main one, and for a tracker whose server has not been reached yet, this
            returns a tracker that does nothing, as Accelerate does.
        """
        if not self._is_main_process:
            return _stand_in()
        keys = [] if self._history is None else list(self._trackers)
        if name not in keys:
            where, expected = f"get_tracker({name!r})", f"one of {keys}"
            raise fail(ArgumentError, where, got="an unknown tracker", expected=expected, do="add it to log_with")
        logger = self._logger(name)
        return getattr(logger, "tracker", logger) if unwrap else logger

    def dashboard_command(self) -> list[str]:
        """Return the command of the first tracker that can show the runs in a browser, else an empty list."""
        for spec, _ in self._trackers.values():
            command = spec.dashboard_command(self._place)
            if command:
                return command
        return []

    def held_back(self) -> list[str]:
        """Return the trackers whose rows wait for `accmt sync`."""
        if self._place.folder is not None:
            return [key for key, (spec, _) in self._trackers.items() if spec.is_exclusive]
        if self._offline is not True:
            return []
        return [key for key, (spec, kwargs) in self._trackers.items() if spec.is_remote(self._place, kwargs)]

    def _logger(self, key: str) -> GeneralTracker:
        for delivery in self._deliveries:
            if delivery.key == key and delivery.tracker is not None:
                return delivery.tracker
        return _stand_in()  # so that a hook that uses it does not stop a run whose server is down

    def _notify(self) -> None:
        for delivery in self._deliveries:
            delivery.notify()

    def _open_delivery_file(self, history: History) -> DeliveryFile:
        """Open the delivery state of each tracker: that of an earlier attempt at this run, or a new one."""
        delivery_file = DeliveryFile(self._place.run_folder, self._place.track_name, self._place.run_name)
        before = DeliveryFile.read(self._place.run_folder)
        if before is not None and self._resumed is None:
            for key, account in before.accounts.items():  # which can no longer be delivered
                num_rows = count_rows_left(history.path, account)
                if num_rows:
                    folder = history.path.parent
                    got = f"{num_rows} rows of an earlier run in {folder} were not delivered and no longer will be"
                    do = "resume or `accmt sync` a run before you start another with the same run_name"
                    warn(explain(f"the tracker {key}", got, "one folder per run", do))
            if not _came_to_its_end(history.path):
                history.add_rewind(0, None, delivery_file.attempt)  # it had no checkpoint, so it starts over
        lines = history.num_lines
        if self._resumed is not None:
            delivery_file.attempt = 1 + max(self._resumed["attempt"], before.attempt if before else 0)
            history.add_rewind(self._resumed["line"], self._resumed["step"], delivery_file.attempt)
        for key, (spec, kwargs) in self._trackers.items():
            if self._resumed is None:
                account = Account(first=lines, delivered=lines, handed=lines, settled=lines)
            elif before is not None and key in before.accounts:
                account = before.accounts[key]
                account.reopen()
                account.run_id = account.run_id or self._resumed["run_ids"].get(key)
            else:
                # The delivery state is unknown: assume all rows were delivered if the tracker must not get any twice.
                delivered = lines if spec.rewinding is Rewinding.UNKNOWN else 0
                run_id = self._resumed["run_ids"].get(key)
                account = Account(run_id=run_id, delivered=delivered, handed=lines, settled=delivered)
            server = spec.server(self._place)
            account.server = server and hide_text(server)
            account.kwargs = hide(to_plain(kwargs), leave_out=True)
            delivery_file.accounts[key] = account
        return delivery_file

    def _start_trackers(self, history: History, delivery_file: DeliveryFile) -> None:
        held_back = self.held_back()
        for key, (spec, kwargs) in self._trackers.items():
            if key in held_back:
                continue
            # Here, not in its thread: a missing login ends the program before anything is trained.
            spec.require_access(self._place, kwargs, is_needed=self._offline is False)
            delivery = Delivery(
                spec,
                RunStart(self._place, kwargs, is_quiet=self._is_quiet),
                history,
                delivery_file,
                key=key,
                is_patient=self._offline is not False,
            )
            self._deliveries.append(delivery)
            delivery.begin(_REMOTE_START_S if spec.is_remote(self._place, kwargs) else _START_S)
            error = delivery.start_error
            if error is None:  # started, or retried until its server answers
                delivery.attach()
                continue
            self._deliveries.remove(delivery)
            delivery.end("FAILED", 0.0)
            delivery.join(_END_AFTER_A_FAILED_START_S)
            if not isinstance(error, Exception):  # SystemExit of a tracker's library
                raise error
            where, got = f"the tracker {spec.name}", name_error(error)
            if isinstance(error, ImportError) and not isinstance(spec, UserTracker):
                expected, do = "a complete package", f"pip install --force-reinstall {spec.package}"
                raise fail(MissingPackageError, where, got=got, expected=expected, do=do) from error
            do = f"check logging_dir={self._place.logging_dir!r} and the server, or leave {spec.name} out of log_with"
            raise fail(TrackerError, where, got=got, expected="a tracker that starts", do=do) from error


def _came_to_its_end(history: Path) -> bool:
    status = None
    for row in read_rows(history):
        if "status" in row or "config" in row:  # a run that is resumed begins with another configuration
            status = row.get("status")
    return status == "FINISHED"


def _stand_in() -> GeneralTracker:
    from accelerate.tracking import GeneralTracker

    return GeneralTracker(_blank=True)
