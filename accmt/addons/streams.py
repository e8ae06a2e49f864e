"""Sources for data that can only be read from the start: every process reads all of it and keeps its part."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accmt.data.base import (
    EPOCH_START,
    EpochStart,
    SourceOptions,
    cannot_resume,
    compare_rows,
    length_of,
    plan_epoch,
    read_start,
    require_batch,
    require_not_empty,
    require_same_end,
    require_same_rows,
    say_not_compared,
)
from accmt.data.batches import MicroBatch, ReadBatch, read_when_needed
from accmt.data.collate import Collate
from accmt.data.fetching import Fetched, note_dead_worker, start_reading
from accmt.data.fingerprints import Rows, rows_of_samples
from accmt.data.samplers import Part, Plan, UserRandomness
from accmt.data.seeding import derive_seed, preserve_generators, seed_generators
from accmt.errors import DataError, explain, fail
from accmt.libraries.private_names import shut_down_workers, steps_of_stream
from accmt.libraries.versions import why_states_are_inexact
from accmt.messages import say_once, warn_once

# ---- The base of these sources


_END = object()
_PositionAfter = tuple[int, dict[str, Any]]  # the index of a micro-batch, and the position after it
_NUM_POSITIONS = 4  # a checkpoint asks for the last ones
_NUM_SAMPLE_POSITIONS = 1024  # of the micro-batches of the last steps, which the ledger records


class SequentialSource:
    """Micro-batches of what a DataLoader yields, in that order.

    Args:
        dataloader: The DataLoader to read.
        options: Seed, shard, limit, and the batch size, in samples or in the user's batches.
        randomness: The randomness of samplers and datasets.
        length: The length of an epoch before limits; None if unknown.
        multiple: The end beyond a multiple of this is dropped; 1 drops nothing.
    """

    _kind: str
    _unit: str

    def __init__(
        self,
        dataloader: DataLoader[Any],
        options: SourceOptions,
        randomness: UserRandomness,
        length: int | None,
        *,
        multiple: int = 1,
    ) -> None:
        self.dataloader = dataloader
        self.micro_batches_per_batch = options.micro_batches_per_batch
        self.shard = options.shard
        self._options = options
        self._randomness = randomness
        self._claimed_length = length
        self._length = length  # or the most that the limit allows; None if nothing bounds an epoch
        if length is not None:
            require_not_empty(length, options, "a length of 0")
        elif isinstance(options.limit, int):
            most = max(options.limit, 1) * options.micro_batches_per_batch
            self._length = most * _plan_part(0, options).global_batch_size
        elif options.limit < 1.0:  # a fraction of an unknown number
            got = f"a limit of {options.limit}, a fraction, for data without a length"
            do = "pass a number of batches such as 100, or define __len__ for the data"
            raise options.error(got, "a whole number of batches", do)
        self._multiple = multiple
        self._start = EPOCH_START
        self._epoch: int | None = None
        self._positions: deque[_PositionAfter] = deque(maxlen=_NUM_POSITIONS)
        self._reading: Iterator[Any] = iter(())
        self._arrange(EPOCH_START, 0)
        if options.skips_bad:
            kind = f"the {options.kind} data, which can only be read from the start"
            why = "an iterator that has raised an error cannot continue; catch errors where they are raised"
            warn_once(f'failures={{"on_bad_sample": "skip"}} has no effect on {kind}: {why}', about=kind)

    def samples_in(self, first: int, last: int) -> int | None:
        return None  # known only after reading

    def micro_batches(self, epoch: int, first: int = 0) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch from `first` on; earlier ones are read too unless a state is resumed."""
        start = self._start.of(epoch, first)
        plan = self._arrange(start, first)
        num_micro_batches = None
        if plan is not None:
            num_micro_batches = plan.num_micro_batches - start.micro_batch
        is_empty = start is EPOCH_START and num_micro_batches != 0
        self._restart_positions(start)
        self._epoch = epoch
        with self._randomness.of_epoch(epoch):
            readings = self._ending_together(self._read_micro_batches(epoch, start, plan), start.consumed)
            for micro_batch, position in self._as_planned(readings, num_micro_batches):
                is_empty = False
                self._positions.append((micro_batch.index, position))
                if micro_batch.index >= first:
                    yield micro_batch
        got = "no samples (an iterator can be read only once: pass an iterable instead)"
        require_not_empty(not is_empty, self._options, got)

    def _ending_together(self, micro_batches: Iterator[ReadBatch], consumed: int) -> Iterator[ReadBatch]:
        """Yield micro-batches; at an incomplete one and at the end, all processes must have read equally much."""
        full = _plan_part(0, self._options).samples_together
        for micro_batch, position in micro_batches:
            if micro_batch.ends_batch:
                before, consumed = consumed, position[self._unit]
                if consumed - before < full:
                    require_same_end(self._options, f"{consumed} {self._unit}")
            yield micro_batch, position
        require_same_end(self._options, f"{consumed} {self._unit}")

    def _as_planned(self, micro_batches: Iterator[ReadBatch], num_micro_batches: int | None) -> Iterator[ReadBatch]:
        """Yield the planned number of micro-batches, and warn if the data's `__len__` is wrong."""
        num_read = 0

        def read_next() -> ReadBatch | None:
            nonlocal num_read
            read = self._read_next(micro_batches, num_read, num_micro_batches)
            num_read += 0 if read is None else read[0].num_finished
            return read

        return read_when_needed(read_next)

    def _read_next(self, micro_batches: Iterator[ReadBatch], num_read: int, planned: int | None) -> ReadBatch | None:
        has_all, is_claim = num_read == planned, self._claimed_length is not None and planned is not None
        if has_all and (num_read == 0 or self._options.is_limited or not is_claim):
            return None
        # Beyond the planned number, one more is read only to see whether `__len__` is too small.
        read = next(micro_batches, None)
        if is_claim and num_read > 0:
            if has_all and read is not None:
                self._warn_of_length("more", "each epoch skips the rest")
            elif read is None and not has_all:
                consequence = "the LR scheduler and everything else planned from the length is too long"
                self._warn_of_length(f"{self._positions[-1][1][self._unit]}", consequence)
        if has_all:
            return None
        return read

    def _warn_of_length(self, number: str, consequence: str) -> None:
        what = f"len() of the {self._options.kind} data is {self._claimed_length} {self._unit}"
        warn_once(f"{what}, but iterating yields {number}: {consequence}; correct __len__", about=f"{what} falsely")
        self._claimed_length = None  # warn only once

    def samples_of(self, epoch: int, index: int) -> list[int] | None:
        return None  # streams have no indices

    def read_again(self, epoch: int, index: int) -> Fetched | None:
        return None

    def digest_of_samples(self, first: int, last: int) -> str | None:
        return None

    def set_epoch_again(self) -> None:
        if self._epoch is not None:
            self._randomness.call_set_epoch(self._epoch)

    def end_workers(self) -> None:
        shut_down_workers(self.dataloader, self._reading)

    def position(self, epoch: int, num_micro_batches: int) -> dict[str, Any]:
        """Return the position after `num_micro_batches` of an epoch, the last of which was just yielded.

        Raises:
            LookupError: More micro-batches have been yielded since than positions are kept.
        """
        if num_micro_batches == 0:
            return {"kind": self._kind, self._unit: 0}
        for index, position in reversed(self._positions):
            if index < num_micro_batches:
                return position
        raise LookupError(
            f"the position after micro-batch {num_micro_batches} of epoch {epoch} is no longer kept: request it sooner"
        )

    def resume_from(self, epoch: int, first_micro_batch: int, position: Mapping[str, Any]) -> None:
        """Resume `epoch` from the data's own state if they have one, otherwise by reading again."""
        start = read_start(epoch, first_micro_batch, position, kind=self._kind, unit=self._unit, options=self._options)
        self._start = start
        if start is not EPOCH_START:
            self._start = self._choose_start(start)
        self._restart_positions(start)
        self._arrange(self._start, first_micro_batch)

    def _choose_start(self, start: EpochStart) -> EpochStart:
        """Return `start`, or the start of the epoch if micro-batches have to be read again and skipped."""
        raise NotImplementedError

    def _read_micro_batches(self, epoch: int, start: EpochStart, plan: Plan | None) -> Iterator[ReadBatch]:
        """Read all micro-batches from `start` on, each with the position of the data after it."""
        raise NotImplementedError

    def _size_of(self, batch: Any) -> int:
        """Return the size of what the DataLoader yielded, in samples or batches."""
        raise NotImplementedError

    def _read(self, epoch: int, dataloader: DataLoader[Any], consumed: int) -> Iterator[tuple[Any, int]]:
        """Yield each batch with the count after it; each is read under its own seed, independently of training."""
        seed, purpose = self._options.seed, self._options.purpose
        seed_generators(derive_seed(seed, purpose, epoch))
        if dataloader.persistent_workers:  # their generators would continue from the epoch before
            shut_down_workers(dataloader, self._reading)
        batches = self._reading = start_reading(dataloader)
        while True:
            seed_generators(derive_seed(seed, purpose, epoch, consumed))
            try:
                batch = next(batches, _END)
            except Exception as error:
                note_dead_worker(error, batches)
                where = f"the {self._options.kind} data, epoch {epoch + 1}, after {consumed} {self._unit}"
                got = f"{type(error).__name__}: {error}".partition("\n")[0]
                do = (
                    "fix the error, or catch it where it is raised: an iterator that has raised an error cannot "
                    "continue"
                )
                error.add_note(explain(where, got, f"more {self._unit}, or the end of the data", do))
                raise
            if batch is _END:
                return
            consumed += self._size_of(batch)
            yield batch, consumed

    def _arrange(self, start: EpochStart, first: int) -> Plan | None:
        if self._length is None:
            self.num_micro_batches: int | None = None
            return None
        plan = plan_epoch(self._length, self._options, multiple=self._multiple, start=start)
        self.num_micro_batches = max(plan.num_micro_batches, first)
        return plan

    def _restart_positions(self, start: EpochStart) -> None:
        self._positions.clear()
        if start.position:
            self._positions.append((start.micro_batch - 1, dict(start.position)))

    def _say_reading_again(self, start: EpochStart, why: str) -> None:
        say_once(
            f"the {self._options.kind} data are read again from the beginning of the epoch up to the interruption "
            f"({start.consumed} {self._unit}): {why}"
        )


