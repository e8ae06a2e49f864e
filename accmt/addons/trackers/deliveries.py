"""Starts the trackers of a run, and knows what each of them has got of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from accmt.addons.trackers.delivery import Delivery, wait_for_the_end
from accmt.addons.trackers.delivery_state import Account, DeliveryFile, Rewinding, count_rows_left
from accmt.addons.trackers.spec import RunStart, TrackerSpec, UserTracker, kwargs_of_each, name_error
from accmt.errors import ArgumentError, MissingPackageError, TrackerError, explain, fail
from accmt.messages import warn
from accmt.secrets import hide, hide_text
from accmt.tracking.history import History, RunPlace
from accmt.tracking.values import to_plain

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

_START_S = 30.0
_REMOTE_START_S = 10.0
_END_AFTER_A_FAILED_START_S = 1.0


class Deliveries:
    """The trackers of one run; a thread of each delivers the rows of `history.jsonl` to it.

    A tracker that is slow, unreachable or raises errors delays nothing and loses nothing: rows wait in the file and are
    delivered in order when it accepts them again, if necessary by a resumed run or by `accmt sync <run folder>`.

    Args:
        trackers: The trackers.
        tracker_kwargs: Keywords for them.
        is_quiet: Whether to suppress the trackers' own messages.
        offline: What to do if a tracker's server cannot be reached at the start: "auto" trains and delivers later,
            False raises an error. True contacts no server; rows wait for `accmt sync`.

    Raises:
        ArgumentError: No tracker accepts a keyword.

    Processes: create it on all processes, so that a wrong argument stops all of them; use it on the main one.
    """

    def __init__(
        self,
        trackers: Sequence[TrackerSpec],
        tracker_kwargs: Mapping[str, Any],
        *,
        is_quiet: bool,
        offline: Literal["auto"] | bool,
    ) -> None:
        self._trackers: dict[str, tuple[TrackerSpec, dict[str, Any]]] = {}  # by unique names
        for spec, kwargs in zip(trackers, kwargs_of_each(trackers, tracker_kwargs), strict=True):
            # Two of a user's trackers may have one name.
            number = 1 + sum(known.name == spec.name for known, _ in self._trackers.values())
            key = spec.name if number == 1 else f"{spec.name}_{number}"
            self._trackers[key] = (spec, kwargs)
        self._is_quiet = is_quiet
        self._offline = offline
        self._file: DeliveryFile | None = None
        self._running: list[Delivery] = []

    @property
    def loggers(self) -> list[GeneralTracker]:
        """The trackers; one that has not been reached yet is replaced by one that does nothing."""
        return [self._logger(key) for key in self._trackers]

    @property
    def run_ids(self) -> dict[str, str]:
        """The id of the run in each service that has one; kept after the end."""
        if self._file is None:
            return {}
        accounts = self._file.accounts
        return {key: account.run_id for key, account in accounts.items() if account.run_id is not None}

    def get(self, name: str) -> GeneralTracker:
        """Return a tracker by name.

        Raises:
            ArgumentError: There is no such tracker.
        """
        if name not in self._trackers:
            where, expected = f"get_tracker({name!r})", f"one of {list(self._trackers)}"
            raise fail(ArgumentError, where, got="an unknown tracker", expected=expected, do="add it to log_with")
        return self._logger(name)

    def dashboard_command(self, place: RunPlace) -> list[str]:
        """Return the command of the first tracker that can show the runs in a browser, else an empty list."""
        for spec, _ in self._trackers.values():
            command = spec.dashboard_command(place)
            if command:
                return command
        return []

    def held_back(self, place: RunPlace) -> list[str]:
        """Return the trackers whose rows wait for `accmt sync`."""
        if place.folder is not None:
            return [key for key, (spec, _) in self._trackers.items() if spec.is_exclusive]
        if self._offline is not True:
            return []
        return [key for key, (spec, kwargs) in self._trackers.items() if spec.is_remote(place, kwargs)]

    def give_up(self, history: History) -> None:
        """Warn about rows of an earlier run in the folder of a new one, which can no longer be delivered."""
        before = DeliveryFile.read(history.path.parent)
        for key, account in before.accounts.items() if before else ():
            num_rows = count_rows_left(history.path, account)
            if num_rows:
                folder = history.path.parent
                got = f"{num_rows} rows of an earlier run in {folder} were not delivered and no longer will be"
                do = "resume or `accmt sync` a run before you start another with the same run_name"
                warn(explain(f"the tracker {key}", got, "one folder per run", do))

    def start(self, history: History, place: RunPlace, attempt: int, resumed_ids: Mapping[str, str] | None) -> None:
        """Start the trackers. A server that does not respond delays this by at most ten seconds.

        Args:
            history: The rows.
            place: The location of the run.
            attempt: The number of this attempt at the run, from 1.
            resumed_ids: The id of a resumed run in each service; None for a new run.

        Raises:
            TrackerError: A tracker failed to start for another reason than an unreachable server (with
                `offline=False`, for any reason).
        """
        self._file = DeliveryFile(place.run_folder, place.track_name, place.run_name)
        self._file.attempt = attempt
        self._open_accounts(self._file, history, place, resumed_ids)
        self._file.save()
        held_back = self.held_back(place)
        for key, (spec, kwargs) in self._trackers.items():
            if key not in held_back:
                self._start_tracker(key, spec, RunStart(place, kwargs, is_quiet=self._is_quiet), history, self._file)

    def notify(self) -> None:
        """Tell the threads that there are new rows."""
        for delivery in self._running:
            delivery.notify()

    def finish(self, status: str, flush_s: float) -> None:
        """End the run in all trackers.

        Args:
            status: How the run ended.
            flush_s: How long to wait until all rows are delivered.
        """
        try:
            wait_for_the_end(self._running, status, flush_s)
        finally:
            for delivery in self._running:
                delivery.detach(status)

    def warn_of_rows_left(self, flush_s: float) -> None:
        """After `finish`, and once the history is closed, warn about what could not be delivered."""
        running, self._running = self._running, []
        for delivery in running:
            delivery.warn_of_rows_left(flush_s)

    def _logger(self, key: str) -> GeneralTracker:
        from accelerate.tracking import GeneralTracker

        for delivery in self._running:
            if delivery.key == key and delivery.tracker is not None:
                return delivery.tracker
        return GeneralTracker(_blank=True)  # so that a hook that uses it does not stop a run whose server is down

    def _open_accounts(
        self, delivery_file: DeliveryFile, history: History, place: RunPlace, resumed_ids: Mapping[str, str] | None
    ) -> None:
        """Open the delivery state of each tracker: that of an earlier attempt at this run, or a new one."""
        before, lines = DeliveryFile.read(place.run_folder), history.num_lines
        for key, (spec, kwargs) in self._trackers.items():
            if resumed_ids is None:
                account = Account(first=lines, delivered=lines, handed=lines, settled=lines)
            elif before is not None and key in before.accounts:
                account = before.accounts[key]
                account.reopen()
                account.run_id = account.run_id or resumed_ids.get(key)
            else:
                # The delivery state is unknown: assume all rows were delivered if the tracker must not get any twice.
                delivered = lines if spec.rewinding is Rewinding.UNKNOWN else 0
                run_id = resumed_ids.get(key)
                account = Account(run_id=run_id, delivered=delivered, handed=lines, settled=delivered)
            server = spec.server(place)
            account.server = server and hide_text(server)
            account.kwargs = hide(to_plain(kwargs), leave_out=True)
            delivery_file.accounts[key] = account

    def _start_tracker(
        self, key: str, spec: TrackerSpec, start: RunStart, history: History, delivery_file: DeliveryFile
    ) -> None:
        place, kwargs = start.place, start.kwargs
        # Here, not in its thread: a missing login ends the program before anything is trained.
        spec.require_access(place, kwargs, is_needed=self._offline is False)
        is_patient = self._offline is not False
        delivery = Delivery(spec, start, history, delivery_file, key=key, is_patient=is_patient)
        self._running.append(delivery)
        delivery.begin(_REMOTE_START_S if spec.is_remote(place, kwargs) else _START_S)
        error = delivery.start_error
        if error is None:  # started, or retried until its server answers
            delivery.attach()
            return
        self._running.remove(delivery)
        delivery.end("FAILED", 0.0)
        delivery.join(_END_AFTER_A_FAILED_START_S)
        if not isinstance(error, Exception):  # SystemExit of a tracker's library
            raise error
        where, got = f"the tracker {spec.name}", name_error(error)
        if isinstance(error, ImportError) and not isinstance(spec, UserTracker):
            expected, do = "a complete package", f"pip install --force-reinstall {spec.package}"
            raise fail(MissingPackageError, where, got=got, expected=expected, do=do) from error
        do = f"check logging_dir={place.logging_dir!r} and the server, or leave {spec.name} out of log_with"
        raise fail(TrackerError, where, got=got, expected="a tracker that starts", do=do) from error
