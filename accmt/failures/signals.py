"""Signals that ask a run to end: handled in the main thread during a run, and left as they were after it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias

from accmt.errors import Preempted
from accmt.failures.interruption import Interruption, Reason

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_SAME_CTRL_C_S = 0.5  # a launcher forwards what the terminal has already sent to every process
_ADVICE = b"\n[accmt] Ctrl-C: finishing the current step and saving a checkpoint; press it again to stop at once\n"

Previous: TypeAlias = Callable[[int, FrameType | None], Any] | int | None


@contextmanager
def listening(interruption: Interruption, exit_code: int) -> Iterator[None]:
    """Handle Ctrl-C, SIGTERM and SIGUSR1 during a run; handlers that were there before are called at its end.

    Signals that are ignored, as in a background job, stay ignored. Outside the main thread nothing is handled.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    listener = _Listener(interruption, exit_code)
    listener.start()
    try:
        yield
    finally:
        listener.stop()


class _Listener:
    def __init__(self, interruption: Interruption, exit_code: int) -> None:
        self._interruption = interruption
        self._exit_code = exit_code
        self._process = os.getpid()
        self._previous: dict[int, Previous] = {}
        self._heard: dict[int, FrameType | None] = {}
        self._interrupted_at: float | None = None

    def start(self) -> None:
        for number in _SIGNALS:
            previous = signal.getsignal(number)
            if previous in (signal.SIG_IGN, None) or (number == signal.SIGINT and not self._interruption.is_listening):
                continue  # None: set by a C library, and could not be restored
            self._previous[number] = previous
            signal.signal(number, self._hear)

    def stop(self) -> None:
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, previous)
        for number, frame in self._heard.items():
            previous = self._previous[number]
            if callable(previous) and previous is not signal.default_int_handler:
                previous(number, frame)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a loader's worker, which its parent ends
            return
        self._heard[number] = frame
        if number == signal.SIGINT:
            self._hear_interrupt()
        elif self._interruption.is_ending:
            return
        elif not self._interruption.is_listening:
            self._interruption.left_at_once = True
            raise Preempted(self._exit_code)
        self._interruption.request(Reason.of_signal(number))

    def _hear_interrupt(self) -> None:
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
            os.write(2, _ADVICE)  # a logger may be in the middle of a line
        elif now - self._interrupted_at > _SAME_CTRL_C_S:
            self._interruption.left_at_once = True
            raise KeyboardInterrupt
