"""Loaders of data that can only be read from the start: every process reads all of it and keeps its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accmt.data.batches import Round
from accmt.data.options import LoaderOptions, length_of, require_rounds
from accmt.data.samplers import UserRandomness
from accmt.data.seeding import derive_seed, seed_generators
from accmt.data.sharding import Plan, Share
from accmt.errors import DataError, explain

_END = object()


class _ReadThroughLoader:
    """What the loaders below have in common.

    Args:
        dataloader: What is read.
        options: Seed, sharing and limit.
        num_rounds: Rounds of an epoch before limits; None if unknown.
        randomness: Of what draws while it is read.

    Raises:
        DataError: The limit is a fraction of an unknown length.
    """

    def __init__(
        self, dataloader: DataLoader[Any], options: LoaderOptions, num_rounds: int | None, randomness: UserRandomness
    ) -> None:
        self.dataloader = dataloader
        self.micro_batches = options.micro_batches
        self.num_rounds = _limit(num_rounds, options)
        self._options = options
        self._randomness = randomness

    def samples_in(self, first: int, last: int) -> int | None:
        """Return None: such data tell their samples as they come."""
        return None

    def rounds(self, epoch: int, first: int = 0) -> Iterator[Round]:
        """Yield the rounds of an epoch from `first` on, reading what comes before it too.

        Raises:
            DataError: There is none at all.
        """
        is_empty = self.num_rounds != 0
        with self._randomness.of_epoch(epoch):
            for round_ in _with_last_marked(islice(self._every_round(epoch), self.num_rounds)):
                is_empty = False
                if round_.index >= first:
                    yield round_
        got = "nothing to read (an iterator can be read only once: give something that begins anew)"
        require_rounds(not is_empty, self._options, got)

    def _every_round(self, epoch: int) -> Iterator[Round]:
        raise NotImplementedError

    def _read(self, epoch: int) -> Iterator[Any]:
        """Read what the DataLoader yields, each under a seed of its own: what trains in between changes nothing."""
        seed, purpose = self._options.seed, self._options.purpose
        seed_generators(derive_seed(seed, purpose, epoch))
        batches = iter(self.dataloader)
        for index in count():
            seed_generators(derive_seed(seed, purpose, epoch, index))
            batch = next(batches, _END)
            if batch is _END:
                return
            yield batch


def _limit(num_rounds: int | None, options: LoaderOptions) -> int | None:
    if num_rounds is not None:
        require_rounds(num_rounds, options, "a length of 0")
        return options.limit_rounds(num_rounds)
    if isinstance(options.limit, int):
        return options.limit * options.micro_batches
    if options.limit < 1.0:
        got = f"a limit of {options.limit}, a fraction of data without a length"
        do = "a limit such as 100, or __len__ for the data"
        raise DataError(explain(f"the {options.kind} data", got, "a whole number of batches", do))
    return None


def _with_last_marked(rounds: Iterator[Round]) -> Iterator[Round]:
    """Read one round ahead, so that the last one knows that it is."""
    held: Round | None = None
    for round_ in rounds:
        if held is not None:
            yield held
        held = round_
    if held is not None:
        held.is_last = True
        yield held


class StreamLoader(_ReadThroughLoader):
    """Rounds of an iterable: each process keeps its share of every global batch.

    So the order is defined, all processes end together, and each sample is trained on once. With more than one worker
    that is up to the dataset: as torch asks, each worker's copy of it has to yield its own part (`get_worker_info`).
    What is no torch IterableDataset cannot know of workers, and gets one at most.

    Args:
        data: The iterable; `set_epoch` is called where it exists.
        options: Sizes and sharing.

    Raises:
        DataError: The limit is a fraction of an unknown length.
    """

    def __init__(self, data: Any, options: LoaderOptions) -> None:
        if not isinstance(data, IterableDataset):
            options = replace(options, num_workers=min(options.num_workers, 1))
        self._batch_size, self._share = options.batch_size, options.share
        torch_options = options.torch_options(data)
        torch_options["persistent_workers"] = False  # each epoch's workers begin with the epoch's seed
        torch_options["collate_fn"] = _ShareCollate(options.batch_size, options.share, torch_options["collate_fn"])
        global_batch_size = options.batch_size * options.share.count
        dataloader: DataLoader[Any] = DataLoader(
            data if isinstance(data, IterableDataset) else _Iterable(data),
            batch_size=global_batch_size,
            drop_last=options.drop_last,
            **torch_options,
        )
        super().__init__(dataloader, options, _count_rounds(data, global_batch_size, options), UserRandomness(data))

    def _every_round(self, epoch: int) -> Iterator[Round]:
        for index, (batch, size) in enumerate(self._read(epoch)):
            own = len(Plan(size, self._batch_size, self._share).part(0))
            yield Round(index, batch, size, own, is_partial=size < self._share.count)


def _count_rounds(data: Any, global_batch_size: int, options: LoaderOptions) -> int | None:
    samples = length_of(data)
    if samples is None or options.num_workers > 1:  # workers may each end with a short batch
        return None
    return samples // global_batch_size if options.drop_last else -(-samples // global_batch_size)


class _Iterable(IterableDataset[Any]):
    """Makes a torch IterableDataset of anything that can be iterated."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


@dataclass
class _ShareCollate:
    """Collates this process's part of a global batch and tells how many samples the whole had."""

    batch_size: int
    share: Share
    collate: Callable[[Any], Any]

    def __call__(self, samples: list[Any]) -> tuple[Any, int]:
        part = Plan(len(samples), self.batch_size, self.share).part(0)
        own = samples[part.start : part.stop]
        return (self.collate(own) if own else None), len(samples)


class GivenLoader(_ReadThroughLoader):
    """Rounds of a user's DataLoader that cannot be cut apart: batch i goes to process i mod processes.

    Args:
        given: The user's DataLoader: over a stream, without automatic batches, with batches without a length, or of a
            class that iterates in its own way.
        options: Sharing, seed and limit.

    Raises:
        DataError: The limit is a fraction of an unknown length.
    """

    def __init__(self, given: DataLoader[Any], options: LoaderOptions) -> None:
        self._share = options.share
        num_batches = None if isinstance(given.dataset, IterableDataset) and given.num_workers > 1 else length_of(given)
        num_rounds = None if num_batches is None else -(-num_batches // options.share.count)
        super().__init__(given, options, num_rounds, UserRandomness(given, given.dataset, given.batch_sampler))

    def _every_round(self, epoch: int) -> Iterator[Round]:
        batches = self._read(epoch)
        for index in count():
            of_round = list(islice(batches, self._share.count))
            if not of_round:
                return
            own = of_round[self._share.index] if self._share.index < len(of_round) else None
            yield Round(index, own, is_partial=len(of_round) < self._share.count)
