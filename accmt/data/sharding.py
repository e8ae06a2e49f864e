"""Which process trains on which samples: one global order, cut into global batches, each shared by all processes.

No sample is repeated to fill a batch: the last global batch is split as evenly as it goes, and a process may have no
part in it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """A process's place among those that share the data.

    Attributes:
        index: The process, from 0.
        count: How many share.
    """

    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Plan:
    """How many samples each round of an epoch has: a round is one batch on every process.

    Attributes:
        num_samples: Samples of the epoch over all processes.
        batch_size: Samples of a full batch of one process.
        share: This process.
    """

    num_samples: int
    batch_size: int
    share: Share

    @property
    def global_batch_size(self) -> int:
        """Samples of a full round."""
        return self.batch_size * self.share.count

    @property
    def num_rounds(self) -> int:
        """Rounds of an epoch, the last of which may be short."""
        return -(-self.num_samples // self.global_batch_size)

    def samples_in(self, first: int, last: int) -> int:
        """Return the samples, over all processes, of the rounds from `first` up to but without `last`."""
        return min(last * self.global_batch_size, self.num_samples) - first * self.global_batch_size

    def part(self, round_index: int) -> range:
        """Return the positions in the global order that this process has in a round; empty if it has none."""
        start = round_index * self.global_batch_size
        size = self.samples_in(round_index, round_index + 1)
        base, extra = divmod(size, self.share.count)
        begin = start + self.share.index * base + min(self.share.index, extra)
        return range(begin, begin + base + (self.share.index < extra))
