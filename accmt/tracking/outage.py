"""A tracker that does not answer: how long to wait before the next try, and the one warning."""

from __future__ import annotations

import time
from collections.abc import Iterator
from textwrap import shorten

from accmt.errors import explain
from accmt.messages import say, warn

_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 0.5
_LONG_OUTAGE_S = 60.0
_LONG_OUTAGE_DELAY_S = 5.0
_TRIES_BEFORE_WARNING = 3


class Outage:
    """The failures of one tracker since it last took something."""

    def __init__(self, tracker: str, where_rows_wait: str) -> None:
        self._tracker = tracker
        self._where_rows_wait = where_rows_wait
        self._began = 0.0
        self.num_failures = 0
        self.error: BaseException | None = None

    def count(self, error: BaseException) -> float:
        """Count one failure; the third in a row is worth a warning.

        Returns:
            The seconds to wait before the next try.
        """
        self._add(error, 1)
        if self.num_failures == _TRIES_BEFORE_WARNING:
            self._warn()
        longest = _LONGEST_DELAY_S if time.monotonic() - self._began < _LONG_OUTAGE_S else _LONG_OUTAGE_DELAY_S
        return float(min(_FIRST_DELAY_S * 2 ** min(self.num_failures - 1, 10), longest))

    def announce(self, error: BaseException) -> None:
        """Count a failure that is worth the warning at once."""
        self._add(error, _TRIES_BEFORE_WARNING)
        self._warn()

    def end(self) -> None:
        """Forget the failures, and say so where they had been worth a warning."""
        if self.num_failures >= _TRIES_BEFORE_WARNING:
            seconds = time.monotonic() - self._began
            say(f"the tracker {self._tracker} accepts rows again after {seconds:.1f} s, and gets those that waited")
        self.num_failures = 0
        self.error = None

    def _add(self, error: BaseException, count: int) -> None:
        self._began = self._began if self.num_failures else time.monotonic()
        self.num_failures += count
        self.error = error

    def _warn(self) -> None:
        expected = f"a tracker that accepts rows; training continues, and they wait in {self._where_rows_wait}"
        do = "nothing: they are delivered as soon as it does"
        warn(explain(f"the tracker {self._tracker}", name_error(self.error), expected, do))


def is_outage(error: BaseException | None) -> bool:
    """Return whether an error, or one that it came from, is a connection's or a time-out's, not a mistake's."""
    return any(isinstance(cause, OSError) and not isinstance(cause, _MISTAKES) for cause in _causes(error))


def name_error(error: BaseException | None) -> str:
    """Return an error as messages show it: the libraries' own for a dead server fill half a screen."""
    return "no answer" if error is None else shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")


# A ValueError too: the request libraries' errors for malformed URLs are both.
_MISTAKES = (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
