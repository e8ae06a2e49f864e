"""Which process trains on which samples: one global order, cut into global batches, each sharded over all processes.

No sample is repeated to fill a batch: the last global batch is split as evenly as possible, and a process may get none
of it. An epoch that is resumed keeps its count of micro-batches, and is cut again from the first sample that was not
trained on, also by another number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Which part of the data a process gets: number `index` of `count`."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Plan:
    """Which positions of the global order each micro-batch of an epoch has.

    Attributes:
        num_samples: Samples of the epoch over all processes, those before `first_sample` included.
        batch_size: Samples of a full batch of one process.
        shard: This process.
        first_micro_batch: The micro-batch with which the plan begins; those before it were part of another plan.
        first_sample: The position in the global order with which it begins.
    """

    num_samples: int
    batch_size: int
    shard: Shard
    first_micro_batch: int = 0
    first_sample: int = 0

    @property
    def global_batch_size(self) -> int:
        """Samples of a full micro-batch on all processes."""
        return self.batch_size * self.shard.count

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the epoch, those before the plan included; the last may be short."""
        return self.first_micro_batch - (self.first_sample - self.num_samples) // self.global_batch_size

    def samples_before(self, index: int) -> int:
        """Return the position in the global order at which a micro-batch begins, or that of the end."""
        start = self.first_sample + (index - self.first_micro_batch) * self.global_batch_size
        return min(start, self.num_samples)

    def samples_in(self, first: int, last: int) -> int:
        """Return the number of samples, over all processes, of the micro-batches [first, last)."""
        return self.samples_before(last) - self.samples_before(first)

    def local_indices(self, index: int) -> range:
        """Return the positions in the global order that a micro-batch has on this process; empty if there are none."""
        return next(self.cut(range(index, index + 1)))[1]

    def cut(self, indices: range) -> Iterator[tuple[range, range]]:
        """Yield for each of these micro-batches its positions in the global order: on all processes, and on this one.

        In one frame, because it runs for each micro-batch twice: where it is fetched, and where it is trained on.
        """
        size, own, count = self.global_batch_size, self.shard.index, self.shard.count
        for index in indices:
            start = min(self.first_sample + (index - self.first_micro_batch) * size, self.num_samples)
            stop = min(start + size, self.num_samples)
            base, extra = divmod(stop - start, count)
            begin = start + own * base + min(own, extra)
            yield range(start, stop), range(begin, begin + base + (own < extra))
