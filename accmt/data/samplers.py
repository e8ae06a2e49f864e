"""Which samples an epoch has, and in which order: our order, a user's sampler, a user's batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
import xxhash
from torch.utils.data import BatchSampler, DataLoader, Sampler

from accmt.data.seeding import (
    BatchIndices,
    derive_seed,
    find_generators,
    reseed,
    seeded_generators,
    state_of,
    user_seed,
)
from accmt.errors import ArgumentError, DataError, explain
from accmt.processes import broadcast_object

# ---- Which process trains on which samples: one global order, cut into global batches, each sharded over all
# processes.
#
# No sample is repeated to fill a batch: the last global batch is split as evenly as possible, and a process may get
# none of it. An epoch that is resumed keeps its count of micro-batches, and is cut again from the first sample that was
# not trained on, also by another number of processes.


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


T = TypeVar("T")


def call_set_epoch(part: Any, epoch: int) -> None:
    """Call `set_epoch` where it exists."""
    if hasattr(part, "set_epoch"):
        part.set_epoch(epoch)


def is_user_class(sampler: Any) -> bool:
    """Return whether a sampler, or the one inside a batch sampler, is of the user's own class."""
    if type(sampler) is BatchSampler:
        return is_user_class(sampler.sampler)
    return type(sampler).__module__.partition(".")[0] not in ("torch", "accmt", "builtins")


class UserRandomness:
    """Makes whatever of the user's may draw (samplers, datasets) draw the same on every process, by (seed, epoch).

    `set_epoch` is called where it exists. A generator of their own keeps the user's seed, that of the main process, and
    is left as it was found; samplers without one draw from the global generators.

    Processes: construction is collective where there is a generator.
    """

    def __init__(self, *parts: Any) -> None:
        inner = [getattr(part, "sampler", None) for part in parts]
        self._parts = [part for part in (*parts, *inner) if part is not None]
        named = [getattr(part, "generator", None) for part in self._parts]
        held = find_generators(
            *(part for part in self._parts if not isinstance(part, DataLoader)), through_streams=True
        )
        generators = dict.fromkeys([*(g for g in named if isinstance(g, torch.Generator)), *held])
        self._seeds = {generator: broadcast_object(user_seed(generator)) for generator in generators}

    def call_set_epoch(self, epoch: int) -> None:
        for part in self._parts:
            call_set_epoch(part, epoch)

    @contextmanager
    def of_epoch(self, epoch: int) -> Iterator[None]:
        """Let the samplers draw for `epoch`."""
        self.call_set_epoch(epoch)
        states = [state_of(generator) for generator in self._seeds]
        for generator, seed in self._seeds.items():
            reseed(generator, derive_seed(seed, "order", epoch))
        try:
            yield
        finally:
            for give_back in states:
                give_back()


class TensorSampler(Sampler[int]):
    """A sampler that draws an epoch's indices as one tensor: a list of millions would cost seconds."""

    def draw(self) -> torch.Tensor:
        """Draw the indices of an epoch from torch's generator."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw().tolist())


class UserSampler(Generic[T]):
    """What a user's sampler draws for an epoch: once, before any is read, so that no training in between changes it."""

    def __init__(self, sampler: Iterable[Any], seed: int, read: Callable[[Iterable[Any]], T]) -> None:
        self._sampler = sampler
        self._seed = seed
        self._read = read
        self._randomness = UserRandomness(sampler)
        self._drawn: tuple[int, T] | None = None

    def at(self, epoch: int) -> T:
        if self._drawn is None or self._drawn[0] != epoch:
            with self._randomness.of_epoch(epoch), seeded_generators(derive_seed(self._seed, "order", epoch)):
                self._drawn = epoch, self._read(self._sampler)
        return self._drawn[1]


