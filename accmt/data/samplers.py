"""The samples of an epoch and their order: accmt's order, a user's sampler, or a user's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accmt.data.seeding import (
    BatchIndices,
    derive_seed,
    find_generators,
    reseed,
    seeded_generators,
    state_of,
    user_seed,
)
from accmt.processes import broadcast_object
from accmt.state import Stateful

# ---- Sharding: one global order, split into global batches, each sharded over all processes
#
# No sample is repeated to fill a batch: the last global batch is split as evenly as possible, and a process may get
# none of it. A resumed epoch keeps its count of micro-batches, and is split again from the first sample that was not
# trained on, on any number of processes.


@dataclass(frozen=True)
class Shard:
    """The part of the data that a process gets: number `index` of `count`."""

    index: int = 0
    count: int = 1


class Part(NamedTuple):
    """A planned micro-batch.

    Attributes:
        number: Its index in the epoch.
        positions: The positions of its samples in the global order.
        own: Those of this process; may be none.
        is_partial: Whether some process has none.
        num_finished: By how many the next index is higher.
        ends_batch: Whether it is the last of those that make a batch of all processes.
        unit: Where it was planned, if its randomness follows from that alone, not from the process.
    """

    number: int
    positions: range
    own: range
    is_partial: bool
    num_finished: int = 1
    ends_batch: bool = True
    unit: int | None = None


@dataclass(frozen=True)
class Plan:
    """The positions in the global order of each micro-batch of an epoch.

    Attributes:
        num_samples: Samples of the epoch over all processes, including those before `first_sample`.
        batch_size: Samples in a full batch of one process.
        shard: The shard of this process.
        first_micro_batch: The first micro-batch of the plan; earlier ones belong to another plan.
        first_sample: The position in the global order at which the plan begins.
    """

    num_samples: int
    batch_size: int
    shard: Shard
    first_micro_batch: int = 0
    first_sample: int = 0

    @property
    def global_batch_size(self) -> int:
        """Samples between two indices: those of a full micro-batch over all processes."""
        return self.batch_size * self.shard.count

    @property
    def samples_together(self) -> int:
        """Samples that are divided among the processes together."""
        return self.global_batch_size

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the epoch, including those before the plan; the last may be short."""
        return self.first_micro_batch - (self.first_sample - self.num_samples) // self.global_batch_size

    def samples_before(self, index: int) -> int:
        """Return the position in the global order at which a micro-batch begins, at most the end."""
        start = self.first_sample + (index - self.first_micro_batch) * self.global_batch_size
        return min(start, self.num_samples)

    def local_indices(self, index: int) -> range:
        """Return the positions in the global order of a micro-batch on this process; may be empty."""
        return next(self.cut(index)).own

    def cut(self, first: int) -> Iterator[Part]:
        """Yield the micro-batches of the epoch from `first` on.

        One function for speed: it runs twice per micro-batch, when it is fetched and when it is trained on.
        """
        size, rank, count = self.global_batch_size, self.shard.index, self.shard.count
        for index in range(first, self.num_micro_batches):
            start = min(self.first_sample + (index - self.first_micro_batch) * size, self.num_samples)
            stop = min(start + size, self.num_samples)
            # Of a short last micro-batch, the first `extra` processes get one sample more than the others.
            base, extra = divmod(stop - start, count)
            begin = start + rank * base + min(rank, extra)
            yield Part(index, range(start, stop), range(begin, begin + base + (rank < extra)), stop - start < count)

    def count(self, first: int) -> int:
        """Return the number of micro-batches from `first` on of which this process gets a part."""
        last = self.num_micro_batches - 1  # of which it may have none
        return max(0, last - first + bool(self.local_indices(last)))


T = TypeVar("T")


def call_set_epoch(part: Any, epoch: int) -> None:
    """Call `set_epoch` if it exists."""
    if hasattr(part, "set_epoch"):
        part.set_epoch(epoch)


_OF_TORCH = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
_OF_FIXED_LENGTH = (*_OF_TORCH, list, tuple, range, torch.Tensor)


