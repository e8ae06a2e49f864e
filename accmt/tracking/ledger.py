"""`delivery.json`: how far each tracker of a run has got, so that a later process continues where this one stopped."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accmt.files import dumps, loads, write_text

LEDGER_FILE = "delivery.json"


@dataclass
class Account:
    """What one tracker has got of `history.jsonl`. Lines are counted from 0.

    Args:
        server: The URL of the tracker's store, None for one in the folder of logs.
        run_id: The id by which the tracker knows the run.
        first: The first line of the run.
        delivered: The line before which the tracker has everything.
        handed: The line before which it may have everything: what is between was under way when this was written.
        settled: The line before which it has everything permanently, also after a kill; the rest it may have in memory.
        num_rejected: Rows that it rejected for their content.
        names: Its name of each metric.
    """

    server: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    run_id: str | None = None
    first: int = 0
    delivered: int = 0
    handed: int = 0
    settled: int = 0
    num_rejected: int = 0
    names: dict[str, str] = field(default_factory=dict)
    status: str | None = None

    def restart(self) -> None:
        """Count nothing as delivered: the tracker's run is a new one."""
        self.delivered = self.handed = self.settled = self.first
        self.status = None

    def reopen(self) -> None:
        """Count as under way what a killed process had handed over, and the tracker may have lost with it."""
        if self.status is None:
            self.delivered = min(self.delivered, self.settled)


class Ledger:
    """The accounts of all trackers of a run, written as one file."""

    def __init__(self, folder: Path, track_name: str, run_name: str) -> None:
        self._path = folder / LEDGER_FILE
        self._lock = threading.Lock()
        self.track_name = track_name
        self.run_name = run_name
        self.attempt = 1
        self.accounts: dict[str, Account] = {}

    @classmethod
    def read(cls, folder: Path) -> Ledger | None:
        """Return what an earlier process wrote; None where there is no file, or a damaged one."""
        try:
            content = loads((folder / LEDGER_FILE).read_text(encoding="utf-8"))
            ledger = cls(folder, content["track_name"], content["run_name"])
            ledger.attempt = content["attempt"]
            ledger.accounts = {name: Account(**account) for name, account in content["trackers"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return ledger

    def save(self) -> None:
        """Replace the file; on a full disk it stays as it is, and rows may be delivered twice after a kill."""
        with self._lock, suppress(OSError):
            # Copies: the threads of other trackers keep changing theirs.
            accounts = {key: {**vars(own), "names": dict(own.names)} for key, own in self.accounts.items()}
            content = {"track_name": self.track_name, "run_name": self.run_name, "attempt": self.attempt}
            write_text(self._path, dumps({**content, "trackers": accounts}, indent=2) + "\n")
