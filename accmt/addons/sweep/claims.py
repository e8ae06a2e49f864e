"""Which worker runs a trial: nobody else may run it at the same time, and what a dead worker held is free again.

On one machine, and on a shared disk with locks, a trial is held by the lock of its folder, which the system releases
with the process. Workers on several machines, which share a database, hold a lease in it, too, by the clock of its
server: a thread renews it while they live, and they stop a trial before its lease runs out if they cannot.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accmt.addons.run_folders import taking_turns
from accmt.addons.sweep.spec import SweepSpec
from accmt.files import FolderLock, FolderTakenError

_RENEWALS = 4  # of a lease, before it runs out
_MARGIN = 0.75  # the part of a lease after which a trial stops if its lease cannot be renewed
_POLL_S = 0.1
_SUGGESTING = "next"


class Claims:
    """The trials that this worker holds, by the locks of their folders.

    Args:
        folder: The folder of the sweep.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[int, FolderLock | None] = {}

    def take(self, number: int) -> bool:
        """Hold a trial, and return whether nobody else does."""
        if number in self._held:
            return True
        folder = trial_folder(self._folder, number)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = FolderLock.take(folder)
        except FolderTakenError:
            return False
        self._held[number] = lock
        return True

    def holds(self, number: int) -> bool:
        """Return whether this worker holds a trial."""
        return number in self._held

    def release(self, number: int) -> None:
        """Give a trial back."""
        lock = self._held.pop(number)
        if lock is not None:
            lock.release()

    def lost(self) -> list[int]:
        """Return the trials that this worker may no longer run."""
        return []

    @contextmanager
    def suggesting(self) -> Iterator[None]:
        """Wait until no other worker suggests a trial."""
        with taking_turns(self._folder):
            yield

    def close(self) -> None:
        """Give everything back."""
        for number in list(self._held):
            self.release(number)


class LeasedClaims(Claims):
    """The trials that this worker holds, by leases in a database in addition.

    Args:
        spec: The sweep.
    """

    def __init__(self, spec: SweepSpec) -> None:
        super().__init__(spec.folder)
        self._leases = _Leases(str(spec.storage), spec.name, spec.lease_s)

    def take(self, number: int) -> bool:
        if not super().take(number):
            return False
        if self._leases.take(str(number)):
            return True
        super().release(number)
        return False

    def release(self, number: int) -> None:
        with suppress(Exception):  # it runs out
            self._leases.release(str(number))
        super().release(number)

    def lost(self) -> list[int]:
        return [int(name) for name in self._leases.lost() if name != _SUGGESTING]

    @contextmanager
    def suggesting(self) -> Iterator[None]:
        with super().suggesting():
            while not self._leases.take(_SUGGESTING):
                time.sleep(_POLL_S)
            try:
                yield
            finally:
                self._leases.release(_SUGGESTING)

    def close(self) -> None:
        super().close()
        self._leases.close()


_TABLE = """
CREATE TABLE IF NOT EXISTS accmt_sweep_leases (
    study text, name text, owner text NOT NULL, ends timestamptz NOT NULL, PRIMARY KEY (study, name)
)
"""
_TAKE = """
INSERT INTO accmt_sweep_leases AS held (study, name, owner, ends)
VALUES (:study, :name, :owner, clock_timestamp() + make_interval(secs => :seconds))
ON CONFLICT (study, name) DO UPDATE SET owner = excluded.owner, ends = excluded.ends
WHERE held.owner = excluded.owner OR held.ends < clock_timestamp()
"""
_RELEASE = "DELETE FROM accmt_sweep_leases WHERE study = :study AND name = :name AND owner = :owner"


class _Leases:
    """Leases of one owner in a table; each statement is one transaction, and the server's clock decides.

    Args:
        url: The database.
        study: The name of the study.
        seconds: How long a lease lasts unless it is renewed.
    """

    def __init__(self, url: str, study: str, seconds: float) -> None:
        from sqlalchemy import create_engine, text

        from accmt.addons.sweep.study import engine_arguments, url_for_sqlalchemy

        self._engine = create_engine(url_for_sqlalchemy(url), **engine_arguments(url))
        self._text = text
        self._study = study
        self._owner = secrets.token_hex(8)
        self._seconds = seconds
        self._renewed: dict[str, float] = {}  # when each lease was last asked for, and granted
        self._lost: set[str] = set()
        self._lock = threading.Lock()  # a lease that is given back must not be renewed
        self._is_closed = threading.Event()
        with self._engine.begin() as connection:
            # Two workers may create the table at once, which PostgreSQL reports as a duplicate of the first one's.
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('accmt_sweep_leases'))"))
            connection.execute(text(_TABLE))
        threading.Thread(target=self._renew, name="accmt-leases", daemon=True).start()

    def take(self, name: str) -> bool:
        """Take or renew a lease, and return whether it is this owner's."""
        asked = time.monotonic()
        if not self._execute(_TAKE, name, seconds=self._seconds):
            return False
        self._renewed[name] = asked
        return True

    def release(self, name: str) -> None:
        """Give a lease back."""
        with self._lock:
            self._renewed.pop(name, None)
            self._lost.discard(name)
            self._execute(_RELEASE, name)

    def _execute(self, statement: str, name: str, **values: object) -> bool:
        with self._engine.begin() as connection:
            given = {"study": self._study, "name": name, "owner": self._owner, **values}
            return bool(connection.execute(self._text(statement), given).rowcount)

    def lost(self) -> list[str]:
        """Return the leases that have run out, or soon will."""
        now = time.monotonic()
        late = [name for name, asked in list(self._renewed.items()) if now - asked > _MARGIN * self._seconds]
        return [*self._lost, *late]

    def _renew(self) -> None:
        while not self._is_closed.wait(self._seconds / _RENEWALS):
            for name in list(self._renewed):
                with suppress(Exception), self._lock:  # the server may be back in time
                    if name in self._renewed and not self.take(name):
                        self._lost.add(name)

    def close(self) -> None:
        self._is_closed.set()
        self._engine.dispose()


def trial_folder(folder: Path, number: int) -> Path:
    """Return the folder of a trial."""
    return folder / "trials" / f"{number:04d}"
