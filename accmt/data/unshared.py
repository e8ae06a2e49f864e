"""Rounds of data that every process has for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from accmt.data.batches import Round
from accmt.data.options import Loader
from accmt.processes import gather_objects, num_processes, sum_over_processes


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
        lengths = gather_objects(own.num_rounds)
        self.num_rounds = None if None in lengths else max(length or 0 for length in lengths)
        self._own = own
        self._device = device

    def samples_in(self, first: int, last: int) -> int | None:
        """Return None: a process knows of its own samples only."""
        return None

    def rounds(self, epoch: int, first: int = 0) -> Iterator[Round]:
        """Yield the rounds of an epoch from `first` on, until no process has a batch."""
        own = self._own.rounds(epoch, first)
        ahead = next(own, None)
        num_present = self._count(ahead)
        index = first
        while num_present:
            current, ahead = ahead, next(own, None)
            num_following = self._count(ahead)
            batch, samples = (None, 0) if current is None else (current.batch, current.own_samples)
            yield Round(index, batch, None, samples, num_following == 0, num_present < num_processes())
            num_present = num_following
            index += 1

    def _count(self, round_: Round | None) -> int:
        return int(sum_over_processes((float(round_ is not None),), self._device)[0])
