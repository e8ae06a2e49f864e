"""What asks a run to end before its time, and the point at which it does.

A run passes points at which it can be left: the ends of optimizer steps, and the batches of its evaluations. Whoever
wants it to end (a signal, a time limit, the user's code) only leaves a request; the loop looks for it at each point,
which costs no communication.

Several processes agree through a thread of each (`Watch`) on the point at which all leave. A process that learns of the
request holds at its next point and reports how many points it had passed. Once all have reported, they leave at the
point after the highest of those numbers: nobody can be beyond it, since a process that learned of it later reported
its number afterwards, and one that holds earlier continues up to it.
"""

from __future__ import annotations

import signal
import threading
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from accmt.errors import ProcessFailedError, explain
from accmt.failures.board import Board

Ending: TypeAlias = Literal["interrupt", "preempt", "finish"]

ANSWER_S = 5.0
"""How long processes wait for one another's answer; one that does not answer counts as dead."""


@dataclass(frozen=True)
class Reason:
    """Why a run is to end.

    Attributes:
        what: The name of a signal or of a setting, for messages.
        ending: As by Ctrl-C, as by pre-emption, or as if training were finished.
    """

    what: str
    ending: Ending

    @classmethod
    def of_signal(cls, number: int) -> Reason:
        return cls(signal.Signals(number).name, "interrupt" if number == signal.SIGINT else "preempt")


class Interruption:
    """The request that a run ends, until it does.

    Args:
        is_listening: Whether signals wait for the next point; if not, they end the run at once.
        board: Where processes agree; None with one process.

    Attributes:
        ends_training: Whether training is to end as if it were finished.
        ended_by: What asked for that.
        left_at_once: Whether the run is left in the middle of something, without another checkpoint.
        is_left: Whether all processes have left the run together.
        is_ending: Whether the run is about to end by an error, which a launcher's signal must not hide.
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
        """Ask the run to end at its next point; the first reason counts. Any thread may call this.

        A signal takes precedence over the request to finish training, after which there may be much to do.
        """
        if self._request is None or (self._request.ending == "finish" != reason.ending):
            self._request = reason
        if self._board is None:
            self._is_held, self._decision = True, (0, self._request)
            self._decided.set()
        else:
            self._hold()  # at once: where all ask at the same step, they end there, however fast steps are

    @property
    def is_left_in_order(self) -> bool:
        """Whether the run was left at one of its points, and nothing interrupted what came after it."""
        return self.is_left and not self.left_at_once

    @property
    def is_asked(self) -> bool:
        """Whether somebody in this process asked the run to end."""
        return self._request is not None

    def pass_point(self) -> Reason | None:
        """Return why the run ends here; None if it continues.

        Processes: all, at the same points; none waits for the others unless the run is to end.

        Raises:
            ProcessFailedError: A process does not answer.
        """
        self._points += 1
        if not self._is_held:
            return None
        if not self._decided.wait(ANSWER_S) or self._decision is None:
            got = f"some process did not answer within {ANSWER_S:g} s on where to end the run"
            raise ProcessFailedError(explain("a process", got, "all processes alive", "see the other processes' logs"))
        at, reason = self._decision
        if self._board is not None and self._points < at:
            return None
        if reason.ending == "finish":
            signalled = self._request if self._request is not None and self._request.ending != "finish" else None
            self._reset()
            self.ends_training, self.ended_by = True, reason.what
            if signalled is not None:  # after the processes had agreed to finish
                self.request(signalled)
            return None
        return reason

    def agree(self) -> None:
        """Take part in the agreement; the thread of each process calls this again and again."""
        board, topic = self._board, f"end-{self._agreement}"
        if board is None or self._decided.is_set():
            return
        notes = board.read(topic)
        if board.index not in notes and (self._request is not None or notes):
            self._hold()
            request = None if self._request is None else asdict(self._request)
            board.post(topic, {"points": self._points if self._held_at is None else self._held_at, "reason": request})
            notes = board.read(topic)
        if len(notes) == board.count:
            reasons = [Reason(**note["reason"]) for _, note in sorted(notes.items()) if note["reason"] is not None]
            reason = next((reason for reason in reasons if reason.ending != "finish"), reasons[0])
            self._request = reason
            self._decision = max(note["points"] for note in notes.values()) + 1, reason
            self._decided.set()

    def _hold(self) -> None:
        if not self._is_held:
            # Before the number is read: a point that is passed in between is either held at, or counted.
            self._is_held = True
            self._held_at = self._points

    def _reset(self) -> None:
        self._agreement += 1
        self._request, self._is_held, self._held_at, self._decision = None, False, None, None
        self._decided.clear()