class Order:
    """The global order of the samples, a pure function of (seed, epoch, length).

    Args:
        length: Samples of the dataset; may change between epochs.
        seed: The run's seed.
        shuffle: Whether each epoch has a permutation of its own.
        sampler: Draws the order instead: an iterable of indices.
    """

    def __init__(self, length: int, seed: int, *, shuffle: bool = False, sampler: Iterable[int] | None = None) -> None:
        self.length = length
        self._seed = seed
        self._shuffle = shuffle
        self._drawn = None if sampler is None else UserSampler(sampler, seed, _read_indices)
        self._digest: tuple[int, int, str] | None = None

    def digest(self, epoch: int) -> str:
        if self._digest is None or self._digest[:2] != (epoch, self.length):
            self._digest = epoch, self.length, _digest(self.at(epoch))
        return self._digest[2]

    def size(self, epoch: int) -> int:
        return self.length if self._drawn is None else len(self._drawn.at(epoch))

    def num_samples(self, epoch: int | None, positions: range) -> int | None:
        return len(positions)

    def at(self, epoch: int) -> torch.Tensor:
        """Return the order of `epoch` as a tensor of indices `[samples]`."""
        if self._drawn is not None:
            return self._drawn.at(epoch)
        if not self._shuffle:
            return torch.arange(self.length)
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "order", epoch))
        return torch.randperm(self.length, generator=generator)


class Batches:
    """The batches of an epoch: the indices of all batches in one tensor, where each begins, and where the last ends."""

    def __init__(self, indices: torch.Tensor, starts: torch.Tensor) -> None:
        self.starts: list[int] = starts.tolist()
        self.digest = _digest(indices, starts)
        self._indices = indices.numpy()

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, part: slice) -> Any:
        return self._indices[self.starts[part.start] : self.starts[part.stop]]


class UserBatches(UserSampler[Batches]):
    """The global order of a user's batches, as `Order` is that of samples."""

    def __init__(self, batch_sampler: Iterable[Any], seed: int) -> None:
        super().__init__(batch_sampler, seed, _read_batches)

    def digest(self, epoch: int) -> str:
        return self.at(epoch).digest

    def size(self, epoch: int) -> int:
        return len(self.at(epoch))

    def num_samples(self, epoch: int | None, positions: range) -> int | None:
        if epoch is None:  # before the first epoch has begun, which draws the batches
            return None
        starts = self.at(epoch).starts
        return starts[positions.stop] - starts[positions.start]


def _read_indices(sampler: Iterable[int]) -> torch.Tensor:
    return sampler.draw() if isinstance(sampler, TensorSampler) else torch.tensor(list(sampler), dtype=torch.long)


def _read_batches(batch_sampler: Iterable[Iterable[int]]) -> Batches:
    if type(batch_sampler) is BatchSampler:  # torch's own: cut here, faster than a list for each batch
        indices, size = _read_indices(batch_sampler.sampler), batch_sampler.batch_size
        end = len(indices) - len(indices) % size if batch_sampler.drop_last else len(indices)
        return Batches(indices, torch.tensor([*range(0, end, size), end]))
    batches = [list(batch) for batch in batch_sampler]
    starts = torch.tensor([0, *map(len, batches)]).cumsum(0)
    return Batches(torch.tensor(list(chain(*batches)), dtype=torch.long), starts)


def _digest(*tensors: torch.Tensor) -> str:
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


class GlobalBatchSampler(Sampler[list[int]]):
    """Yields this process's indices of each micro-batch of an epoch, with the seed under which they are fetched."""

    def __init__(self, order: Order | UserBatches, *, seed: int, purpose: str) -> None:
        self._order = order
        self._seed = seed
        self._purpose = purpose

    def start_at(self, epoch: int, plan: Plan, micro_batches: range) -> None:
        """Set what the next iteration yields."""
        self._epoch = epoch
        self._plan = plan
        self._micro_batches = micro_batches

    def __iter__(self) -> Iterator[BatchIndices]:
        epoch, plan, drawn = self._epoch, self._plan, self._order.at(self._epoch)
        order = drawn.numpy() if isinstance(drawn, torch.Tensor) else drawn  # a tensor's slices cost many times more
        for _, part in plan.cut(self._micro_batches):
            if part:
                seed = derive_seed(self._seed, self._purpose, epoch, part.start)
                yield BatchIndices(order[part.start : part.stop].tolist(), seed)

    def __len__(self) -> int:
        last = self._micro_batches[-1:]  # of which this process may have none
        return len(self._micro_batches) - sum(not self._plan.local_indices(index) for index in last)

    def samples(self, part: range) -> list[int]:
        """Return the indices at some positions of the current epoch's order."""
        return self._order.at(self._epoch)[part.start : part.stop].tolist() if part else []


