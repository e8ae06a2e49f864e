"""What asks a run to end before its time, and the place at which it does.

A run passes points at which it can be left: the ends of updates. Whoever wants it to end (a signal, a limit of time,
the user's code) only leaves a note; the loop looks for it at each point, which costs no communication.

Several processes agree through a thread of each (`Watch`) on the point at which all leave. A process that hears of the
wish holds at its next point, and tells the number of points that it had passed. Once all have told, they leave at the
point after the highest of those numbers: nobody can be beyond it, since whoever had not heard yet told the number
afterwards, and whoever holds before it goes on.
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
"""How long processes wait for one another's answer; one that does not give it is gone."""


@dataclass(frozen=True)
class Reason:
    """Why a run is to end.

    Attributes:
        what: What people are told: the name of a signal, or of a setting.
        ending: How it ends: as by Ctrl-C, as by pre-emption, or as if it were at its end.
    """

    what: str
    ending: Ending

    @classmethod
    def of_signal(cls, number: int) -> Reason:
        """Return the reason that a signal is."""
        return cls(signal.Signals(number).name, "interrupt" if number == signal.SIGINT else "preempt")


class Interruption:
    """The wish that a run ends, until it does.

    Args:
        is_listening: Whether signals wait for the next point; if not, they end the run at once.
        board: Where processes agree; None with one process.

    Attributes:
        is_listening: As the argument.
        ends_training: Whether training is to end as if it were at its end.
        ended_by: What asked for that.
        left_at_once: Whether the run is left in the middle of something, without another checkpoint.
        is_left: Whether all processes have left the run together.
    """

    def __init__(self, *, is_listening: bool, board: Board | None = None) -> None:
        self.is_listening = is_listening
        self.ends_training = False
        self.ended_by = ""
        self.left_at_once = False
        self.is_left = False
        self._board = board
        self._wish: Reason | None = None
        self._points = 0
        self._is_held = False
        self._held_at: int | None = None
        self._round = 0
        self._decided = threading.Event()
        self._decision: tuple[int, Reason] | None = None

    def request(self, reason: Reason) -> None:
        """Ask the run to end at its next point; the first reason counts. Any thread may call this.

        A signal counts more than the wish that training ends, after which there may be much to do.
        """
        if self._wish is None or (self._wish.ending == "finish" != reason.ending):
            self._wish = reason
        if self._board is None:
            self._is_held, self._decision = True, (0, self._wish)
            self._decided.set()
        else:
            self._hold()  # at once: where all ask at the same update, they end there, however fast updates are

    @property
    def reason_to_leave(self) -> Reason | None:
        """Why the run is to be left soon, so that what can be repeated need not be finished; None if it is not."""
        return self._wish if self._wish is not None and self._wish.ending != "finish" else None

    @property
    def is_left_in_order(self) -> bool:
        """Whether the run was left at one of its points, and nobody has broken into what came after it."""
        return self.is_left and not self.left_at_once

    @property
    def is_asked(self) -> bool:
        """Whether somebody in this process asked the run to end."""
        return self._wish is not None

    def pass_point(self) -> Reason | None:
        """Return why the run ends here; None if it goes on.

        Processes: all, at the same points; none waits for the others unless the run is to end.

        Raises:
            ProcessFailedError: A process does not answer.
        """
        self._points += 1
        if not self._is_held:
            return None
        if not self._decided.wait(ANSWER_S) or self._decision is None:
            got = f"no answer within {ANSWER_S:g} s from every process on where to end the run"
            raise ProcessFailedError(explain("a process", got, "all processes alive", "see the log of the others"))
        at, reason = self._decision
        if self._board is not None and self._points < at:
            return None
        if reason.ending == "finish":
            self._begin_anew()
            self.ends_training, self.ended_by = True, reason.what
            return None
        return reason

    def agree(self) -> None:
        """Take part in the agreement; the thread of each process calls this again and again."""
        board, topic = self._board, f"end-{self._round}"
        if board is None or self._decided.is_set():
            return
        notes = board.read(topic)
        if board.index not in notes and (self._wish is not None or notes):
            self._hold()
            wish = None if self._wish is None else asdict(self._wish)
            board.post(topic, {"points": self._points if self._held_at is None else self._held_at, "reason": wish})
            notes = board.read(topic)
        if len(notes) == board.count:
            reasons = [Reason(**note["reason"]) for _, note in sorted(notes.items()) if note["reason"] is not None]
            reason = next((reason for reason in reasons if reason.ending != "finish"), reasons[0])
            self._wish = reason
            self._decision = max(note["points"] for note in notes.values()) + 1, reason
            self._decided.set()

    def _hold(self) -> None:
        if not self._is_held:
            self._is_held = True  # before the number is read: a point that is passed now is held at, or counted
            self._held_at = self._points

    def _begin_anew(self) -> None:
        self._round += 1
        self._wish, self._is_held, self._held_at, self._decision = None, False, None, None
        self._decided.clear()
