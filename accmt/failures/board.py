"""Messages between processes that can be read while main threads wait in a collective."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from accmt.errors import explain
from accmt.libraries.private_names import open_store
from accmt.processes import gather_objects, process_index

_runs = itertools.count()


class Board:
    """Messages of all processes of one run, by topic, in the store of their rendezvous."""

    def __init__(self, store: Store, index: int, count: int) -> None:
        self.index = index
        self.count = count
        self._store = store
        self._seen = 0

    @classmethod
    def of_setup(cls, number: int) -> Board | None:
        """Open the board of a run that is being set up; None if the processes do not need to communicate.

        Args:
            number: How many runs this process has started before; the same on all processes.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        return cls._connect(f"accmt-setup-{number}")

    @classmethod
    def open(cls) -> Board:
        """Open the board of the next run.

        Processes: all, for the same runs in the same order.
        """
        return cls._connect(f"accmt-run-{next(_runs)}") if dist.is_initialized() else cls(HashStore(), 0, 1)

    @classmethod
    def _connect(cls, prefix: str) -> Board:
        return cls(PrefixStore(prefix, open_store()), dist.get_rank(), dist.get_world_size())

    def post(self, topic: str, note: Any) -> None:
        """Post a message, JSON values, for all processes."""
        self._store.set(f"{topic}/{self.index}", json.dumps(note))
        self._store.add("news", 1)

    def has_news(self) -> bool:
        """Return whether a message was posted since the last call."""
        before, self._seen = self._seen, self._store.add("news", 0)
        return self._seen > before

    def read(self, topic: str) -> dict[int, Any]:
        """Return the messages about a topic, by process."""
        posted = (index for index in range(self.count) if self._store.check([f"{topic}/{index}"]))
        return {index: json.loads(self._store.get(f"{topic}/{index}")) for index in posted}

    def draw_ticket(self) -> int:
        """Return a number that is higher than all previous ones on any process."""
        return int(self._store.add("tickets", 1))

    def beat(self) -> None:
        """Signal that this process is alive."""
        self._store.add(f"beat/{self.index}", 1)

    def beats_of(self, index: int) -> int:
        """Return one process's number of signals that it is alive."""
        return int(self._store.add(f"beat/{index}", 0))


# ---- Ending a run on several machines if one of them fails or becomes unreachable.
#
# A broken connection raises no error: a collective waits until torch's timeout, half an hour by default, and so does a
# request to the store, which is on one machine. Each machine's launcher monitors the processes there, so here the first
# process of each machine represents it.


LEFT = "left"
_TICK_S = 1.0
_LOOKS = 8  # per time limit: each requests every machine's state from the store once
_DO = 'start the run again on all machines: resume="auto" continues from the newest checkpoint'


@dataclass(frozen=True)
class Machine:
    """A machine of a run.

    Attributes:
        name: Its host name.
        processes: The indices of its processes.
    """

    name: str
    processes: tuple[int, ...]

    @property
    def first(self) -> int:
        """The index of its first process."""
        return self.processes[0]


def find_machines() -> list[Machine]:
    """Return the machines of a run, ordered by their first processes.

    Two machines of a launcher count as two even if they have the same name.

    Processes: collective.
    """
    own = socket.gethostname(), os.environ.get("GROUP_RANK")
    machines: dict[tuple[str, str | None], list[int]] = {}
    for index, name in enumerate(gather_objects(own)):
        machines.setdefault(name, []).append(index)
    return [Machine(name[0], tuple(indices)) for name, indices in machines.items()]


class SignsOfLife:
    """Ends this process if another machine sends no heartbeat for too long.

    Args:
        board: Where every process signals that it is alive.
        machines: The machines of the run.
        timeout_s: How long a machine may be silent.
        end: Ends this process, with a message.
    """

    def __init__(self, board: Board, machines: Sequence[Machine], timeout_s: float, end: Callable[[str], None]) -> None:
        self._board = board
        self._end = end
        self._timeout_s = timeout_s
        stands_for_one = any(machine.first == board.index for machine in machines)
        self._others = [machine for machine in machines if stands_for_one and machine.first != board.index]
        self._main = machines[0]
        self._last: dict[int, tuple[int, float]] = {}
        self._next_look = 0.0
        self._num_looks = 0
        self._is_over = threading.Event()
        self._guard = threading.Thread(target=self._guard_looks, name="accmt-machines", daemon=True)

    def start(self) -> None:
        self._guard.start()

    def leave(self) -> None:
        """Inform the others that this process is about to exit, so that its silence is no failure."""
        try:
            self._board.post(LEFT, note=True)
        except (RuntimeError, OSError):  # the process with the store has exited
            return
        finally:
            self._is_over.set()

    def look(self, now: float) -> None:
        """Check for signs of life if a check is due, and end this process if a machine is overdue."""
        self._num_looks += 1
        if now < self._next_look:
            return
        self._next_look = now + self._timeout_s / _LOOKS
        for machine in self._others:
            beats, (before, since) = self._board.beats_of(machine.first), self._last.get(machine.first, (0, now))
            if beats != before:
                self._last[machine.first] = beats, now
            elif beats > 0 and now - since > self._timeout_s and machine.first not in self._board.read(LEFT):
                self._end(self._describe(machine))

    def _guard_looks(self) -> None:
        """End this process if the checking thread gets no answer from the store.

        Counts its own ticks instead of time: while a process was suspended, neither thread has run.
        """
        seen, num_ticks = 0, 0
        while not self._is_over.wait(_TICK_S):
            num_ticks = num_ticks + 1 if self._num_looks == seen else 0
            seen = self._num_looks
            if num_ticks * _TICK_S > self._timeout_s:
                self._end(self._describe(self._main))

    def _describe(self, machine: Machine) -> str:
        where = f"process {process_index()} of a run on several machines"
        got = f"no heartbeat from {machine.name} (process {machine.first}) for {self._timeout_s:g} s"
        return explain(where, got, "a running machine that can be reached over the network", _DO)
