"""Loaders: where the rounds of an epoch come from, whatever the user gave.

`build_loader` chooses: a sized dataset is ordered and shared by us; a user's DataLoader keeps its batches; a stream is
read by every process, which keeps its share. None of them repeats a sample to fill a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler
from torch.utils.data.dataloader import default_collate

from accmt.data.batches import Round
from accmt.data.seeding import SeededDataset, derive_seed, seed_generators
from accmt.data.sharding import BatchShare, GlobalBatchSampler, Order, Plan, Share
from accmt.errors import DataError, explain


class Loader(Protocol):
    """Rounds of batches, epoch by epoch.

    Attributes:
        dataloader: The torch DataLoader underneath.
        num_rounds: Rounds of an epoch after limits; None for data without a length.
    """

    dataloader: DataLoader[Any]
    num_rounds: int | None

    def samples_in(self, first: int, last: int) -> int | None:
        """Return the samples of rounds `first` up to without `last` over all processes; None if unknown beforehand."""

    def rounds(self, epoch: int, first: int = 0) -> Iterator[Round]:
        """Yield the rounds of an epoch from `first` on; what is passed over is never read."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """What all loaders of a kind of data have in common.

    Attributes:
        purpose: "train", "validate", "test" or "predict"; keeps their randomness apart.
        batch_size: Samples of a batch of one process.
        share: This process among those that share the data.
        seed: The run's seed.
        limit: Rounds at most: a number, or a fraction as a float.
        shuffle: Whether the order is random.
        sampler: The user's sampler, or a function that makes one of the dataset.
        batch_sampler: The user's batch sampler.
        drop_last: Whether a round that is not full is left out.
        collate: Makes a batch of samples; None is torch's.
        num_workers: Loader processes.
        pin_memory: Whether batches are pinned.
    """

    purpose: str
    batch_size: int
    share: Share = field(default_factory=Share)
    seed: int = 0
    limit: int | float = 1.0
    shuffle: bool = False
    sampler: Any = None
    batch_sampler: Any = None
    drop_last: bool = False
    collate: Callable[[Any], Any] | None = None
    num_workers: int = 0
    pin_memory: bool = False

    def limit_rounds(self, num_rounds: int) -> int:
        """Return how many of an epoch's rounds are used; a fraction above 0 keeps at least one."""
        if isinstance(self.limit, float):
            return max(1, int(num_rounds * self.limit)) if self.limit > 0 else 0
        return min(self.limit, num_rounds)

    @property
    def torch_options(self) -> dict[str, Any]:
        """The DataLoader arguments that do not depend on the data."""
        return {
            "collate_fn": self.collate or default_collate,
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
            "persistent_workers": self.num_workers > 0,
        }


def build_loader(data: Any, options: LoaderOptions) -> Loader:
    """Build the loader that fits what the user gave.

    Args:
        data: A dataset (anything with `__len__` and `__getitem__`), an iterable dataset, or a DataLoader.
        options: Sizes, order and sharing.

    Raises:
        DataError: The data have no samples, or are of no such kind.
    """
    if isinstance(data, DataLoader):
        return _build_given_loader(data, options)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        if options.batch_sampler is not None:
            return BatchLoader(data, options.batch_sampler, options, options.torch_options)
        return SizedLoader(data, options)
    if hasattr(data, "__iter__"):
        return StreamLoader(data, options)
    raise DataError(
        explain(
            f"the {options.purpose} data",
            f"{type(data).__name__}",
            "a Dataset (with __len__ and __getitem__), an IterableDataset, a datasets.Dataset or a DataLoader",
            "pass one of these to fit",
        )
    )


def _require_samples(length: int, options: LoaderOptions) -> None:
    if length == 0:
        raise DataError(
            explain(
                f"the {options.purpose} data",
                "a dataset of length 0",
                "at least one sample",
                "look at the path or the filter that made it",
            )
        )


