"""Which process trains on which samples: one global order, cut into global batches, each shared by all processes.

No sample is repeated to fill a batch: the last global batch is split as evenly as it goes, and a process may have no
part in it. An epoch that goes on after an interruption keeps its count of rounds, and is cut anew from the first sample
that was not trained on: by another number of processes too.
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
        num_samples: Samples of the epoch over all processes, those before `first_round` included.
        batch_size: Samples of a full batch of one process.
        share: This process.
        first_round: The round with which the plan begins; those before it were another plan's.
        first_sample: The position in the global order with which it begins.
    """

    num_samples: int
    batch_size: int
    share: Share
    first_round: int = 0
    first_sample: int = 0

    @property
    def global_batch_size(self) -> int:
        """Samples of a full round."""
        return self.batch_size * self.share.count

    @property
    def num_rounds(self) -> int:
        """Rounds of the epoch, those before `first_round` included; the last may be short."""
        return self.first_round - (self.first_sample - self.num_samples) // self.global_batch_size

    def samples_before(self, round_index: int) -> int:
        """Return the position in the global order at which a round begins; that of the end for rounds after it."""
        start = self.first_sample + (round_index - self.first_round) * self.global_batch_size
        return min(start, self.num_samples)

    def samples_in(self, first: int, last: int) -> int:
        """Return the samples, over all processes, of the rounds from `first` up to but without `last`."""
        return self.samples_before(last) - self.samples_before(first)

    def whole(self, round_index: int) -> range:
        """Return the positions in the global order that all processes have in a round."""
        return range(self.samples_before(round_index), self.samples_before(round_index + 1))

    def part(self, round_index: int) -> range:
        """Return the positions in the global order that this process has in a round; empty if it has none."""
        return self.share_of(self.whole(round_index))

    def share_of(self, whole: range) -> range:
        """Return this process's part of a round's positions."""
        index, count = self.share.index, self.share.count
        base, extra = divmod(len(whole), count)
        begin = whole.start + index * base + min(index, extra)
        return range(begin, begin + base + (index < extra))
