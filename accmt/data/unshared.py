"""Rounds of data that every process has for itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from accmt.data.batches import Round
from accmt.data.options import Loader
from accmt.errors import DataError, explain
from accmt.processes import gather_objects, num_processes, process_index, sum_over_processes

_KIND = "part of each process"


class UnsharedLoader:
    """Lets processes with data of their own, of unequal length, end their epochs together.

    Each tells one batch ahead whether it has another; one at its end has no part in the rounds of the others.

    Processes: collective.

    Args:
        own: This process's loader.
        device: Where processes can add up.
    """

    def __init__(self, own: Loader, device: torch.device) -> None:
        self.dataloader: DataLoader[Any] = own.dataloader
        self.micro_batches = own.micro_batches
        self._own = own
        self._device = device
        self._measure()

    def samples_in(self, first: int, last: int) -> int | None:
        """Return None: a process knows of its own samples only."""
        return None

    def rounds(self, epoch: int, first: int = 0) -> Iterator[Round]:
        """Yield the rounds of an epoch from `first` on, until no process has a batch."""
        own = self._own.rounds(epoch, first)
        ahead = next(own, None)
        self._measure()
        num_present = self._count(ahead)
        index = first
        while num_present:
            current, ahead = ahead, next(own, None)
            num_following = self._count(ahead)
            batch, samples = (None, 0) if current is None else (current.batch, current.own_samples)
            yield Round(index, batch, None, samples, num_following == 0, num_present < num_processes())
            num_present = num_following
            index += 1

    def position(self, epoch: int, num_rounds: int) -> dict[str, Any]:
        """Return where the data of each process are after `num_rounds` rounds of an epoch.

        Processes: collective.
        """
        return {"kind": _KIND, "positions": gather_objects(self._own.position(epoch, num_rounds))}

    def continue_from(self, epoch: int, first_round: int, position: Mapping[str, Any]) -> None:
        """Let `epoch` go on from a position.

        Processes: collective.

        Raises:
            DataError: The position is one in other data, or of another number of processes.
        """
        own: Mapping[str, Any] = {}
        if first_round > 0:
            own = _require_positions(position)[process_index()]
        self._own.continue_from(epoch, first_round, own)
        self._measure()

    def _measure(self) -> None:
        lengths = gather_objects(self._own.num_rounds)
        self.num_rounds = None if None in lengths else max(length or 0 for length in lengths)

    def _count(self, round_: Round | None) -> int:
        return int(sum_over_processes((float(round_ is not None),), self._device)[0])


def _require_positions(position: Mapping[str, Any]) -> list[dict[str, Any]]:
    positions: list[dict[str, Any]] = position.get("positions", [])
    if len(positions) != num_processes():
        got = f"{num_processes()} processes, and a position with the data of {len(positions)}"
        expected = "as many processes as before: each has data of its own, which no other can go on with"
        do = "continue on the same number of processes, with shard_dataloaders as it was"
        raise DataError(explain("the data of each process, within an epoch that goes on", got, expected, do))
    return positions