# ---- The state of data that track their own position


_STATE = "state"


class StreamState:
    """The `state_dict` and `load_state_dict` of a stream or a loader, if resuming from them is exact.

    `load_state_dict` is called before `iter`, which then has to continue after the last sample read; the next `iter`
    begins at the start. The state is taken between two reads, so nothing may read ahead.

    Args:
        owner: The stream, or the loader.
        num_workers: Workers, which read ahead.
        source: The dataset of a loader.
        also_read: Data read meanwhile, such as validation data: reading the same stream, or one derived from it,
            changes the state of this one.

    Attributes:
        why_not: Why the state cannot be used; None if it can.
    """

    def __init__(self, owner: Any, *, num_workers: int = 0, source: Any = None, also_read: Iterable[Any] = ()) -> None:
        self._owner = owner
        self._source = source
        self.why_not = _find_obstacle(owner, num_workers, source, also_read)

    def take(self) -> dict[str, Any]:
        """Return the state's entry for the position; empty if the state cannot be used."""
        if self.why_not:
            return {}
        # A copy: many streams return the dict that they change when they are read.
        return {_STATE: deepcopy(self._owner.state_dict())}

    def is_in(self, position: Mapping[str, Any]) -> bool:
        """Return whether a position has a state from which the data can resume."""
        return self.why_not is None and _STATE in position

    @contextmanager
    def restored(self, position: Mapping[str, Any]) -> Iterator[None]:
        """Let the next `iter` resume from the state in a position; afterwards, the data start from the beginning."""
        if not self.is_in(position):
            yield
            return
        self._owner.load_state_dict(deepcopy(position[_STATE]))
        try:
            yield
        finally:
            for data in _streaming_datasets_in(self._owner, self._source):
                data.load_state_dict(None)  # else that epoch of a later run would resume there too


