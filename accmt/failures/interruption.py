"""Requests to end a run early, and the point at which the run ends.

A run passes points at which it can stop: the ends of optimizer steps, and the batches of its evaluations. A signal, a
time limit or the user's code only records a request; the loop checks for it at each point, which needs no
communication.

Several processes agree on the point through one thread each (`Watch`). A process that learns of the request waits at
its next point and reports how many points it has passed. Once all have reported, they stop at the point after the
highest of these numbers. No process can be beyond it: one that learned of the request later also reported its number
later, and one that waits earlier continues up to it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, Literal, TypeAlias

from accmt.errors import Preempted, ProcessFailedError, fail
from accmt.failures.board import Board

Ending: TypeAlias = Literal["interrupt", "preempt", "finish"]

ANSWER_S = 5.0
"""How long a process waits for the others' answers; one that does not answer counts as dead."""


@dataclass(frozen=True)
class Reason:
    """Why a run ends early.

    Attributes:
        what: The name of a signal or setting, for messages.
        ending: As after Ctrl-C, as after preemption, or as if training were finished.
    """

    what: str
    ending: Ending

    @classmethod
    def of_signal(cls, number: int) -> Reason:
        ending: Ending = "interrupt" if number == signal.SIGINT else "preempt"
        return cls(signal.Signals(number).name, ending)


class Interruption:
    """The request to end a run.

    Args:
        is_listening: Whether signals wait for the next point; if not, they end the run immediately.
        board: Where processes agree; None with one process.

    Attributes:
        ends_training: Whether training ends as if it were finished.
        ended_by: What requested that.
        left_at_once: Whether the run stops in the middle of something, without another checkpoint.
        is_left: Whether all processes have stopped the run together.
        is_ending: Whether the run is about to end with an error, which a launcher's signal must not hide.
    """

    def __init__(self, *, is_listening: bool, board: Board | None = None) -> None:
        self.is_listening = is_listening
        self.ends_training = False
        self.ended_by = ""
        self.left_at_once = False
        self.is_left = False
        self.is_ending = False
        self._board = board
        self._request: Reason | None = None
        self._points = 0
        self._is_held = False
        self._held_at: int | None = None
        self._agreement = 0
        self._decided = threading.Event()
        self._decision: tuple[int, Reason] | None = None

    def request(self, reason: Reason) -> None:
        """Request that the run ends at its next point; the first reason counts. Thread-safe.

        A signal has priority over the request to finish training, because finishing may take long.
        """
        if self._request is None or (self._request.ending == "finish" != reason.ending):
            self._request = reason
        if self._board is None:
            self._is_held, self._decision = True, (0, self._request)
            self._decided.set()
        else:
            self._hold()  # immediately: if all request it at the same step, they end there, however fast steps are

    @property
    def is_left_in_order(self) -> bool:
        """Whether the run stopped at one of its points, and nothing interrupted what followed."""
        return self.is_left and not self.left_at_once

    @property
    def is_asked(self) -> bool:
        """Whether this process has requested the end of the run."""
        return self._request is not None

    def pass_point(self) -> Reason | None:
        """Return why the run ends here; None if it continues.

        Processes: all, at the same points; none waits for the others unless the run is about to end.

        Raises:
            ProcessFailedError: A process does not answer.
        """
        self._points += 1
        if not self._is_held:
            return None
        # A process that was killed, or hangs, never reports its number.
        if not self._decided.wait(ANSWER_S) or self._decision is None:
            got = f"a process did not answer within {ANSWER_S:g} s when the processes agreed where to end the run"
            do = "see the other processes' logs"
            raise fail(ProcessFailedError, "a process", got=got, expected="all processes alive", do=do)
        at, reason = self._decision
        if self._board is not None and self._points < at:
            return None
        if reason.ending == "finish":
            request = self._request
            self._reset()
            self.ends_training, self.ended_by = True, reason.what
            if request is not None and request.ending != "finish":  # a signal after the processes had agreed to finish
                self.request(request)
            return None
        return reason

    def agree(self) -> None:
        """Take part in the agreement; called repeatedly by each process's thread."""
        board, topic = self._board, f"end-{self._agreement}"
        if board is None or self._decided.is_set():
            return
        notes = board.read(topic)
        if board.index not in notes and (self._request is not None or notes):
            self._hold()
            request = None if self._request is None else asdict(self._request)
            points = self._points if self._held_at is None else self._held_at
            board.post(topic, {"points": points, "reason": request})
            notes = board.read(topic)
        if len(notes) == board.count:
            reasons = [Reason(**note["reason"]) for _, note in sorted(notes.items()) if note["reason"] is not None]
            # By rank, so that every process takes the same one.
            reason = next((reason for reason in reasons if reason.ending != "finish"), reasons[0])
            self._request = reason
            self._decision = max(note["points"] for note in notes.values()) + 1, reason
            self._decided.set()

    def _hold(self) -> None:
        if not self._is_held:
            # Before the number is read: a point that is passed in between is either held at or counted.
            self._is_held = True
            self._held_at = self._points

    def _reset(self) -> None:
        self._agreement += 1
        self._request, self._is_held, self._held_at, self._decision = None, False, None, None
        self._decided.clear()


# ---- The elapsed time of a run, excluding interruptions.


class Clock:
    """Measures the duration of a run across interruptions.

    Args:
        limit_s: The time limit in seconds; None for none.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self._limit_s = limit_s
        self._before_s = 0.0
        self._began = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        """Seconds so far, including the time before an interruption."""
        return self._before_s + time.perf_counter() - self._began

    @property
    def is_used_up(self) -> bool:
        """Whether the time limit is reached."""
        return self._limit_s is not None and self.elapsed_s >= self._limit_s

    def state_dict(self) -> dict[str, float]:
        return {"elapsed_s": self._before_s + time.perf_counter() - self._began}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._before_s, self._began = state["elapsed_s"], time.perf_counter()


# ---- Signals that request the end of a run: handled in the main thread during a run, and restored after it.


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_SAME_CTRL_C_S = 0.5  # a launcher forwards the signal that the terminal has already sent to every process
_ADVICE = b"\n[accmt] Ctrl-C: finishing the current step and saving a checkpoint; press it again to stop at once\n"

Previous: TypeAlias = Callable[[int, FrameType | None], Any] | int | None


@contextmanager
def listening(interruption: Interruption, exit_code: int) -> Iterator[None]:
    """Handle Ctrl-C, SIGTERM and SIGUSR1 during a run; previous handlers are called at its end.

    Ignored signals, as in a background job, stay ignored. Outside the main thread nothing is handled.
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
                continue  # None: set by a C library, which Python cannot restore
            self._previous[number] = previous
            signal.signal(number, self._hear)

    def stop(self) -> None:
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._hear:  # otherwise the user's code has replaced it during the run
                signal.signal(number, previous)
        for number, frame in self._heard.items():
            previous = self._previous[number]
            if callable(previous) and previous is not signal.default_int_handler:
                previous(number, frame)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a loader worker, which its parent ends
            return
        self._heard[number] = frame
        if number == signal.SIGINT:
            time_s = time.monotonic()
            if self._interrupted_at is None:
                self._interrupted_at = time_s
                os.write(2, _ADVICE)  # not through the logger, which may be in the middle of a line
            elif time_s - self._interrupted_at > _SAME_CTRL_C_S:
                self._interruption.left_at_once = True
                raise KeyboardInterrupt
        elif self._interruption.is_ending:
            return
        elif not self._interruption.is_listening:
            self._interruption.left_at_once = True
            raise Preempted(self._exit_code)
        self._interruption.request(Reason.of_signal(number))