def is_user_class(sampler: Any) -> bool:
    """Return whether a sampler, or the one inside a batch sampler, is user-defined: its epochs may differ in length."""
    if type(sampler) is BatchSampler:
        return is_user_class(sampler.sampler)
    return type(sampler) not in _OF_FIXED_LENGTH and not isinstance(sampler, TensorSampler)


class UserRandomness:
    """Makes the user's samplers and datasets draw the same on every process, by (seed, epoch).

    `set_epoch` is called if it exists. Their generators are seeded with the user's seed on the main process, and
    restored afterwards; samplers without a generator draw from the global ones.

    Processes: construction is collective if there is a generator.
    """

    def __init__(self, *parts: Any) -> None:
        inner = [getattr(part, "sampler", None) for part in parts]
        self._parts = [part for part in (*parts, *inner) if part is not None]
        self._seeds: dict[Any, int] = {}
        for generator in chain(*map(find_generators, self._parts)):
            # Each generator once: a batch sampler and the sampler in it may share theirs.
            if generator not in self._seeds:
                # If the script seeds by rank, processes would draw different orders and train twice on some samples.
                self._seeds[generator] = broadcast_object(user_seed(generator))

    def call_set_epoch(self, epoch: int) -> None:
        for part in self._parts:
            call_set_epoch(part, epoch)

    @contextmanager
    def of_epoch(self, epoch: int) -> Iterator[None]:
        """Seed the samplers for `epoch`."""
        self.call_set_epoch(epoch)
        states = [state_of(generator) for generator in self._seeds]
        for generator, seed in self._seeds.items():
            reseed(generator, derive_seed(seed, "order", epoch))
        try:
            yield
        finally:
            for restore in states:
                restore()


class TensorSampler(Sampler[int]):
    """A sampler that draws an epoch's indices as one tensor: a list of millions would cost seconds."""

    def draw(self) -> torch.Tensor:
        """Draw the indices of an epoch from torch's generator."""
        raise NotImplementedError

    def check_length(self, length: int) -> None:
        """Check that this sampler is one for a dataset of `length` samples.

        Raises:
            DataError: It is not.
        """

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw().tolist())


