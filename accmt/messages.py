"""Messages to the user: through the logger "accmt", from the main process, with bars intact and secrets hidden."""

from __future__ import annotations

import logging
import os
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
    """Log an info message the first time only in a run."""
    if message not in _said:
        _said.add(message)
        say(message)


def warn_once(message: str, *, about: str) -> None:
    """Log a warning the first time only in a run; further ones `about` the same are suppressed."""
    if about not in _said:
        _said.add(about)
        warn(message)


def columns_of_messages() -> int | None:
    """Return how wide a message may be to stay on one line of the terminal; None where there is none."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (AttributeError, OSError, ValueError):  # of what is no terminal, no file, or nothing at all
        return None
    return columns - len(PREFIX) if columns else None


class _BarFriendlyHandler(logging.Handler):
    """Writes to stderr above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm.std import tqdm

        if sys.stderr is None or sys.stderr.closed:
            return
        try:
            tqdm.write(PREFIX + self.format(record), file=sys.stderr)
        except Exception:  # noqa: BLE001 - as every handler of the standard library: a closed terminal stops nothing
            self.handleError(record)


@contextmanager
def speaking(*, verbose: bool) -> Iterator[None]:
    """Show messages in the terminal during a run (only warnings if not `verbose`), if no logging is configured."""
    _said.clear()
    level = logger.level
    handler = None if logger.hasHandlers() else _BarFriendlyHandler()
    if level == logging.NOTSET:
        logger.setLevel(logging.INFO if verbose else logging.WARNING)
    if handler is not None:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        if handler is not None:
            logger.removeHandler(handler)
