"""Which process computes which unit of a batch, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from accmt.data import MicroBatch, Shard, Source, Window
from accmt.data.samplers import Part, Plan


class Layout(NamedTuple):
    """How the units of a batch are divided among the processes, each of which computes one in each round.

    Attributes:
        num_units: The units of a batch.
        is_interleaved: Whether neighboring units belong to different processes, because their gradients are added up
            over the processes after each round. Otherwise, a process has neighboring units, and adds up its own first.
    """

    num_units: int
    is_interleaved: bool

    def rounds(self, num_processes: int) -> int:
        """Return the number of rounds of a batch."""
        return self.num_units // num_processes

    def unit(self, rank: int, round_index: int, num_processes: int) -> int:
        """Return the unit that a process computes in a round."""
        if self.is_interleaved:
            return round_index * num_processes + rank
        return rank * self.rounds(num_processes) + round_index


@dataclass(frozen=True)
class UnitPlan(Plan):
    """The plan of an epoch whose micro-batches are units, and whose indices count the units of all processes.

    The last batch of an epoch may have fewer units, and its last unit fewer samples: the same on any number of
    processes, some of which then have none.

    Attributes:
        layout: How units are divided.
    """

    layout: Layout = Layout(1, is_interleaved=True)

    @property
    def global_batch_size(self) -> int:
        return self.batch_size

    @property
    def samples_together(self) -> int:
        return self.batch_size * self.layout.num_units

    def local_indices(self, index: int) -> range:
        for part in self.cut(index - (index - self.first_micro_batch) % self.layout.num_units):
            if part.number == index:
                return part.own
        return range(0)

    def count(self, first: int) -> int:
        return sum(1 for part in self.cut(first) if part.own)

    def cut(self, first: int) -> Iterator[Part]:
        layout, rank, count = self.layout, self.shard.index, self.shard.count
        for batch in range(first, self.num_micro_batches, layout.num_units):
            num_units = min(layout.num_units, self.num_micro_batches - batch)
            num_rounds = 0
            while num_rounds < layout.rounds(count) and layout.unit(0, num_rounds, count) < num_units:
                num_rounds += 1
            start = self.samples_before(batch)
            for round_index in range(num_rounds):
                units = [layout.unit(process, round_index, count) for process in range(count)]
                ranges = [self._samples_of(batch, unit, num_units) for unit in units]
                stop = start + sum(map(len, ranges))
                is_last = round_index == num_rounds - 1
                yield Part(
                    batch + round_index,
                    range(start, stop),
                    ranges[rank],
                    is_partial=not all(ranges),
                    num_finished=num_units - round_index if is_last else 1,
                    ends_batch=is_last,
                    unit=ranges[rank].start,
                )
                start = stop

    def _samples_of(self, batch: int, unit: int, num_units: int) -> range:
        if unit >= num_units:
            return range(0)
        return range(self.samples_before(batch + unit), self.samples_before(batch + unit + 1))


class ByUnits:
    """Makes windows of a number of batches that are computed in units.

    Args:
        layout: How units are divided.
        num_processes: The processes that divide them.
        batches_per_step: Returns the batches per optimizer step, by epoch.
    """

    keeps_batches = True

    def __init__(self, layout: Layout, num_processes: int, batches_per_step: Callable[[int], int | None]) -> None:
        self._layout = layout
        self._rounds = layout.rounds(num_processes)
        self._num_processes = num_processes
        self._batches_per_step = batches_per_step

    def units_of_rounds(self) -> list[list[int]]:
        """Return, for each round of a batch, the unit that each process computes."""
        ranks = range(self._num_processes)
        return [[self._layout.unit(rank, number, len(ranks)) for rank in ranks] for number in range(self._rounds)]

    def windows(self, source: Source, epoch: int, first: int) -> Iterator[Window]:
        """Yield the windows of an epoch, starting with that of micro-batch `first`."""
        number = self._batches_per_step(epoch) or 1
        micro_batches = source.micro_batches(epoch, first)
        for begin in micro_batches:
            end = begin.index + number * self._layout.num_units
            if source.num_micro_batches is not None:
                end = min(end, source.num_micro_batches)
            num_samples = source.samples_in(begin.index, end)
            yield Window(_until(begin, micro_batches, end), number * self._rounds, num_samples)

    def groups(self, batches: Iterable[MicroBatch], epoch: int, *, per_batch: int = 1) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each optimizer step."""
        number = (self._batches_per_step(epoch) or 1) * self._layout.num_units
        group: list[MicroBatch] = []
        for micro_batch in batches:
            group.append(micro_batch)
            if micro_batch.index + micro_batch.num_finished >= group[0].index + number or micro_batch.is_last:
                yield group
                group = []


def _until(begin: MicroBatch, following: Iterator[MicroBatch], end: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches before an index; nothing is read after the last one."""
    micro_batch = begin
    while True:
        yield micro_batch
        if micro_batch.index + micro_batch.num_finished >= end or micro_batch.is_last:
            return
        micro_batch = next(following)


def unit_plan(layout: Layout) -> Callable[[int, int, Shard], UnitPlan]:
    """Return the function that plans epochs in units."""

    def plan(num_samples: int, batch_size: int, shard: Shard) -> UnitPlan:
        return UnitPlan(num_samples, batch_size, shard, layout=layout)

    return plan
