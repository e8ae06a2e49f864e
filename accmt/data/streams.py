"""Sources of data that can only be read from the start: every process reads all of it and keeps its own."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accmt.data.batches import MicroBatch
from accmt.data.collate import Collate, keeps_number
from accmt.data.fingerprints import Rows, rows_of_samples
from accmt.data.options import SourceOptions, length_of, require_batch, require_same_rows
from accmt.data.own_generators import call_first
from accmt.data.position import EPOCH_START, EpochStart, cannot_resume, compare_rows, say_not_compared
from accmt.data.samplers import UserRandomness
from accmt.data.seeding import derive_seed, seed_generators
from accmt.data.sequential import ReadBatch, SequentialSource
from accmt.data.sharding import Plan, Shard
from accmt.data.stream_state import StreamState
from accmt.errors import DataError, explain
from accmt.messages import warn_once


class StreamSource(SequentialSource):
    """Micro-batches of an iterable: each process keeps its part of every global batch.

    So the order is defined, all processes end together, and each sample is trained on once. With more than one worker
    that is up to the dataset: as torch asks, each worker's copy of it has to yield its own part (`get_worker_info`).
    What is not a torch IterableDataset cannot know of workers, and gets at most one.
    """

    _kind = "stream"
    _unit = "samples"

    def __init__(self, data: Any, options: SourceOptions) -> None:
        if not isinstance(data, IterableDataset):
            options = replace(options, num_workers=min(options.num_workers, 1))
        source = data
        if options.groups is not None:
            data = options.groups.group(data, options.seed)
        self._data = data
        self._readers = _count_readers(options.num_workers)
        self._global_batch_size = options.batch_size * options.shard.count
        self._state = StreamState(data, source=source, num_workers=options.num_workers, also_read=options.also_read)
        self._rows: Rows = {}  # those with which the epoch began
        self._is_read_again = False
        # Each of several readers may end with a short batch, so the length does not give the number of batches.
        length = length_of(data) if self._readers == 1 else None
        multiple = self._global_batch_size if options.drop_last else 1
        dataloader = self._make_dataloader(data if isinstance(data, IterableDataset) else _Rest(data), options)
        super().__init__(dataloader, options, UserRandomness(data), length, multiple=multiple)

    def _make_dataloader(self, data: IterableDataset[Any], options: SourceOptions) -> DataLoader[Any]:
        torch_options = options.torch_options(data)
        torch_options["persistent_workers"] = False  # each epoch's workers begin with the epoch's seed
        self._knows_samples = keeps_number(torch_options["collate_fn"])
        torch_options["collate_fn"] = _CollateShard(options.batch_size, options.shard, torch_options["collate_fn"])
        return DataLoader(data, batch_size=self._global_batch_size, drop_last=options.drop_last, **torch_options)

    def _choose_start(self, start: EpochStart) -> EpochStart:
        position = start.position
        self._rows = position.get("rows", {})
        if self._state.is_in(position):
            say_not_compared(self._options)
            return start
        is_same = position["reads"] == [[0, self._global_batch_size]] and position["readers"] == self._readers
        if not is_same and max(self._readers, position["readers"]) > 1:
            raise self._cannot_find(position)
        self._say_reading_again(start, self._state.why_not or "their state was not saved, because a worker read them")
        # A worker's generators advance through collating too, so it has to read and collate just what it read before.
        self._is_read_again = is_same and self.dataloader.num_workers > 0
        return EPOCH_START if self._is_read_again else start

    def _read_micro_batches(self, epoch: int, start: EpochStart, plan: Plan | None) -> Iterator[ReadBatch]:
        fixed: dict[str, Any] = {"kind": self._kind, "readers": self._readers, "reads": self._reads_from(start)}
        batch_size, shard = self._options.batch_size, self._options.shard
        dataloader = self.dataloader if start is EPOCH_START else self._make_rest(epoch, start, plan)
        collate: Any = dataloader.collate_fn
        collate.is_first = True
        with self._state.restored(start.position):
            read = self._compare_first(self._read(epoch, dataloader, start.consumed), start)
            fixed |= {"rows": self._rows, "in_worker": self.dataloader.num_workers > 0}
            workers = _Workers(self._options, self._readers)
            for index, ((batch, size, rows), consumed) in enumerate(read, start.micro_batch):
                workers.compare(rows)
                own = len(Plan(size, batch_size, shard).local_indices(0))
                if own:
                    require_batch(batch, self._options)
                num_samples = size if self._knows_samples else None
                position = {**fixed, "samples": consumed, **self._state.take()}
                yield MicroBatch(index, batch, num_samples, own, is_partial=size < shard.count), position

    def _compare_first(self, read: Iterator[tuple[_OfAll, int]], start: EpochStart) -> Iterator[tuple[_OfAll, int]]:
        """Compare the first batch: between processes which share the stream, and with what was read at first.

        Nothing is read for it alone: a stream may be one that can be read only once.
        """
        first = next(read, None)
        require_same_rows(self._options, None if first is None else first[0].rows)
        if first is None:
            return read
        if start is EPOCH_START:
            if self._is_read_again:
                compare_rows({"rows": self._rows}, first[0].rows, self._options, is_in_epoch=True)
            self._rows, self._is_read_again = first[0].rows, False
        return chain([first], read)

    def _size_of(self, batch: _OfAll) -> int:
        return batch.size

    def _reads_from(self, start: EpochStart) -> list[list[int]]:
        """Return [first sample, samples read at once] for each launch that has read a part of the epoch."""
        reads = list(start.position.get("reads", ()))
        if reads and reads[-1][1] == self._global_batch_size and (start.consumed - reads[-1][0]) % reads[-1][1] == 0:
            return reads
        return [*reads, [start.consumed, self._global_batch_size]]

    def _make_rest(self, epoch: int, start: EpochStart, plan: Plan | None) -> DataLoader[Any]:
        options, reads = self._options, start.position["reads"]
        skipped: list[range] = []
        if not self._state.is_in(start.position):
            ends = [begin for begin, _ in reads[1:]] + [start.consumed]
            skipped = [range(begin, end, size) for (begin, size), end in zip(reads, ends, strict=True)]
        num_left = None if plan is None else plan.num_samples - start.consumed
        seed_at = partial(derive_seed, options.seed, options.purpose, epoch)
        rest = _Rest(self._data, skipped, num_left, seed_at)
        is_in_worker = self.dataloader.num_workers > 0  # where another generator draws
        if not (is_in_worker or start.position.get("in_worker") or self._state.is_in(start.position)):
            rest.check = partial(compare_rows, start.position, options=options, is_in_epoch=True)
        return self._make_dataloader(rest, options)

    def _cannot_find(self, position: Mapping[str, Any]) -> Exception:
        readers, (_, size) = position["readers"], position["reads"][-1]
        got = f"{self._readers} workers that read, and {self._global_batch_size} samples in a global batch"
        expected = f"{readers} and {size}, as before: each of several workers reads a part of the stream"
        do = "resume with as many workers and processes as before; with one worker or none, any number can resume"
        return cannot_resume(self._options, got, expected, do)


def _count_readers(num_workers: int) -> int:
    return max(num_workers, 1)  # a single worker reads in the same order as none


@dataclass(eq=False)
class _Rest(IterableDataset[Any]):
    """The samples of an iterable that come after skipped ones.

    Skipped samples are read under the seeds of their first time, so that a stream that draws from the global generators
    has the same order again. In a worker, the generators advance by themselves.
    """

    data: Any
    skipped: list[range] = field(default_factory=list)  # the positions of the earlier reads, by launch
    num_left: int | None = None  # how many samples follow at most
    seed_at: Callable[[int], int] | None = None  # the seed of the read that begins at a position
    check: Callable[[Rows], None] | None = None  # of the first samples

    def __iter__(self) -> Iterator[Any]:
        return self._skip(iter(self.data)) if self.skipped else islice(self.data, self.num_left)

    def _skip(self, samples: Iterator[Any]) -> Iterator[Any]:
        for reads in self.skipped:
            for position in reads:
                self._seed(position)
                read = islice(samples, min(reads.step, reads.stop - position))
                if position == 0 and self.check is not None:
                    self.check(rows_of_samples(list(read)))
                deque(read, maxlen=0)
        self._seed(self.skipped[-1].stop)
        yield from islice(samples, self.num_left)

    def _seed(self, position: int) -> None:
        if self.seed_at is not None and get_worker_info() is None:
            seed_generators(self.seed_at(position))


class _OfAll(NamedTuple):
    """What is made of a global batch; a tuple, so that workers can send it.

    Attributes:
        batch: This process's part of it; None if it has none.
        size: Samples of the global batch.
        rows: The fingerprints of some of them, in the first batch of each reader.
    """

    batch: Any
    size: int
    rows: Rows


@dataclass
class _CollateShard:
    """Collates this process's part of a global batch."""

    batch_size: int
    shard: Shard
    collate: Callable[[Any], Any]
    is_first: bool = True

    def __call__(self, samples: list[Any]) -> _OfAll:
        is_first, self.is_first = self.is_first, False
        rows = rows_of_samples(samples) if is_first else {}
        positions = Plan(len(samples), self.batch_size, self.shard).local_indices(0)
        own = samples[positions.start : positions.stop]
        collate = partial(call_first, self.collate, owner=self.collate) if is_first else self.collate
        return _OfAll(collate(own) if own else None, len(samples), rows)


