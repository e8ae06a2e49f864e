"""Messages between processes that can be read while main threads wait in a collective."""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from accmt.libraries.private_names import open_store

_runs = itertools.count()


LEFT = "left"
"""The topic of processes that have left in order."""


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
        if not dist.is_initialized():
            return cls(HashStore(), 0, 1)
        return cls._connect(f"accmt-run-{next(_runs)}")  # one store for all runs of a program

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
        notes = {}
        for index in range(self.count):
            if self._store.check([f"{topic}/{index}"]):  # `get` would wait for a message
                notes[index] = json.loads(self._store.get(f"{topic}/{index}"))
        return notes

    def draw_ticket(self) -> int:
        """Return a number that is higher than all previous ones on any process."""
        return int(self._store.add("tickets", 1))

    def beat(self) -> None:
        """Signal that this process is alive."""
        self._store.add(f"beat/{self.index}", 1)

    def beats_of(self, index: int) -> int:
        """Return one process's number of signals that it is alive."""
        return int(self._store.add(f"beat/{index}", 0))