class SizedLoader:
    """Rounds of a dataset with a length, ordered and shared by (seed, epoch, position).

    Args:
        dataset: Anything with `__len__` and `__getitem__`.
        options: Sizes, order and sharing.

    Raises:
        DataError: The dataset, or what the sampler leaves of it, is empty.
    """

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        _require_samples(len(dataset), options)
        order = _build_order(dataset, options)
        num_samples = len(dataset) if options.sampler is None else len(order.at(0))
        _require_samples(num_samples, options)
        self.plan = Plan(num_samples, options.batch_size, options.share)
        rounds = self.plan.num_rounds
        if options.drop_last and num_samples % self.plan.global_batch_size:
            rounds -= 1
        self.num_rounds: int | None = options.limit_rounds(rounds)
        self._rounds = self.num_rounds
        self._sampler = GlobalBatchSampler(
            self.plan, order, seed=options.seed, purpose=options.purpose, num_rounds=self._rounds
        )
        self.dataloader: DataLoader[Any] = DataLoader(
            SeededDataset(dataset), batch_sampler=self._sampler, **options.torch_options
        )

    def samples_in(self, first: int, last: int) -> int | None:
        """Return the samples of rounds `first` up to without `last` over all processes."""
        return self.plan.samples_in(first, last)

    def rounds(self, epoch: int, first: int = 0) -> Iterator[Round]:
        """Yield the rounds of an epoch from `first` on; what is passed over is never read."""
        self._sampler.start_at(epoch, first)
        batches = iter(self.dataloader)
        share = self.plan.share
        for index in range(first, self._rounds):
            size, own = self.plan.samples_in(index, index + 1), len(self.plan.part(index))
            batch = next(batches) if own else None
            yield Round(index, batch, size, own, index == self._rounds - 1, size < share.count)


def _build_order(dataset: Any, options: LoaderOptions) -> Order:
    sampler = options.sampler
    if callable(sampler) and not isinstance(sampler, Sampler):
        sampler = sampler(dataset)
    return Order(len(dataset), options.seed, shuffle=options.shuffle, sampler=sampler)


class BatchLoader:
    """Rounds of batches that somebody else cuts: batch i of their order goes to process i mod processes.

    Args:
        dataset: Where the samples are.
        batches: The user's batch sampler, which has a length.
        options: Sharing, seed and limit.
        torch_options: The DataLoader arguments to use.
    """

    def __init__(self, dataset: Any, batches: Any, options: LoaderOptions, torch_options: dict[str, Any]) -> None:
        _require_samples(len(dataset), options)
        self._whole_rounds, rest = divmod(len(batches), options.share.count)
        self._has_part_in_last = options.share.index < rest
        self._rounds = options.limit_rounds(self._whole_rounds + bool(rest))
        self.num_rounds: int | None = self._rounds
        self._options = options
        self._sampler = BatchShare(
            batches, options.share, seed=options.seed, purpose=options.purpose, num_rounds=self._rounds
        )
        self.dataloader: DataLoader[Any] = DataLoader(
            SeededDataset(dataset), batch_sampler=self._sampler, **torch_options
        )

    def samples_in(self, first: int, last: int) -> int | None:
        """Return None: how many samples a user's batches hold is known only when they are there."""
        return None

    def rounds(self, epoch: int, first: int = 0) -> Iterator[Round]:
        """Yield the rounds of an epoch from `first` on; what is passed over is never read."""
        self._sampler.start_at(epoch, first)
        batches = iter(self.dataloader)
        for index in range(first, self._rounds):
            is_partial = index == self._whole_rounds
            batch = None if is_partial and not self._has_part_in_last else next(batches)
            yield Round(index, batch, is_last=index == self._rounds - 1, is_partial=is_partial)


