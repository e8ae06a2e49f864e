"""What sources of data that can only be read from the start have in common: every process reads all of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from accmt.data.batches import MicroBatch
from accmt.data.options import SourceOptions, require_not_empty, require_same_end
from accmt.data.position import EPOCH_START, EpochStart, plan_epoch, read_start
from accmt.data.samplers import UserRandomness
from accmt.data.seeding import derive_seed, seed_generators
from accmt.data.sharding import Plan
from accmt.data.workers import end_workers, note_dead_worker, start_reading
from accmt.errors import DataError, explain
from accmt.messages import say_once, warn_once

_END = object()
_Kept = tuple[int, dict[str, Any]]  # the index of a micro-batch, and the position after it
ReadBatch = tuple[MicroBatch, dict[str, Any]]  # a micro-batch, and the position after it, taken before reading ahead
_KEPT_POSITIONS = 4


class SequentialSource:
    """Micro-batches of what a DataLoader yields, in the order in which it comes.

    Args:
        dataloader: What is read.
        options: Seed, shard, limit, and the size of batches in what is counted: samples, or the user's batches.
        randomness: Of what draws while it is read.
        length: What an epoch has, before limits; None if unknown.
        multiple: At the end, what is beyond a multiple of this is dropped; 1 drops nothing.
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
        self._length = _bound(length, options)
        self._multiple = multiple
        self._start = EPOCH_START
        self._epoch: int | None = None
        self._kept: deque[_Kept] = deque(maxlen=_KEPT_POSITIONS)
        self._reading: Iterator[Any] = iter(())
        self._arrange(EPOCH_START, 0)
        if options.skips_bad:
            kind = f"the {options.kind} data, which can only be read from the start"
            why = "an iterator that has raised an error cannot continue; catch errors where they are raised"
            warn_once(f'failures={{"on_bad_sample": "skip"}} has no effect on {kind}: {why}', about=kind)

    def samples_in(self, first: int, last: int) -> int | None:
        return None  # known only once they are read

    def micro_batches(self, epoch: int, first: int = 0) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch from `first` on; what comes before is read too unless it is resumed."""
        start = self._start.of(epoch, first)
        plan = self._arrange(start, first)
        num_micro_batches = None if plan is None else plan.num_micro_batches - start.micro_batch
        is_empty = start is EPOCH_START and num_micro_batches != 0
        self._keep_only(start)
        self._epoch = epoch
        with self._randomness.of_epoch(epoch):
            read = self._ending_together(self._read_micro_batches(epoch, start, plan), start.consumed)
            planned = self._as_planned(read, num_micro_batches)
            for micro_batch, position in _with_last_marked(planned):
                is_empty = False
                self._kept.append((micro_batch.index, position))
                if micro_batch.index >= first:
                    yield micro_batch
        got = "nothing to read (an iterator can be read only once: pass something that can be iterated again)"
        require_not_empty(not is_empty, self._options, got)

    def _ending_together(self, micro_batches: Iterator[ReadBatch], consumed: int) -> Iterator[ReadBatch]:
        """Yield micro-batches; at one that is not full, and at the end, all processes must have read as much."""
        full = self._options.batch_size * self._options.shard.count
        for micro_batch, position in micro_batches:
            before, consumed = consumed, position[self._unit]
            if consumed - before < full:
                require_same_end(self._options, f"{consumed} {self._unit}")
            yield micro_batch, position
        require_same_end(self._options, f"{consumed} {self._unit}")

    def _as_planned(self, micro_batches: Iterator[ReadBatch], num_micro_batches: int | None) -> Iterator[ReadBatch]:
        """Yield as many micro-batches as are planned, and warn where the data's `__len__` is wrong."""
        num_read, position = 0, None
        for micro_batch, position in islice(micro_batches, num_micro_batches):
            num_read += 1
            yield micro_batch, position
        if self._claimed_length is None or num_micro_batches is None or position is None:
            return
        if num_read < num_micro_batches:
            consequence = "what is planned from it, such as the LR scheduler, is too long"
            self._warn_of_length(f"{position[self._unit]}", consequence)
        elif not self._options.is_limited and next(micro_batches, None) is not None:
            self._warn_of_length("more", "the rest is left out of each epoch")

    def _warn_of_length(self, number: str, consequence: str) -> None:
        what = f"the {self._options.kind} data claim to have {self._claimed_length} {self._unit}"
        warn_once(f"{what}, and have {number}: {consequence}; correct their __len__", about=f"{what} falsely")
        self._claimed_length = None  # warned: nothing need be read again to see it

    def samples_of(self, epoch: int, index: int) -> list[int] | None:
        return None  # what is only read through has no indices

    def set_epoch_again(self) -> None:
        if self._epoch is not None:
            self._randomness.call_set_epoch(self._epoch)

    def end_workers(self) -> None:
        end_workers(self.dataloader, self._reading)

    def position(self, epoch: int, num_micro_batches: int) -> dict[str, Any]:
        """Return the position after `num_micro_batches` of an epoch, of which the last was just yielded.

        Raises:
            LookupError: More micro-batches were yielded since than positions are kept.
        """
        if num_micro_batches == 0:
            return {"kind": self._kind, self._unit: 0}
        for index, position in reversed(self._kept):
            if index < num_micro_batches:
                return position
        raise LookupError(
            f"the position after micro-batch {num_micro_batches} of epoch {epoch} is no longer kept: ask for it sooner"
        )

    def resume_from(self, epoch: int, first_micro_batch: int, position: Mapping[str, Any]) -> None:
        """Resume `epoch` from the data's own state where they have one, else by reading again."""
        start = read_start(epoch, first_micro_batch, position, kind=self._kind, unit=self._unit, options=self._options)
        self._start = EPOCH_START if start is EPOCH_START else self._choose_start(start)
        self._keep_only(start)
        self._arrange(self._start, first_micro_batch)

    def _choose_start(self, start: EpochStart) -> EpochStart:
        """Return where reading begins: at `start`, or at the beginning of the epoch, skipping micro-batches."""
        raise NotImplementedError

    def _read_micro_batches(self, epoch: int, start: EpochStart, plan: Plan | None) -> Iterator[ReadBatch]:
        """Read all micro-batches from `start` on, each with the position of the data after it."""
        raise NotImplementedError

    def _size_of(self, batch: Any) -> int:
        """Return how much of what is counted the DataLoader yielded at once."""
        raise NotImplementedError

    def _read(self, epoch: int, dataloader: DataLoader[Any], consumed: int) -> Iterator[tuple[Any, int]]:
        """Yield each batch with the count after it; each is read under a seed of its own, whatever trains between."""
        seed, purpose = self._options.seed, self._options.purpose
        seed_generators(derive_seed(seed, purpose, epoch))
        if dataloader.persistent_workers:  # their generators would continue from the epoch before
            end_workers(dataloader, self._reading)
        batches = self._reading = start_reading(dataloader)
        while True:
            seed_generators(derive_seed(seed, purpose, epoch, consumed))
            batch = self._next(batches, epoch, consumed)
            if batch is _END:
                return
            consumed += self._size_of(batch)
            yield batch, consumed

    def _next(self, batches: Iterator[Any], epoch: int, consumed: int) -> Any:
        try:
            return next(batches, _END)
        except Exception as error:
            note_dead_worker(error, batches)
            where = f"the {self._options.kind} data, epoch {epoch + 1}, after {consumed} {self._unit}"
            got = f"{type(error).__name__}: {error}".partition("\n")[0]
            do = "fix it, or catch it where it is raised: an iterator that has raised an error cannot continue"
            error.add_note(explain(where, got, f"more {self._unit}, or the end of the data", do))
            raise

    def _arrange(self, start: EpochStart, first: int) -> Plan | None:
        if self._length is None:
            self.num_micro_batches: int | None = None
            return None
        plan = plan_epoch(self._length, self._options, multiple=self._multiple, start=start)
        self.num_micro_batches = max(plan.num_micro_batches, first)
        return plan

    def _keep_only(self, start: EpochStart) -> None:
        self._kept.clear()
        if start.position:
            self._kept.append((start.micro_batch - 1, dict(start.position)))

    def _say_reading_again(self, start: EpochStart, why: str) -> None:
        say_once(
            f"the {self._options.kind} data are read again from the beginning of the epoch, up to where it was "
            f"interrupted ({start.consumed} {self._unit}): {why}"
        )


def _bound(length: int | None, options: SourceOptions) -> int | None:
    """Return the length, else as much as the limit could ask for; None where nothing bounds an epoch."""
    if length is not None:
        require_not_empty(length, options, "a length of 0")
        return length
    if isinstance(options.limit, int):
        return max(options.limit, 1) * options.micro_batches_per_batch * options.batch_size * options.shard.count
    if options.limit < 1.0:
        got = f"a limit of {options.limit}, a fraction of data without a length"
        do = "a limit such as 100, or __len__ for the data"
        raise DataError(explain(f"the {options.kind} data", got, "a whole number of batches", do))
    return None


def _with_last_marked(micro_batches: Iterator[ReadBatch]) -> Iterator[ReadBatch]:
    """Read one micro-batch ahead, so that the last one can be marked."""
    held: ReadBatch | None = None
    for read in micro_batches:
        if held is not None:
            yield held
        held = read
    if held is not None:
        held[0].is_last = True
        yield held
