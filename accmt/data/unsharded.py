"""Micro-batches of unsharded data: every process has its own data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from accmt.data.base import Source
from accmt.data.batches import MicroBatch
from accmt.errors import DataError, explain
from accmt.processes import gather_objects, num_processes, process_index, sum_over_processes

_KIND = "part of each process"


class _Sums(NamedTuple):
    """Sums over the processes for one micro-batch."""

    not_ended: int  # processes with more data
    batches: int  # processes with a batch; all samples of a batch may have been skipped
    bad: int  # skipped samples


class UnshardedSource:
    """Lets processes with separate data of unequal length end their epochs together.

    They agree one batch ahead which of them have another; a process without data has no batch in a micro-batch.

    Processes: collective.
    """

    def __init__(self, own: Source) -> None:
        self.dataloader: DataLoader[Any] = own.dataloader
        self.micro_batches_per_batch = own.micro_batches_per_batch
        self.shard = own.shard
        self._own = own
        self._measure()

    def samples_in(self, first: int, last: int) -> int | None:
        return None  # a process only knows its own

    def micro_batches(self, epoch: int, first: int = 0) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch from `first` on, until no process has a batch."""
        own = self._own.micro_batches(epoch, first)
        ahead = next(own, None)
        self._measure()
        # One exchange per micro-batch: the sums of the next one also show whether this one is the last.
        following = self._sum(ahead)
        index = first
        while following.not_ended:
            part = ahead or MicroBatch(index, None, own_samples=0)
            now, ahead = following, next(own, None)
            following = self._sum(ahead)
            is_last, is_partial = following.not_ended == 0, now.batches < num_processes()
            yield MicroBatch(
                index, part.batch, None, part.own_samples, is_last, is_partial, bad=part.bad, num_bad=now.bad
            )
            index += 1

    def samples_of(self, epoch: int, index: int) -> list[int] | None:
        return self._own.samples_of(epoch, index)

    def set_epoch_again(self) -> None:
        self._own.set_epoch_again()

    def end_workers(self) -> None:
        self._own.end_workers()

    def position(self, epoch: int, num_micro_batches: int) -> dict[str, Any]:
        return {"kind": _KIND, "positions": gather_objects(self._own.position(epoch, num_micro_batches))}

    def resume_from(self, epoch: int, first_micro_batch: int, position: Mapping[str, Any]) -> None:
        own: Mapping[str, Any] = {}
        if first_micro_batch > 0:
            own = _require_positions(position)[process_index()]
        self._own.resume_from(epoch, first_micro_batch, own)
        self._measure()

    def _measure(self) -> None:
        lengths = gather_objects(self._own.num_micro_batches)
        self.num_micro_batches = None if None in lengths else max(length or 0 for length in lengths)

    def _sum(self, micro_batch: MicroBatch | None) -> _Sums:
        own = (0, 0, 0) if micro_batch is None else (1, micro_batch.batch is not None, micro_batch.num_bad)
        return _Sums(*map(int, sum_over_processes(own)))


def _require_positions(position: Mapping[str, Any]) -> list[dict[str, Any]]:
    positions: list[dict[str, Any]] = position.get("positions", [])
    if len(positions) != num_processes():
        got = f"{num_processes()} processes, but the position is of {len(positions)}"
        expected = "the same number of processes as before: each has its own data, which no other can resume"
        do = "resume on the same number of processes, with the same shard_dataloaders"
        raise DataError(explain("the data of each process in a resumed epoch", got, expected, do))
    return positions
