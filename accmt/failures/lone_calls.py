"""Calls that need every process, such as saving the model, where only some of the processes make them."""

from __future__ import annotations

import contextlib
from typing import Any

from accmt.errors import ArgumentError, explain
from accmt.failures.board import Board

_WAITS_S = 6.0
_CALL, _BEHIND = "call", "behind"


class LoneCalls:
    """Finds a call that this process cannot reach, because it waits elsewhere for the process that made it.

    Without this, both would wait for ever: collectives have no names, so neither learns what the other is doing.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._made = 0
        self._newest: tuple[int, int, str] | None = None
        self._waits_since: float | None = None
        self._behind = 0

    def note(self, name: str) -> None:
        """Announce a call that the other processes have to make, too."""
        self._made += 1
        self._post(_CALL, {"number": self._made, "name": name})

    def read(self) -> None:
        """Read what the others have announced."""
        notes = self._board.read(_CALL)
        self._newest = max(((note["number"], index, note["name"]) for index, note in notes.items()), default=None)

    def find(self, now: float, *, waits: bool) -> ArgumentError | None:
        """Return the error about a call that only some processes make, if there is one."""
        if not waits or not self.are_open():
            self._waits_since = None
            return None
        self._waits_since = now if self._waits_since is None else self._waits_since
        if self._newest is None or now - self._waits_since < _WAITS_S:
            return None
        number, index, name = self._newest
        if self._behind != number:
            self._behind = number
            self._post(_BEHIND, number)
        # A third process may only be slow: then this one waits for that process, and will make the call as well.
        calls, behind = self._board.read(_CALL), self._board.read(_BEHIND)
        made = {other for other, note in calls.items() if note["number"] >= number}
        apart = {other for other, noted in behind.items() if noted == number} - made
        return _explain(name, index, self._board.index) if len(made | apart) == self._board.count else None

    def are_open(self) -> bool:
        """Return whether another process has made a call that this one has not."""
        return self._newest is not None and self._newest[0] > self._made

    def _post(self, topic: str, note: Any) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # the process with the store has exited
            self._board.post(topic, note)


def _explain(name: str, caller: int, other: int) -> ArgumentError:
    got = f"a call by process {caller}, while process {other} waits for it elsewhere"
    do = "call it outside `if trainer.is_main:` and the like; only the main process writes files anyway"
    return ArgumentError(explain(name, got, "the same call on every process", do))
