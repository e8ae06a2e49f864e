"""Delivers the rows that the trackers of a run still miss, after the run: `accmt sync`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from accmt.addons.trackers.delivery import Delivery, wait_for_the_end
from accmt.addons.trackers.delivery_state import DeliveryFile, count_rows_left
from accmt.addons.trackers.spec import GROUP, RunStart, name_error, resolve_trackers
from accmt.errors import ArgumentError, fail
from accmt.registry import is_built_in
from accmt.secrets import HIDDEN, hide_text
from accmt.tracking.history import (
    DELIVERY_FILE,
    EVALUATIONS_FOLDER,
    HISTORY_FILE,
    History,
    RunPlace,
    read_history,
)

_START_S = 30.0


@dataclass(frozen=True)
class Synced:
    tracker: str
    num_delivered: int
    num_left: int
    problem: str | None = None


def sync_run(run_folder: Path, *, timeout_s: float = 600.0, server: str | None = None) -> list[Synced]:
    """Deliver the missing rows to the trackers of a run, and end the run there with its true status.

    A run without a status was killed, and gets the status "KILLED".

    Args:
        timeout_s: The time limit for each tracker.
        server: The full URL of a tracker's store, if the URL of the run contained a secret, which is not saved. None:
            take it from an environment variable such as MLFLOW_TRACKING_URI.

    Raises:
        ArgumentError: `run_folder` is not a run folder, or the run is still running and delivers its rows itself.
    """
    deliveries = DeliveryFile.read(run_folder)
    is_damaged = deliveries is None and (run_folder / DELIVERY_FILE).exists()  # a run without trackers has none
    if is_damaged or not (run_folder / HISTORY_FILE).exists():
        expected = f"the folder of a run, with {HISTORY_FILE} and, if it has trackers, {DELIVERY_FILE}"
        raise fail(ArgumentError, "accmt sync", got=str(run_folder), expected=expected, do="pass logs/<track>/<run>")
    history = History(run_folder)
    try:
        if not history.is_ours_alone():
            do = "no action needed: it delivers its rows itself"
            raise fail(
                ArgumentError,
                "accmt sync",
                got=f"{run_folder}, which is still running",
                expected="a run that is over",
                do=do,
            )
        last = read_history(run_folder)[-1:]
        status = str(last[0]["status"]) if last and "status" in last[0] else "KILLED"
        if not last or "status" not in last[0]:
            history.add_status("KILLED")  # a killed process could not write it
        if deliveries is None:
            return []
        return [_sync(key, run_folder, history, deliveries, status, timeout_s, server) for key in deliveries.accounts]
    finally:
        history.close()


def _sync(
    key: str,
    folder: Path,
    history: History,
    deliveries: DeliveryFile,
    status: str,
    timeout_s: float,
    server: str | None,
) -> Synced:
    account = deliveries.accounts[key]
    account.reopen()
    left_before = count_rows_left(history.path, account)
    if left_before == 0 and account.status == status:
        return Synced(key, 0, 0)
    if not is_built_in(GROUP, key):
        return Synced(key, 0, left_before, "a custom tracker, which only a run can start")
    url = account.server
    if url is not None and HIDDEN in url:
        known = (full for full in (server, *os.environ.values()) if full and hide_text(full) == url)
        url = next(known, server or url)
        if HIDDEN in url:
            why = f"the secret in its URL {url} is not saved: pass the full URL with --server"
            return Synced(key, 0, left_before, why)
    # The folder may have been moved: a local store is expected next to its current location.
    run_folder = folder.absolute().parent if folder.name == EVALUATIONS_FOLDER else folder.absolute()
    logging_dir = url or str(run_folder.parent.parent)
    (spec,) = resolve_trackers(key)
    place = RunPlace(logging_dir, deliveries.track_name, deliveries.run_name, folder.absolute())
    start = RunStart(place, account.kwargs, is_quiet=True)
    delivery = Delivery(spec, start, history, deliveries, key=key, is_patient=False)
    delivery.begin(min(_START_S, timeout_s))
    wait_for_the_end([delivery], status, timeout_s if delivery.start_error is None else 0.0)
    delivery.detach(status)
    problem = delivery.start_error or delivery.outage.error
    left = count_rows_left(history.path, account)
    is_done = left == 0 and account.status == status
    return Synced(key, max(left_before - left, 0), left, None if is_done else name_error(problem))
