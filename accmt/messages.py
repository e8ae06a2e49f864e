"""Messages to the user: logged by "accmt" on the main process, above the progress bars and with secrets hidden."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from accmt.processes import is_main_process
from accmt.secrets import hide_text

PREFIX = "[accmt] "
logger = logging.getLogger("accmt")
_said: set[str] = set()


def say(message: str) -> None:
    """Log an info message, from the main process."""
    if is_main_process():
        logger.info(hide_text(message))


def warn(message: str) -> None:
    """Log a warning, from the main process; also shown with `verbose=False`."""
    if is_main_process():
        logger.warning(hide_text(message))


def say_once(message: str) -> None:
    """Log an info message once per run."""
    if message not in _said:
        _said.add(message)
        say(message)


def warn_once(message: str, *, about: str) -> None:
    """Log a warning once per run: later ones with the same `about` are suppressed."""
    if about not in _said:
        _said.add(about)
        warn(message)


class _BarFriendlyHandler(logging.Handler):
    """Writes to stderr above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm.std import tqdm

        if sys.stderr is None or sys.stderr.closed:  # under pythonw, or at the end of a program
            return
        try:
            tqdm.write(PREFIX + self.format(record), file=sys.stderr)
        except Exception:  # noqa: BLE001 - like the standard library's handlers: a closed terminal must not stop a run
            self.handleError(record)


@contextmanager
def speaking(*, verbose: bool) -> Iterator[None]:
    """During a run, show messages in the terminal unless logging is configured; only warnings if not `verbose`."""
    _said.clear()
    level, propagate = logger.level, logger.propagate
    handler = _BarFriendlyHandler()
    if not logger.hasHandlers():
        logger.addHandler(handler)
        # A library that configures logging during the run, as rouge-score does, would show each message again.
        logger.propagate = False
    logger.setLevel(level or (logging.INFO if verbose else logging.WARNING))  # a level that the user has set stays
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.removeHandler(handler)