class _Workers:
    """Finds out that each of several workers reads all of a stream, so that every sample comes several times."""

    def __init__(self, options: SourceOptions, number: int) -> None:
        self._options = options
        self._number = number
        self._first: Rows = {}

    def compare(self, rows: Rows) -> None:
        """Compare the samples of a worker's first batch with those of another one's; of other batches there are none.

        Raises:
            DataError: They are the same, in an evaluation or a prediction.
        """
        if self._number == 1 or not rows:
            return
        values = list(rows.values())
        if rows != self._first or all(value == values[0] for value in values):
            self._first = self._first or rows
            return
        where = f"the {self._options.kind} data, a stream that {self._number} workers read"
        got = f"the same samples from each worker, so each sample comes {self._number} times"
        do = "let __iter__ yield the part of torch.utils.data.get_worker_info().id, or set dataloader_num_workers=1"
        message = explain(where, got, "a part of the data from each worker", do)
        if self._options.purpose != "train":
            raise DataError(message)
        warn_once(message, about=where)


class UserLoaderSource(SequentialSource):
    """Micro-batches of a user's DataLoader that can only be read through: batch i goes to process i mod processes.

    It reads a stream, makes no batches or batches without a length, or is of a class with an `__iter__` of its own.
    """

    _kind = "DataLoader that is read through"
    _unit = "batches"

    def __init__(self, user_loader: DataLoader[Any], options: SourceOptions) -> None:
        is_stream = isinstance(user_loader.dataset, IterableDataset)
        self._reader = _make_reader(user_loader, options)
        readers = _count_readers(user_loader.num_workers) if is_stream else 1
        self._cut = {"batch_size": user_loader.batch_size, "readers": readers}
        self._state = _state_of_loader(user_loader, options, is_stream=is_stream)
        self._rows: Rows = {}  # those with which the epoch began
        length = length_of(user_loader) if readers == 1 else None
        randomness = UserRandomness(user_loader, user_loader.dataset, user_loader.batch_sampler)
        # What is counted are the user's batches: one for each process in a micro-batch.
        options = replace(options, batch_size=1, micro_batches_per_batch=1)
        super().__init__(user_loader, options, randomness, length)

    def _choose_start(self, start: EpochStart) -> EpochStart:
        before = {name: start.position[name] for name in self._cut}
        if before != self._cut:
            raise cannot_resume(self._options, f"a DataLoader with {self._cut}", f"one with {before}, as before")
        self._rows = start.position.get("rows", {})
        if self._state.is_in(start.position):
            say_not_compared(self._options)
        else:
            self._say_reading_again(start, self._state.why_not or "their state was not saved")
        return start

    def _read_micro_batches(self, epoch: int, start: EpochStart, plan: Plan | None) -> Iterator[ReadBatch]:
        shard, num_workers = self._options.shard, self._reader.num_workers
        with self._state.restored(start.position):
            batches = self._batches(epoch, start, plan)
            workers = _Workers(self._options, int(self._cut["readers"] or 1))
            for index in count(start.micro_batch):
                of_all_processes = list(islice(batches, shard.count))
                if index == start.micro_batch:
                    rows = rows_of_samples([_content(batch) for batch, _ in of_all_processes])
                    require_same_rows(self._options, rows or None)
                if not of_all_processes:
                    return
                for batch, _ in of_all_processes:
                    workers.compare(batch.rows if isinstance(batch, _Counted) else {})
                own = _Counted(None, 0)
                if shard.index < len(of_all_processes):
                    batch = of_all_processes[shard.index][0]
                    own = batch if isinstance(batch, _Counted) else _Counted(batch, None)
                    require_batch(own.batch, self._options)
                position = {"kind": self._kind, **self._cut, "rows": self._rows, "num_workers": num_workers}
                position |= {"batches": of_all_processes[-1][1], **self._state.take()}
                is_partial = len(of_all_processes) < shard.count
                yield MicroBatch(index, own.batch, None, own.samples, is_partial=is_partial), position

    def _batches(self, epoch: int, start: EpochStart, plan: Plan | None) -> Iterator[tuple[Any, int]]:
        read_before = start.consumed if self._state.is_in(start.position) else 0
        is_cut = plan is not None and self._options.is_limited  # otherwise a wrong length would not be noticed
        end = plan.num_samples - read_before if plan is not None and is_cut else None
        if isinstance(self._reader.collate_fn, _CollateAndCount):
            self._reader.collate_fn.is_first = True
        read = self._read(epoch, self._reader, read_before)
        if read_before == 0:
            read = self._compare_first(read, start)
        return islice(read, start.consumed - read_before, end)

    def _compare_first(self, read: Iterator[tuple[Any, int]], start: EpochStart) -> Iterator[tuple[Any, int]]:
        """Compare the first batch of an epoch that is read again with the one that was read at first."""
        first = next(read, None)
        if first is None:
            return read
        batch = first[0]
        rows = batch.rows if isinstance(batch, _Counted) and batch.rows else rows_of_samples([_content(batch)])
        if start is EPOCH_START:
            self._rows = rows
        elif start.position.get("num_workers") == self._reader.num_workers:  # else what they draw is another
            # Nothing of a single row shows whether it is only augmented.
            compare_rows(start.position, rows, self._options, is_in_epoch=len(rows) > 1)
        return chain([first], read)

    def _size_of(self, batch: Any) -> int:
        return 1


