"""Where another machine shows no sign of life for too long, a process ends itself."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from accmt.addons.machines import Machine, SignsOfLife, find_machines
from accmt.failures import Board

MACHINES = [Machine("here", (0, 1)), Machine("there", (2, 3)), Machine("beyond", (4,))]


class Hosts:
    """Six processes on three machines, of which one looks after the others."""

    def __init__(self, index: int) -> None:
        store = HashStore()
        self.boards = [Board(store, number, 6) for number in range(6)]
        self.said: list[str] = []
        self.signs = SignsOfLife(self.boards[index], MACHINES, 8.0, self.said.append)

    def pass_time(self, first: int, last: int, *beating: int) -> list[str]:
        """Look once a second; some processes show that they are alive."""
        for now in range(first, last):
            for index in beating:
                self.boards[index].beat()
            self.signs.look(float(now))
        said, self.said[:] = list(self.said), []
        return said


def test_a_machine_that_falls_silent_ends_the_run_on_the_others_and_is_named() -> None:
    hosts = Hosts(0)
    assert hosts.pass_time(0, 20, 2, 4) == []
    assert hosts.pass_time(20, 27, 2) == [], "within the limit"
    said = hosts.pass_time(27, 30, 2)[0]
    assert "process 0 of a run on several machines" in said
    assert "got: no heartbeat from beyond (process 4) for 8 s" in said
    assert "do: start the run again on all machines" in said


def test_each_machine_is_asked_of_by_one_process_and_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    ask = Board.beats_of

    def note(board: Board, index: int) -> int:
        asked.append((board.index, index))
        return ask(board, index)

    monkeypatch.setattr(Board, "beats_of", note)
    for index in range(6):
        hosts = Hosts(index)
        for tenth in range(80):
            hosts.signs.look(tenth / 10)
    assert set(asked) == {(0, 2), (0, 4), (2, 0), (2, 4), (4, 0), (4, 2)}
    assert len(asked) == 6 * 8


def test_a_machine_that_has_not_begun_or_has_left_is_not_waited_for() -> None:
    hosts = Hosts(0)
    assert hosts.pass_time(0, 60, 2) == [], "the last one still builds its model"
    left = SignsOfLife(hosts.boards[2], MACHINES, 8.0, hosts.said.append)
    left.leave()
    assert hosts.pass_time(60, 120, 4) == []


class Ticking(threading.Event):
    """An event that is never set, and whose waits pass at once, a number of times."""

    def __init__(self, num_ticks: int, at_tick: Callable[[], Any]) -> None:
        super().__init__()
        self._left, self._at_tick = num_ticks, at_tick

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout == 1.0
        self._left -= 1
        self._at_tick()
        return self._left < 0


@pytest.mark.parametrize(("num_ticks", "looks", "ends"), [(8, False, 0), (9, False, 1), (100, True, 0)])
def test_a_process_that_gets_no_answer_from_the_store_ends(num_ticks: int, looks: bool, ends: int) -> None:
    hosts = Hosts(3)  # not the first of its machine: the store may be silent for each
    hosts.signs._is_over = Ticking(num_ticks, lambda: hosts.signs.look(0.0) if looks else None)
    hosts.signs._guard_looks()
    assert len(hosts.said) == ends
    assert all("no heartbeat from here (process 0) for 8 s" in said for said in hosts.said)


def test_leaving_ends_the_guard_also_where_the_store_is_gone() -> None:
    class Gone(HashStore):
        def set(self, *_: Any) -> None:
            raise RuntimeError("the process with the store has exited")

    signs = SignsOfLife(Board(Gone(), 1, 2), MACHINES[:2], 8.0, lambda _: None)
    signs.start()
    signs.leave()
    signs._guard.join(10)
    assert not signs._guard.is_alive()


def test_machines_are_told_apart_by_name_and_by_what_the_launcher_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    own = socket.gethostname()
    assert find_machines() == [Machine(own, (0,))]
    names = [("a", "0"), ("a", "0"), ("b", "1"), ("b", "2"), ("a", "0")]
    monkeypatch.setattr("accmt.addons.machines.gather_objects", lambda value: names)
    assert find_machines() == [Machine("a", (0, 1, 4)), Machine("b", (2,)), Machine("b", (3,))]