class GivenLoader:
    """Rounds of a user's DataLoader that cannot be cut apart: every process reads all batches and keeps its own.

    Args:
        given: The user's DataLoader: over a stream, without automatic batches, or with batches without a length.
        options: Sharing, seed and limit.
    """

    def __init__(self, given: DataLoader[Any], options: LoaderOptions) -> None:
        self.dataloader = given
        self.num_rounds: int | None = None
        self._options = options

    def samples_in(self, first: int, last: int) -> int | None:
        """Return None: how many samples a user's batches hold is known only when they are there."""
        return None

    def rounds(self, epoch: int, first: int = 0) -> Iterator[Round]:
        """Yield the rounds of an epoch from `first` on, reading what comes before it too."""
        if hasattr(self.dataloader.dataset, "set_epoch"):
            self.dataloader.dataset.set_epoch(epoch)
        seed_generators(derive_seed(self._options.seed, self._options.purpose, epoch))
        rounds = _take(self._every_round(), self._options.limit)
        yield from _with_last_marked(round_ for round_ in rounds if round_.index >= first)

    def _every_round(self) -> Iterator[Round]:
        share, own, index = self._options.share, None, -1
        for index, batch in enumerate(self.dataloader):
            own = batch if index % share.count == share.index else own
            if index % share.count == share.count - 1:
                yield Round(index // share.count, own)
                own = None
        if (index + 1) % share.count:
            yield Round(index // share.count, own, is_partial=True)


def _build_given_loader(given: DataLoader[Any], options: LoaderOptions) -> Loader:
    if isinstance(given.sampler, DistributedSampler):  # shared already: not a second time
        options = replace(options, share=Share())
    if isinstance(given.dataset, IterableDataset) or not hasattr(given.batch_sampler, "__len__"):
        return GivenLoader(given, options)
    return BatchLoader(given.dataset, given.batch_sampler, options, _torch_options_of(given))


def _torch_options_of(given: DataLoader[Any]) -> dict[str, Any]:
    names = (
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "prefetch_factor",
        "persistent_workers",
    )
    return {name: getattr(given, name) for name in names} | {"multiprocessing_context": given.multiprocessing_context}


class _Stream(IterableDataset[Any]):
    """Makes a torch IterableDataset of anything that can be iterated."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


@dataclass
class _ShareCollate:
    """Collates this process's part of a global batch and tells how many samples the whole had."""

    plan_size: int
    share: Share
    collate: Callable[[Any], Any]

    def __call__(self, samples: list[Any]) -> tuple[Any, int]:
        part = Plan(len(samples), self.plan_size, self.share).part(0)
        own = samples[part.start : part.stop]
        return (self.collate(own) if own else None), len(samples)


class StreamLoader:
    """Rounds of data without a length: every process reads the stream and keeps its share of each global batch.

    So the order is defined, all processes end together, and each sample is trained on once.

    Args:
        data: An iterable dataset; `set_epoch` is called where it exists.
        options: Sizes and sharing.
    """

    def __init__(self, data: Any, options: LoaderOptions) -> None:
        torch_options = options.torch_options
        collate = _ShareCollate(options.batch_size, options.share, torch_options.pop("collate_fn"))
        stream = data if isinstance(data, IterableDataset) else _Stream(data)
        self.dataloader: DataLoader[Any] = DataLoader(
            stream,
            batch_size=options.batch_size * options.share.count,
            collate_fn=collate,
            drop_last=options.drop_last,
            **torch_options,
        )
        self.num_rounds: int | None = None
        self._data = data
        self._options = options

    def samples_in(self, first: int, last: int) -> int | None:
        """Return None: a stream tells its samples as they come."""
        return None

    def rounds(self, epoch: int, first: int = 0) -> Iterator[Round]:
        """Yield the rounds of an epoch from `first` on, reading what comes before it too."""
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)
        seed_generators(derive_seed(self._options.seed, self._options.purpose, epoch))
        rounds = _take(self._every_round(), self._options.limit)
        yield from _with_last_marked(round_ for round_ in rounds if round_.index >= first)

    def _every_round(self) -> Iterator[Round]:
        share = self._options.share
        for index, (batch, size) in enumerate(self.dataloader):
            own = len(Plan(size, self._options.batch_size, share).part(0))
            yield Round(index, batch, size, own, is_partial=size < share.count)


def _take(rounds: Iterator[Round], limit: int | float) -> Iterator[Round]:
    # A fraction of an unknown length is unknown too: only a number of batches limits a stream.
    return islice(rounds, limit) if isinstance(limit, int) else rounds


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