def _content(batch: Any) -> Any:
    return batch.batch if isinstance(batch, _Counted) else batch


class _Counted(NamedTuple):
    """A batch, and the number of samples it was made from; a tuple, so that workers can send it.

    Attributes:
        samples: None where the DataLoader does not make batches of samples.
        rows: Fingerprints of the samples of the first batch, or of that of each worker.
    """

    batch: Any
    samples: int | None
    rows: Rows = {}  # noqa: RUF012 - of a tuple, which nobody changes


@dataclass
class _CollateAndCount:
    collate: Collate
    is_first: bool = field(default=True, init=False)

    def __call__(self, samples: list[Any]) -> _Counted:
        is_first, self.is_first = self.is_first, False
        batch = call_first(self.collate, samples, self.collate) if is_first else self.collate(samples)
        rows = rows_of_samples(samples) if is_first else {}
        return _Counted(batch, len(samples), rows)


def _make_reader(user_loader: DataLoader[Any], options: SourceOptions) -> DataLoader[Any]:
    """Return a copy of a user's DataLoader that counts the samples of each batch and starts workers for each epoch.

    So the user's own stays as it is, even if something else reads it meanwhile. One with an `__iter__` of its own is
    used itself.
    """
    if type(user_loader).__iter__ is not DataLoader.__iter__ or hasattr(user_loader, "state_dict"):
        return user_loader
    reader = copy.copy(user_loader)
    makes_batches = user_loader.batch_sampler is not None or user_loader.batch_size is not None
    collate = _CollateAndCount(user_loader.collate_fn) if makes_batches else user_loader.collate_fn
    if user_loader.persistent_workers:
        warn_once(
            f"persistent_workers=True has no effect on the DataLoader of the {options.kind} data: workers of a stream "
            "that outlive an epoch would read in another order after a resume",
            about=f"persistent workers: {options.kind}",
        )
    # Through vars: DataLoader.__setattr__ rejects changes after construction.
    vars(reader).update(collate_fn=collate, persistent_workers=False, _iterator=None)
    return reader


def _state_of_loader(user_loader: DataLoader[Any], options: SourceOptions, *, is_stream: bool) -> StreamState:
    is_plain = type(user_loader).__iter__ is DataLoader.__iter__
    if is_stream and is_plain:
        return StreamState(user_loader.dataset, num_workers=user_loader.num_workers, also_read=options.also_read)
    return StreamState(user_loader, source=user_loader.dataset, also_read=options.also_read)