# ---- Draws classes more evenly than the data have them.


class TemperatureSampler(TensorSampler):
    """Draws each class c with a probability in proportion to (n_c / N) ** (1 / temperature), its samples evenly.

    Temperature 1 draws classes as often as the data have them, a high one draws all equally often. Samples are drawn
    with replacement, as `Trainer(sampler=TemperatureSampler(labels, 3.0))` from (seed, epoch).

    Source: Arivazhagan et al. 2019, "Massively Multilingual Neural Machine Translation in the Wild", section 4.

    Args:
        labels: The class of each sample, in the order of the dataset: a list, tensor, array or column; numbers or
            strings.
        temperature: A number above 0; below 1, frequent classes get more frequent. `math.inf` draws all equally often.
        num_samples: Samples of an epoch; None is as many as there are labels.

    Raises:
        ArgumentError: The temperature or the number is invalid.
        DataError: There are no labels, or a sample has several.
    """

    def __init__(self, labels: Iterable[Any], temperature: float = 1.0, num_samples: int | None = None) -> None:
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not temperature > 0:
            raise self._wrong(
                "temperature", temperature, "a number above 0", "temperature=1.0 for the classes as they are"
            )
        if num_samples is not None and (type(num_samples) is not int or num_samples < 1):
            raise self._wrong("num_samples", num_samples, "a whole number from 1", "leave num_samples out for all")
        classes = _count_from_zero(labels)
        self.num_labels = len(classes)
        self._num_samples = num_samples or self.num_labels
        self._counts = classes.bincount()
        self._starts = self._counts.cumsum(0) - self._counts
        self._by_class = classes.argsort(stable=True)
        # As a softmax: powers of small parts would vanish at a low temperature.
        self.probabilities = (self._counts.double().log() / temperature).softmax(0)

    def __len__(self) -> int:
        return self._num_samples

    def draw(self) -> torch.Tensor:
        """Draw the indices of an epoch `[num_samples]` from torch's generator."""
        drawn = torch.multinomial(self.probabilities, self._num_samples, replacement=True)
        places = torch.rand(self._num_samples, dtype=torch.float64) * self._counts[drawn]
        return self._by_class[self._starts[drawn] + places.long()]

    def check_length(self, length: int) -> None:
        """Check that there is one label for each of `length` samples.

        Raises:
            DataError: There are more, or fewer.
        """
        if length != self.num_labels:
            got, expected = f"{self.num_labels} labels", f"one for each of the {length} samples"
            do = 'use those of the training data: TemperatureSampler(train["label"], ...)'
            raise DataError(explain("TemperatureSampler", got, expected, do))

    def _wrong(self, name: str, value: Any, expected: str, do: str) -> ArgumentError:
        return ArgumentError(explain(f"TemperatureSampler({name}=...)", f"{value!r}", expected, do))


def check_labels(sampler: Any, dataset: Any) -> None:
    """Check that a sampler's labels, if it has any, are as many as the samples of a dataset."""
    if isinstance(sampler, TemperatureSampler):
        sampler.check_length(len(dataset))


def _count_from_zero(labels: Iterable[Any]) -> torch.Tensor:
    """Return the classes of labels as numbers from 0, in the order in which they first occur."""
    values = labels.tolist() if hasattr(labels, "tolist") else [_plain(label) for label in labels]
    numbers: dict[Any, int] = {}
    wrong = next((value for value in values if isinstance(value, tuple) or not isinstance(value, Hashable)), None)
    if wrong is not None:  # a tuple is a sample: equal ones would be classes of their own
        got, do = f"a label that is a {type(wrong).__name__}", "turn each into one number or string"
        raise DataError(explain("TemperatureSampler(labels=...)", got, "one class for each sample", do))
    classes = [numbers.setdefault(value, len(numbers)) for value in values]
    if not classes:
        do = "check the column and the filter of the data"
        raise DataError(explain("TemperatureSampler(labels=...)", "no labels", "one for each sample", do))
    return torch.tensor(classes)


def _plain(label: Any) -> Any:
    """Return a tensor or array of one number as that number: tensors are never equal as dict keys."""
    return label.item() if getattr(label, "ndim", None) == 0 else label
