"""Which process trains on which samples: one global order, cut into global batches, each shared by all processes.

No sample is repeated to fill a batch: the last global batch is split as evenly as it goes, and a process may have no
part in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler

from accmt.data.seeding import BatchIndices, derive_seed


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


class Order:
    """The global order of the samples, a pure function of (seed, epoch).

    Args:
        length: Samples of the dataset.
        seed: The run's seed.
        shuffle: Whether each epoch has a permutation of its own.
        sampler: Gives the order instead: an iterable of indices; `set_epoch` is called where it exists.
    """

    def __init__(self, length: int, seed: int, *, shuffle: bool, sampler: Iterable[int] | None = None) -> None:
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._sampler = sampler

    def at(self, epoch: int) -> torch.Tensor:
        """Return the order of `epoch` as a tensor of indices `[samples]`."""
        if self._sampler is not None:
            return self._from_sampler(self._sampler, epoch)
        if not self._shuffle:
            return torch.arange(self._length)
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "order", epoch))
        return torch.randperm(self._length, generator=generator)

    def _from_sampler(self, sampler: Iterable[int], epoch: int) -> torch.Tensor:
        reseed_sampler(sampler, self._seed, epoch)
        return torch.tensor(list(sampler), dtype=torch.long)


def reseed_sampler(sampler: Any, seed: int, epoch: int) -> None:
    """Make a user's sampler draw the same order on every process: a function of (seed, epoch).

    A generator of the sampler's own keeps its seed, mixed with the epoch; one without draws from torch's global
    generator.
    """
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        base = sampler.__dict__.setdefault("_accmt_initial_seed", generator.initial_seed())
        generator.manual_seed(derive_seed(base, "order", epoch))
    torch.default_generator.manual_seed(derive_seed(seed, "order", epoch))


class GlobalBatchSampler(Sampler[list[int]]):
    """Yields this process's part of each round of an epoch.

    Args:
        plan: Sizes of the rounds.
        order: The global order.
        seed: The run's seed.
        purpose: Tells training's randomness from validation's.
        num_rounds: Rounds to yield, after limits.
    """

    def __init__(self, plan: Plan, order: Order, *, seed: int, purpose: str, num_rounds: int) -> None:
        self._plan = plan
        self._order = order
        self._seed = seed
        self._purpose = purpose
        self._num_rounds = num_rounds
        self._epoch = 0
        self._first_round = 0

    def start_at(self, epoch: int, first_round: int) -> None:
        """Choose the epoch, and the round to begin with, of the next iteration."""
        self._epoch = epoch
        self._first_round = first_round

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order.at(self._epoch)
        for round_index in range(self._first_round, self._num_rounds):
            part = self._plan.part(round_index)
            if not part:
                return
            indices = BatchIndices(order[part.start : part.stop].tolist())
            indices.seed = derive_seed(self._seed, self._purpose, self._epoch, part.start)
            yield indices

    def __len__(self) -> int:
        last = self._num_rounds - 1
        return last + bool(self._plan.part(last)) if last >= 0 else 0


class BatchShare(Sampler[list[int]]):
    """Every `count`-th batch of a user's batch sampler, from this process's on.

    Args:
        batches: The user's batch sampler.
        share: This process.
        seed: The run's seed.
        purpose: Tells training's randomness from validation's.
        num_rounds: Rounds to yield, after limits.
    """

    def __init__(self, batches: Iterable[Any], share: Share, *, seed: int, purpose: str, num_rounds: int) -> None:
        self._batches = batches
        self._share = share
        self._seed = seed
        self._purpose = purpose
        self._num_rounds = num_rounds
        self._epoch = 0
        self._first_round = 0

    def start_at(self, epoch: int, first_round: int) -> None:
        """Choose the epoch, and the round to begin with, of the next iteration."""
        self._epoch = epoch
        self._first_round = first_round
        for sampler in (self._batches, getattr(self._batches, "sampler", None)):
            reseed_sampler(sampler, self._seed, epoch)

    def __iter__(self) -> Iterator[list[int]]:
        for index, batch in enumerate(self._batches):
            round_index, process = divmod(index, self._share.count)
            if round_index >= self._num_rounds:
                return
            if process == self._share.index and round_index >= self._first_round:
                indices = BatchIndices(batch)
                indices.seed = derive_seed(self._seed, self._purpose, self._epoch, index)
                yield indices
