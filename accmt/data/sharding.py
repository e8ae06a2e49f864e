"""Which process trains on which samples: one global order, cut into global batches, each shared by all processes.

No sample is repeated to fill a batch: the last global batch is split as evenly as it goes, and a process may have no
part in it. An epoch that is resumed keeps its count of micro-batches, and is cut again from the first sample that was
not trained on: by another number of processes too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """A process's place among those that share the data.

    Attributes:
        index: The process, from 0.
        count: How many there are.
    """

    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Plan:
    """How many samples each micro-batch of an epoch has: a micro-batch is one batch on every process.

    Attributes:
        num_samples: Samples of the epoch over all processes, those before `first_micro_batch` included.
        batch_size: Samples of a full batch of one process.
        shard: This process.
        first_micro_batch: The micro-batch with which the plan begins; those before it were another plan's.
        first_sample: The position in the global order with which it begins.
    """

    num_samples: int
    batch_size: int
    shard: Shard
    first_micro_batch: int = 0
    first_sample: int = 0

    @property
    def global_batch_size(self) -> int:
        """Samples of a full micro-batch."""
        return self.batch_size * self.shard.count

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the epoch, those before `first_micro_batch` included; the last may be short."""
        return self.first_micro_batch - (self.first_sample - self.num_samples) // self.global_batch_size

    def samples_before(self, index: int) -> int:
        """Return the position in the global order at which a micro-batch begins, or that of the end."""
        start = self.first_sample + (index - self.first_micro_batch) * self.global_batch_size
        return min(start, self.num_samples)

    def samples_in(self, first: int, last: int) -> int:
        """Return the samples, over all processes, of the micro-batches from `first` up to but without `last`."""
        return self.samples_before(last) - self.samples_before(first)

    def global_indices(self, index: int) -> range:
        """Return the positions in the global order that all processes have in a micro-batch."""
        return range(self.samples_before(index), self.samples_before(index + 1))

    def local_indices(self, index: int) -> range:
        """Return the positions in the global order that this process has in a micro-batch; empty if it has none."""
        return self.local_part(self.global_indices(index))

    def local_part(self, whole: range) -> range:
        """Return this process's part of a micro-batch's positions."""
        index, count = self.shard.index, self.shard.count
        base, extra = divmod(len(whole), count)
        begin = whole.start + index * base + min(index, extra)
        return range(begin, begin + base + (index < extra))
