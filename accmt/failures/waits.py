"""Who waits for whom: processes that can never meet are an error, a long wait is a warning that names the slow one.

Collectives have no names, so neither of two processes in different ones learns what the other is doing. But each group
of processes counts its collectives. All processes begin them in one order, so what one has begun is a part of what any
other has begun. Where each of two is ahead of the other in some group, and both wait, neither can ever go on.

The thread of each process looks once a second, and leaves a note where its main thread has waited for some time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from accmt.errors import ModuleContractError
from accmt.failures.board import Board
from accmt.messages import warn
from accmt.processes import explain_apart

_NOTED_S = 5.0
_WARNED_S = 30.0
_AGAIN = 10  # times as long after the warning before
_WAITING, _BUSY = "waiting", "busy"


@dataclass(frozen=True)
class Stand:
    """Where a process is.

    Attributes:
        waits: Whether its main thread waits for other processes.
        begun: The collectives that it has begun in each group.
        function: The one that it is in, if that is known.
    """

    waits: bool
    begun: Mapping[str, int]
    function: str | None = None

    def can_never_meet(self, other: Stand) -> bool:
        """Return whether two processes that wait are in different collectives, each of which needs both."""
        if self.begun == other.begun:
            return None not in (self.function, other.function) and self.function != other.function
        return self._is_ahead_of(other) and other._is_ahead_of(self)

    def _is_ahead_of(self, other: Stand) -> bool:
        return any(number > other.begun[group] for group, number in self.begun.items() if group in other.begun)


class Waits:
    """Watches the waiting of one process and, in the main one, warns of that of all.

    Args:
        board: Where processes leave notes.
        describe: Returns what this process is doing.
    """

    def __init__(self, board: Board, describe: Callable[[], str]) -> None:
        self._board = board
        self._describe = describe
        self._stand: Stand | None = None
        self._since = 0.0
        self._has_noted = False
        self._busy_noted_at: float | None = None
        self._apart: list[int] = []
        self._waiting_since: float | None = None
        self._warns_after = _WARNED_S

    def look(self, now: float, stand: Stand) -> ModuleContractError | None:
        """Take note of where this process is; return the error where it and another one can never meet."""
        if stand != self._stand or not stand.waits:
            self._stand, self._since = stand, now
        self._note(now, stand)
        notes = self._board.read(_WAITING) if self._board.count > 1 else {}
        waiting = {index: note for index, note in notes.items() if note is not None}
        if not waiting:
            self._busy_noted_at, self._apart, self._waiting_since, self._warns_after = None, [], None, _WARNED_S
            return None
        self._answer(now)
        if self._board.index == 0:
            self._warn_of_long_wait(now, waiting)
        if not self._has_noted:
            return None
        others = {index: note for index, note in waiting.items() if index != self._board.index}
        before = self._apart
        self._apart = [i for i, note in others.items() if stand.can_never_meet(Stand(**note["stand"]))]
        if not before or not self._apart:  # twice: a note may be a second older than what it is compared with
            return None
        return ModuleContractError(explain_apart({index: note["doing"] for index, note in sorted(waiting.items())}))

    def _note(self, now: float, stand: Stand) -> None:
        waits_long = stand.waits and now - self._since >= _NOTED_S
        if waits_long != self._has_noted:
            self._has_noted = waits_long
            note = {"stand": asdict(stand), "doing": self._describe()} if waits_long else None
            self._board.post(_WAITING, note)

    def _answer(self, now: float) -> None:
        """Say what this process is doing while others wait, now and then."""
        if not self._has_noted and (self._busy_noted_at is None or now - self._busy_noted_at >= _NOTED_S):
            self._busy_noted_at = now
            self._board.post(_BUSY, self._describe())

    def _warn_of_long_wait(self, now: float, waiting: Mapping[int, Any]) -> None:
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        seconds = now - self._waiting_since + _NOTED_S
        if seconds < self._warns_after:
            return
        self._warns_after = seconds * _AGAIN
        doing = {index: note["doing"] for index, note in waiting.items()}
        busy = {index: what for index, what in self._board.read(_BUSY).items() if index not in waiting}
        for_whom = f"for {_list(busy)}" if busy else "for one another, or for the network"
        warn(f"waiting for {seconds:.0f} s {for_whom}: {_list(doing)}; training goes on when they meet")


def _list(doing: Mapping[int, str]) -> str:
    by_activity: dict[str, list[str]] = {}
    for index, what in sorted(doing.items()):
        by_activity.setdefault(what, []).append(str(index))
    return ", ".join(f"process {', '.join(indices)} in {what}" for what, indices in by_activity.items())
