"""What accmt says to people: through the logger "accmt", from the main process, in harmony with progress bars."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from accmt.processes import is_main_process

logger = logging.getLogger("accmt")
_said: set[str] = set()


def say(message: str) -> None:
    """Tell people something, once per call, from the main process."""
    if is_main_process():
        logger.info(message)


def warn(message: str) -> None:
    """Warn people, from the main process; heard even with `verbose=False`."""
    if is_main_process():
        logger.warning(message)


def say_once(message: str) -> None:
    """Tell people something the first time only, until `speaking` begins anew."""
    if message not in _said:
        _said.add(message)
        say(message)


def warn_once(message: str, *, about: str) -> None:
    """Warn people the first time only, until `speaking` begins anew.

    Args:
        message: The warning.
        about: What it is about; further warnings about it are held back.
    """
    if about not in _said:
        _said.add(about)
        warn(message)


class _BarFriendlyHandler(logging.Handler):
    """Writes to stderr without tearing a progress bar apart."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; a terminal that is gone stops nothing."""
        import sys

        from tqdm.std import tqdm

        try:
            tqdm.write(f"[accmt] {self.format(record)}", file=sys.stderr)
        except Exception:  # noqa: BLE001 - as every handler of the standard library
            self.handleError(record)


@contextmanager
def speaking(*, verbose: bool) -> Iterator[None]:
    """Let messages reach the terminal for the length of a run, unless the program has set logging up itself.

    Args:
        verbose: False lets warnings through only.
    """
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