def _find_obstacle(owner: Any, num_workers: int, source: Any, also_read: Iterable[Any]) -> str | None:
    if not (hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")):
        return "with state_dict and load_state_dict, and without workers, they would resume immediately"
    if num_workers > 0:
        return "their state_dict can only be used without workers (dataloader_num_workers=0)"
    streams = _streaming_datasets_in(owner, source)
    if streams:
        inexact = why_states_are_inexact()
        if inexact is not None:
            return inexact
    # No public attribute shows that there is a buffer. Source: `datasets.IterableDataset.state_dict`: "examples from
    # shuffle buffers are lost when resuming".
    for step in chain.from_iterable(map(steps_of_stream, streams)):
        if type(step).__name__ == "BufferShuffledExamplesIterable":
            return "their state_dict omits the contents of the shuffle buffer"
    parts = _parts_of(owner, source)
    for data in also_read:
        if parts & _parts_of(data, getattr(data, "dataset", None)):
            return "evaluations also read them, which changes their state"
    return None


def _parts_of(*data: Any) -> set[int]:
    """Return the ids of data, the streams in them, and their steps, which may hold the state."""
    streams = _streams_in(*data)
    steps = chain.from_iterable(map(steps_of_stream, filter(_is_streaming_dataset, streams)))
    return {id(part) for part in (*data, *streams, *steps) if part is not None}


def _streaming_datasets_in(*data: Any) -> list[Any]:
    return list(filter(_is_streaming_dataset, _streams_in(*data)))


def _streams_in(*data: Any) -> list[Any]:
    """Return the streams among data, and those inside them, such as the rows of a grouping stream."""
    streams: dict[int, Any] = {}
    pending = list(data)
    while pending:
        owner = pending.pop()
        if _is_stream(owner):
            streams[id(owner)] = owner
        if _is_streaming_dataset(owner):  # its parts are its steps
            continue
        for part in getattr(owner, "__dict__", {}).values():
            if _is_stream(part) and id(part) not in streams:  # a stream may refer to the one around it
                pending.append(part)
    return list(streams.values())


def _is_stream(data: Any) -> bool:
    return isinstance(data, IterableDataset) or _is_streaming_dataset(data)


def _is_streaming_dataset(data: Any) -> bool:
    datasets = sys.modules.get("datasets")  # not imported, it made no data
    return datasets is not None and isinstance(data, datasets.IterableDataset)


class StreamSource(SequentialSource):
    """Micro-batches of an iterable: each process keeps its part of every global batch.

    So the order is defined, all processes end together, and each sample is trained on once. With several workers, this
    depends on the dataset: as torch requires, each worker's copy has to yield its own part (`get_worker_info`).
    Data that is not a torch IterableDataset is not aware of workers, and gets at most one.
    """

    _kind = "stream"
    _unit = "samples"

    def __init__(self, data: Any, options: SourceOptions) -> None:
        if not isinstance(data, IterableDataset):
            options = replace(options, num_workers=min(options.num_workers, 1))
        source = data
        if options.group_stream is not None:
            data = options.group_stream(data, options.seed)
        self._data = data
        dataset = data
        if not isinstance(data, IterableDataset):  # a DataLoader would read any other class by index
            dataset = _RemainingSamples(data)
        self._readers = _count_readers(options.num_workers)
        self._global_batch_size = _plan_part(0, options).samples_together
        self._state = StreamState(data, source=source, num_workers=options.num_workers, also_read=options.also_read)
        self._rows: Rows = {}  # those at the beginning of the epoch
        # A stream may say on which settings the order of its samples depends; they are then known by their positions.
        self._order: Any = None
        if hasattr(data, "describe_order"):
            self._order = data.describe_order()
        self._sample_positions: deque[tuple[int, range]] = deque(maxlen=_NUM_SAMPLE_POSITIONS)  # by micro-batch
        self._is_read_again = False
        # Each of several readers may end with a short batch, so the number of batches does not follow from the length.
        length = None
        if self._readers == 1:
            length = length_of(data)
        multiple = 1
        if options.drop_last:
            multiple = self._global_batch_size
        dataloader = self._make_dataloader(dataset, options)
        super().__init__(dataloader, options, UserRandomness(data), length, multiple=multiple)

    def _make_dataloader(self, data: IterableDataset[Any], options: SourceOptions) -> DataLoader[Any]:
        torch_options = options.torch_options()
        torch_options["persistent_workers"] = False  # each epoch's workers start with the epoch's seed
        torch_options["collate_fn"] = _CollateParts(options, torch_options["collate_fn"])
        return DataLoader(data, batch_size=self._global_batch_size, drop_last=options.drop_last, **torch_options)

    def _choose_start(self, start: EpochStart) -> EpochStart:
        position = start.position
        self._rows = position.get("rows", {})
        if position.get("order") != self._order:
            got = "other weights or sources in a mixture"
            expected = "those with which the epoch began, because its data are streams"
            do = "resume with the same ones; they may change between epochs"
            raise cannot_resume(self._options, got, expected, do)
        if self._state.is_in(position):
            say_not_compared(self._options)
            return start
        is_same = position["reads"] == [[0, self._global_batch_size]] and position["readers"] == self._readers
        # Several workers take turns by batches: with other batches, their parts would be interleaved differently.
        if not is_same and max(self._readers, position["readers"]) > 1:
            readers, (_, size) = position["readers"], position["reads"][-1]
            got = f"{self._readers} workers and {self._global_batch_size} samples per global batch"
            expected = f"{readers} and {size}, as before: each of several workers reads a part of the stream"
            do = "resume with the same number of workers and processes; with at most one worker, any number can resume"
            raise cannot_resume(self._options, got, expected, do)
        self._say_reading_again(start, self._state.why_not or "their state was not saved because a worker read them")
        # Collating advances a worker's generators too, so it has to read and collate exactly what it read before.
        self._is_read_again = is_same and self.dataloader.num_workers > 0
        if self._is_read_again:
            return EPOCH_START
        return start

    def _read_micro_batches(self, epoch: int, start: EpochStart, plan: Plan | None) -> Iterator[ReadBatch]:
        # [first sample, samples per read] of each launch that has read a part of the epoch. A launch whose reads
        # continue those of the last one needs no entry: reading again can then use the same seeds.
        reads, size = list(start.position.get("reads", ())), self._global_batch_size
        if not (reads and reads[-1][1] == size and (start.consumed - reads[-1][0]) % size == 0):
            reads.append([start.consumed, size])
        constant: dict[str, Any] = {"kind": self._kind, "readers": self._readers, "reads": reads}
        if self._order is not None:
            constant["order"] = self._order
        dataloader = self.dataloader
        if start is not EPOCH_START:
            dataloader = self._read_remaining(epoch, start, plan)
        collate: Any = dataloader.collate_fn
        collate.is_first = True
        with self._state.restored(start.position):
            batches = self._compare_first(self._read(epoch, dataloader, start.consumed), start)
            constant |= {"rows": self._rows, "in_worker": self.dataloader.num_workers > 0}
            workers = _Workers(self._options, self._readers)
            index = start.micro_batch
            for (parts, size, rows), consumed in batches:
                workers.compare(rows)
                # Taken before the next read, because the state of a stream is that after its last sample read.
                position = {**constant, "samples": consumed, **self._state.take()}
                for part, batch in zip(_plan_part(size, self._options).cut(0), parts, strict=True):
                    yield self._make_micro_batch(index, part, batch, consumed - size), position
                    index += part.num_finished

    def _make_micro_batch(self, index: int, part: Part, batch: Any, begin: int) -> MicroBatch:
        """Return a part of a global batch, of which the first sample is number `begin` of the epoch."""
        if part.own:
            require_batch(batch, self._options)
        micro_batch = MicroBatch(index, batch, len(part.positions), len(part.own), is_partial=part.is_partial)
        if self._order is not None:
            micro_batch.indices = range(begin + part.own.start, begin + part.own.stop)
            self._sample_positions.append((index, micro_batch.indices))
        micro_batch.num_finished, micro_batch.ends_batch = part.num_finished, part.ends_batch
        micro_batch.unit = None if part.unit is None else begin + part.unit
        return micro_batch

    def _compare_first(
        self, read: Iterator[tuple[_GlobalBatch, int]], start: EpochStart
    ) -> Iterator[tuple[_GlobalBatch, int]]:
        """Compare the first batch between processes that share the stream, and with the one read before.

        Nothing extra is read: some streams can be read only once.
        """
        first = next(read, None)
        if first is None:
            require_same_rows(self._options, None)  # also without samples: the other processes compare theirs
            return read
        require_same_rows(self._options, first[0].rows)
        if start is EPOCH_START:
            if self._is_read_again:
                compare_rows({"rows": self._rows}, first[0].rows, self._options, is_in_epoch=True)
            self._rows, self._is_read_again = first[0].rows, False
        return chain([first], read)

    def samples_of(self, epoch: int, index: int) -> list[int] | None:
        """Return the positions in the epoch of this process's samples, if the stream's order is known."""
        if epoch == self._epoch:
            for micro_batch, positions in self._sample_positions:
                if micro_batch == index:
                    return list(positions)
        return None

    def _size_of(self, batch: _GlobalBatch) -> int:
        return batch.size

    def _read_remaining(self, epoch: int, start: EpochStart, plan: Plan | None) -> DataLoader[Any]:
        options, reads = self._options, start.position["reads"]
        skipped: list[range] = []
        if not self._state.is_in(start.position):
            # Each launch read until the next one began.
            ends = [begin for begin, _ in reads[1:]] + [start.consumed]
            for (begin, size), end in zip(reads, ends, strict=True):
                skipped.append(range(begin, end, size))
        num_remaining = None
        if plan is not None:
            num_remaining = plan.num_samples - start.consumed
        seed_at = partial(derive_seed, options.seed, options.purpose, epoch)
        remaining = _RemainingSamples(self._data, skipped, num_remaining, seed_at)
        is_in_worker = self.dataloader.num_workers > 0  # with different generators
        if not (is_in_worker or start.position.get("in_worker") or self._state.is_in(start.position)):
            remaining.check = partial(compare_rows, start.position, options=options, is_in_epoch=True)
        return self._make_dataloader(remaining, options)


def _count_readers(num_workers: int) -> int:
    return max(num_workers, 1)  # one worker reads in the same order as none


@dataclass(eq=False)
class _RemainingSamples(IterableDataset[Any]):
    """The samples of an iterable after skipped ones.

    Skipped samples are read under their original seeds, so that a stream that draws from the global generators has the
    same order again. In a worker, the generators advance without further seeding.
    """

    data: Any
    skipped: list[range] = field(default_factory=list)  # the positions of the earlier reads, by launch
    num_remaining: int | None = None  # maximum number of samples that follow
    seed_at: Callable[[int], int] | None = None  # the seed of the read that begins at a position
    check: Callable[[Rows], None] | None = None  # of the first samples

    def __iter__(self) -> Iterator[Any]:
        if self.skipped:
            return self._skip(iter(self.data))
        return islice(self.data, self.num_remaining)

    def _skip(self, samples: Iterator[Any]) -> Iterator[Any]:
        for reads in self.skipped:
            for position in reads:
                self._seed(position)
                read = islice(samples, min(reads.step, reads.stop - position))
                if position == 0 and self.check is not None:
                    self.check(rows_of_samples(list(read)))
                deque(read, maxlen=0)  # reads what `check` has not
        self._seed(self.skipped[-1].stop)
        yield from islice(samples, self.num_remaining)

    def _seed(self, position: int) -> None:
        if self.seed_at is not None and get_worker_info() is None:
            seed_generators(self.seed_at(position))


class _GlobalBatch(NamedTuple):
    """The result of collating a global batch; a tuple, so that workers can send it.

    Attributes:
        parts: This process's parts; None for one without samples.
        size: Samples in the global batch.
        rows: In the first batch of each reader, the fingerprints of some of them.
    """

    parts: list[Any]
    size: int
    rows: Rows


def _plan_part(num_samples: int, options: SourceOptions) -> Plan:
    """Plan a part of a stream."""
    return options.plan(num_samples, options.batch_size, options.shard)


@dataclass
class _CollateParts:
    """Collates this process's parts of a global batch."""

    options: SourceOptions
    collate: Callable[[Any], Any]
    is_first: bool = True

    def __call__(self, samples: list[Any]) -> _GlobalBatch:
        rows: Rows = {}
        if self.is_first:
            rows = rows_of_samples(samples)
        self.is_first = False
        parts = [self._collate_part(samples, part) for part in _plan_part(len(samples), self.options).cut(0)]
        return _GlobalBatch(parts, len(samples), rows)

    def _collate_part(self, samples: list[Any], part: Part) -> Any:
        own = samples[part.own.start : part.own.stop]
        if not own:  # a short last batch may have no sample for this process
            return None
        if part.unit is None:
            return self.collate(own)
        # Every process has read all samples, and has the same generators now, but collates others.
        with preserve_generators():
            seed_generators(derive_seed(int(torch.randint(2**62, ())), "collate", part.unit))
            return self.collate(own)


class _Workers:
    """Detects that every worker reads all of a stream, so that every sample is repeated."""

    def __init__(self, options: SourceOptions, number: int) -> None:
        self._options = options
        self._number = number
        self._first: Rows = {}

    def compare(self, rows: Rows) -> None:
        """Compare the first batches of workers; `rows` of other batches are empty.

        Raises:
            DataError: They are the same, in an evaluation or a prediction.
        """
        if self._number == 1 or not rows:
            return
        fingerprints = list(rows.values())
        # Samples that are all alike, such as zeros in a test, do not show a repetition.
        if rows != self._first or fingerprints.count(fingerprints[0]) == len(fingerprints):
            self._first = self._first or rows
            return
        where = f"the {self._options.kind} data, a stream read by {self._number} workers"
        got = f"the same samples from each worker, so each sample appears {self._number} times"
        do = "yield only the worker's part in __iter__ (torch.utils.data.get_worker_info().id), or use one worker"
        error = fail(DataError, where, got=got, expected="a different part of the data from each worker", do=do)
        if self._options.purpose != "train":
            raise error
        warn_once(str(error), about=where)


class UserLoaderSource(SequentialSource):
    """Micro-batches of a DataLoader that can only be read from the start: batch i goes to process i mod processes.

    Such a loader reads a stream, has no batches or batches without a length, or overrides `__iter__`.
    """

    _kind = "DataLoader that is read through"
    _unit = "batches"

    def __init__(self, user_loader: DataLoader[Any], options: SourceOptions) -> None:
        is_stream = isinstance(user_loader.dataset, IterableDataset)
        is_plain = type(user_loader).__iter__ is DataLoader.__iter__
        self._reader = user_loader
        if is_plain and not hasattr(user_loader, "state_dict"):
            # A copy, which counts the samples of each batch and starts workers for each epoch: the user's loader stays
            # unchanged, even if something else reads it meanwhile.
            collate = user_loader.collate_fn
            # Without either, the DataLoader passes each sample to its function alone.
            if user_loader.batch_sampler is not None or user_loader.batch_size is not None:
                collate = _CollateAndCount(collate)
            if user_loader.persistent_workers:
                warn_once(
                    f"persistent_workers=True has no effect on the DataLoader of the {options.kind} data: persistent "
                    "workers of a stream would read in a different order after a resume",
                    about=f"persistent workers: {options.kind}",
                )
            self._reader = copy.copy(user_loader)
            # Through vars: DataLoader.__setattr__ rejects changes after construction.
            vars(self._reader).update(collate_fn=collate, persistent_workers=False, _iterator=None)
        readers = 1
        if is_stream:  # each worker reads its own copy
            readers = _count_readers(user_loader.num_workers)
        self._cut = {"batch_size": user_loader.batch_size, "readers": readers}
        if is_stream and is_plain:
            dataset, num_workers = user_loader.dataset, user_loader.num_workers
            self._state = StreamState(dataset, num_workers=num_workers, also_read=options.also_read)
        else:
            self._state = StreamState(user_loader, source=user_loader.dataset, also_read=options.also_read)
        self._rows: Rows = {}  # those at the beginning of the epoch
        length = None
        if readers == 1:
            length = length_of(user_loader)
        randomness = UserRandomness(user_loader, user_loader.dataset, user_loader.batch_sampler)
        # The user's batches are counted: one for each process in a micro-batch.
        self._has_units = options.plan is not Plan
        options = replace(options, batch_size=1, micro_batches_per_batch=1, plan=Plan)
        super().__init__(user_loader, options, randomness, length)

    def _choose_start(self, start: EpochStart) -> EpochStart:
        before = {name: start.position[name] for name in self._cut}
        if before != self._cut:  # batch numbers would mean other samples
            raise cannot_resume(self._options, f"a DataLoader with {self._cut}", f"{before}, as before")
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
                global_batch = list(islice(batches, shard.count))
                if index == start.micro_batch:
                    rows = rows_of_samples([_content(batch) for batch, _ in global_batch])
                    require_same_rows(self._options, rows or None)
                if not global_batch:
                    return
                for batch, _ in global_batch:
                    if isinstance(batch, _Counted):
                        workers.compare(batch.rows)
                micro_batch = MicroBatch(index, None, own_samples=0, is_partial=len(global_batch) < shard.count)
                if shard.index < len(global_batch):
                    batch, micro_batch.own_samples = global_batch[shard.index][0], None
                    if isinstance(batch, _Counted):
                        batch, micro_batch.own_samples = batch.batch, batch.samples
                    micro_batch.batch = batch
                    require_batch(micro_batch.batch, self._options)
                if self._has_units:
                    micro_batch.num_finished = len(global_batch)
                    micro_batch.unit = index * shard.count + shard.index
                position = {"kind": self._kind, **self._cut, "rows": self._rows, "num_workers": num_workers}
                position |= {"batches": global_batch[-1][1], **self._state.take()}
                yield micro_batch, position

    def _batches(self, epoch: int, start: EpochStart, plan: Plan | None) -> Iterator[tuple[Any, int]]:
        read_before = 0
        if self._state.is_in(start.position):
            read_before = start.consumed
        end = None
        if plan is not None and self._options.is_limited:  # without a limit, a wrong length would not be noticed
            end = plan.num_samples - read_before
        if isinstance(self._reader.collate_fn, _CollateAndCount):
            self._reader.collate_fn.is_first = True
        read = self._read(epoch, self._reader, read_before)
        if read_before == 0:
            read = self._compare_first(read, start)
        return islice(read, start.consumed - read_before, end)

    def _compare_first(self, read: Iterator[tuple[Any, int]], start: EpochStart) -> Iterator[tuple[Any, int]]:
        """Compare the first batch of an epoch that is read again with the one read before."""
        first = next(read, None)
        if first is None:
            return read
        batch = first[0]
        rows: Rows = {}
        if isinstance(batch, _Counted):
            rows = batch.rows
        if not rows:
            rows = rows_of_samples([_content(batch)])
        if start is EPOCH_START:
            self._rows = rows
        elif start.position.get("num_workers") == self._reader.num_workers:  # else they draw differently
            # A single row does not show whether it is only augmented.
            compare_rows(start.position, rows, self._options, is_in_epoch=len(rows) > 1)
        return chain([first], read)

    def _size_of(self, batch: Any) -> int:
        return 1


def _content(batch: Any) -> Any:
    if isinstance(batch, _Counted):
        return batch.batch
    return batch


class _Counted(NamedTuple):
    """A batch, and the number of samples it was made from; a tuple, so that workers can send it.

    Attributes:
        samples: None if the DataLoader does not make batches of samples.
        rows: Fingerprints of the samples in the first batch of each reader.
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
        batch = self.collate(samples)
        rows: Rows = {}
        if is_first:
            rows = rows_of_samples(samples)
        return _Counted(batch, len(samples), rows)