class ResumableSampler(TensorSampler):
    """A sampler whose order depends on the settings that a run had before it was interrupted."""

    def state_at(self, epoch: int) -> dict[str, Any]:
        """Return what the order of an epoch depends on besides this run's settings, as JSON values."""
        raise NotImplementedError

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Draw the epoch that a state is of as before, whatever this run's settings are.

        Raises:
            DataError: That is not possible.
        """
        raise NotImplementedError

    def continue_after(self, consumed: int) -> None:
        """Apply this run's settings to the samples after the first `consumed` ones of that epoch.

        Raises:
            DataError: That is not possible.
        """
        raise NotImplementedError


class UserSampler(Generic[T]):
    """A user's sampler, drawn once per epoch before any sample is read, so that training does not affect it.

    A sampler with `state_dict` and `load_state_dict` draws an epoch that a run resumes in from the state with which it
    was drawn at first, and then has the state of the checkpoint. One with `set_epoch` needs no other state.
    """

    def __init__(self, sampler: Iterable[Any], seed: int, read: Callable[[Iterable[Any]], T]) -> None:
        self._sampler = sampler
        self._seed = seed
        self._read = read
        self._randomness = UserRandomness(sampler)
        self._drawn: tuple[int, T] | None = None
        self._stateful: Stateful | None = None
        for part in (sampler, getattr(sampler, "sampler", None)):
            if isinstance(part, Stateful) and not hasattr(part, "set_epoch"):
                self._stateful = part
                break
        self._state_at_draw: dict[str, Any] = {}
        self._saved: Mapping[str, Any] = {}

    @property
    def resumable(self) -> UserSampler[T] | None:
        """The sampler if it has a state."""
        if self._stateful is None:
            return None
        return self

    def state_at(self, epoch: int) -> dict[str, Any]:
        """Return the sampler's state, and that with which an epoch was drawn."""
        current = drawn = self._copy_state()
        if self._drawn is not None and self._drawn[0] == epoch:
            drawn = self._state_at_draw
        return {"epoch": epoch, "drawn": drawn, "current": current}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_at` returned, when its epoch is drawn."""
        self._saved = state

    def continue_after(self, consumed: int) -> None:
        """Do nothing: the order does not depend on what was consumed."""

    def _copy_state(self) -> dict[str, Any]:
        if self._stateful is None:
            return {}
        return deepcopy(self._stateful.state_dict())

    def forget(self) -> None:
        """Draw again when an epoch is needed next."""
        self._drawn = None

    def at(self, epoch: int) -> T:
        if self._drawn is None or self._drawn[0] != epoch:
            resumed = None
            if self._saved.get("epoch") == epoch:
                resumed = self._stateful
            if resumed is not None:
                resumed.load_state_dict(deepcopy(self._saved["drawn"]))
            self._state_at_draw = self._copy_state()
            with self._randomness.of_epoch(epoch), seeded_generators(derive_seed(self._seed, "order", epoch)):
                self._drawn = epoch, self._read(self._sampler)
            if resumed is not None:  # training changed it after the draw, for the next epoch
                resumed.load_state_dict(deepcopy(self._saved["current"]))
        return self._drawn[1]


Permute: TypeAlias = Callable[[torch.Generator], torch.Tensor]
"""Draws the indices of a dataset in random order: its method `shuffle_rows`, if it is slow to read in any order."""


def draw_permutation(length: int, generator: torch.Generator, permute: Permute | None) -> torch.Tensor:
    """Draw the indices below `length` in random order."""
    return torch.randperm(length, generator=generator) if permute is None else permute(generator)


class Order:
    """The global order of the samples, a pure function of (seed, epoch, length).

    Args:
        length: Samples of the dataset; may change between epochs.
        seed: The run's seed.
        shuffle: Whether each epoch has a different permutation.
        sampler: An iterable of indices that defines the order instead.
        permute: Draws each permutation; None draws all permutations with equal probability.

    Attributes:
        resumable: The sampler, if its order depends on earlier settings or on a state.
    """

    def __init__(
        self,
        length: int,
        seed: int,
        *,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        permute: Permute | None = None,
    ) -> None:
        self.length = length
        self._seed = seed
        self._shuffle = shuffle
        self._permute = permute
        self._user_sampler: UserSampler[torch.Tensor] | None = None
        self.resumable: ResumableSampler | UserSampler[torch.Tensor] | None = None
        if sampler is not None:
            self._user_sampler = UserSampler(sampler, seed, _read_indices)
            self.resumable = self._user_sampler.resumable
            if isinstance(sampler, ResumableSampler):
                self.resumable = sampler
        self._digest: tuple[int, int, str] | None = None
        self._last: tuple[int, int, torch.Tensor] | None = None

    def forget(self) -> None:
        """Draw again when an epoch is needed next."""
        self._digest = None
        if self._user_sampler is not None:
            self._user_sampler.forget()

    def digest(self, epoch: int) -> str:
        if self._digest is None or self._digest[:2] != (epoch, self.length):
            self._digest = epoch, self.length, _digest(self.at(epoch))
        return self._digest[2]

    def size(self, epoch: int) -> int:
        return self.length if self._user_sampler is None else len(self._user_sampler.at(epoch))

    def num_samples(self, epoch: int | None, positions: range) -> int | None:
        return len(positions)

    def at(self, epoch: int) -> torch.Tensor:
        """Return the order of `epoch` as a tensor of indices `[samples]`."""
        if self._user_sampler is not None:
            return self._user_sampler.at(epoch)
        if self._last is None or self._last[:2] != (epoch, self.length):
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "order", epoch))
            order = torch.arange(self.length)
            if self._shuffle:
                order = draw_permutation(self.length, generator, self._permute)
            self._last = epoch, self.length, order
        return self._last[2]


class Batches:
    """The batches of an epoch: the indices of all batches in one tensor, and the bounds of the batches in it."""

    def __init__(self, indices: torch.Tensor, starts: torch.Tensor) -> None:
        self.starts: list[int] = starts.tolist()
        self.digest = _digest(indices, starts)
        self._indices = indices.numpy()

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, part: slice) -> Any:
        return self._indices[self.starts[part.start] : self.starts[part.stop]]


class UserBatches(UserSampler[Batches]):
    """The global order of a user's batches, like `Order` for samples."""

    def __init__(self, batch_sampler: Iterable[Any], seed: int) -> None:
        super().__init__(batch_sampler, seed, _read_batches)

    def digest(self, epoch: int) -> str:
        return self.at(epoch).digest

    def size(self, epoch: int) -> int:
        return len(self.at(epoch))

    def num_samples(self, epoch: int | None, positions: range) -> int | None:
        if epoch is None:  # before the first epoch, which draws the batches
            return None
        starts = self.at(epoch).starts
        return starts[positions.stop] - starts[positions.start]


def _read_indices(sampler: Iterable[int]) -> torch.Tensor:
    if isinstance(sampler, TensorSampler):
        return sampler.draw()
    return torch.tensor(list(sampler), dtype=torch.long)


def _read_batches(batch_sampler: Iterable[Iterable[int]]) -> Batches:
    if type(batch_sampler) is BatchSampler:  # torch's class: split here, faster than one list per batch
        indices, size = _read_indices(batch_sampler.sampler), batch_sampler.batch_size
        end = len(indices)
        if batch_sampler.drop_last:
            end -= end % size
        return Batches(indices, torch.tensor([*range(0, end, size), end]))
    batches = [list(batch) for batch in batch_sampler]
    starts = torch.tensor([0, *map(len, batches)]).cumsum(0)
    return Batches(torch.tensor(list(chain(*batches)), dtype=torch.long), starts)


def _digest(*tensors: torch.Tensor) -> str:
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


class GlobalBatchSampler(Sampler[BatchIndices]):
    """Yields this process's indices of each micro-batch of an epoch, with the seed for fetching them."""

    def __init__(self, order: Order | UserBatches, *, seed: int, purpose: str) -> None:
        self._order = order
        self._seed = seed
        self._purpose = purpose
        self._order_of_epoch: Any = None

    def start_at(self, epoch: int, plan: Plan, first: int) -> None:
        """Set what the next iteration yields: the micro-batches of a plan from `first` on."""
        self._epoch = epoch
        self._plan = plan
        self._first = first
        self._order_of_epoch = None

    def __iter__(self) -> Iterator[BatchIndices]:
        epoch, plan, order = self._epoch, self._plan, self.order
        for part in plan.cut(self._first):
            if own := part.own:
                indices = order[own.start : own.stop].tolist()
                yield BatchIndices(indices, derive_seed(self._seed, self._purpose, epoch, own.start))

    def __len__(self) -> int:
        return self._plan.count(self._first)

    def digest(self, first: int, last: int) -> str:
        """Return a digest of the indices in micro-batches [first, last) over all processes, in their order."""
        plan = self._plan  # its arithmetic in place, since this runs once per step
        size = plan.global_batch_size
        start = plan.first_sample + (first - plan.first_micro_batch) * size
        stop = min(plan.first_sample + (last - plan.first_micro_batch) * size, plan.num_samples)
        return xxhash.xxh3_64_hexdigest(self.order[start:stop])

    def indices(self, part: range) -> list[int]:
        """Return the indices at these positions of the current epoch's order."""
        indices: list[int] = self.order[part.start : part.stop].tolist()
        return indices

    def samples(self, part: range) -> BatchIndices:
        """Return the indices at these positions of the current epoch's order, with the seed for fetching them."""
        return BatchIndices(self.indices(part), derive_seed(self._seed, self._purpose, self._epoch, part.start))

    @property
    def order(self) -> Any:
        """The indices of the current epoch in their order, of which a slice has those of positions."""
        if self._order_of_epoch is None:
            order: Any = self._order.at(self._epoch)
            if isinstance(order, torch.Tensor):  # whose slicing is many times slower
                order = order.numpy()
            self._order_of_epoch = order
        return self._order_of_epoch


def check_length(sampler: Any, dataset: Any) -> None:
    """Check that a sampler that knows for how many samples it was made gets as many."""
    if isinstance(sampler, TensorSampler):
        sampler.check_length(len(dataset))
