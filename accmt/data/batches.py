"""Micro-batches, and the number of samples in a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from accmt.data.fetching import BadSample
from accmt.data.seeding import derive_seed
from accmt.errors import DataError, fail


class Cut(NamedTuple):
    """The origin of a micro-batch that was split by a token budget.

    Attributes:
        number: Its number in the accumulation window, from 0.
        places: In an evaluation, for each sample of this process's batch, the index of the batch it was read in and
            its position there; None in training.
        num_targets: Labeled tokens in a row of packed documents, over which its loss is averaged; None otherwise.
        samples: The positions in the data of this process's samples; None for data without indices.
    """

    number: int
    places: list[tuple[int, int]] | None = None
    num_targets: int | None = None
    samples: list[int] | None = None


@dataclass(slots=True)
class MicroBatch:
    """One unit of a window: a batch on every process.

    Attributes:
        index: Its index in the epoch, from 0; for a split one, that of the first batch of its window.
        batch: This process's batch; None if it has none.
        borrowed: Another process's micro-batch, which a process without a batch runs in place; it counts nothing.
        num_lenders: The processes with a batch, where some have none; those that share a batch count as one.
        num_finished: Planned batches that end with it; if samples were split, all of the window for the last one, and
            none for the others.
        ends_batch: Whether it is the last of those that make a batch of all processes, where those are several.
        unit: Where its samples were planned, if its randomness follows from that alone, not from the process.
        num_samples: Samples over all processes; None if only the batches show it.
        own_samples: Samples collated into this process's batch; None if only the batch shows it.
        ending: Whether the epoch ends with this micro-batch; or a function that tells, for which data of unknown length
            read the next one: a stream may use the model, so they are asked after the optimizer step if possible.
            Processes: collective.
        is_partial: Whether some process has no batch; the same on every process.
        bad: Samples of this process that were skipped because they could not be read.
        num_bad: In training, the number of them over all processes.
        cut: Its origin if samples were split by a token budget; None for a batch as planned.
        indices: The positions in the data of the samples that this process read for it, including skipped ones; None
            for data without indices, or if samples were split.
    """

    index: int
    batch: Any
    num_samples: int | None = None
    own_samples: int | None = None
    ending: bool | Callable[[], bool] = False
    is_partial: bool = False
    indices: Sequence[int] | np.ndarray[Any, Any] | None = field(default=None, compare=False, repr=False)
    num_finished: int = 1
    ends_batch: bool = True
    unit: int | None = None
    bad: tuple[BadSample, ...] = ()
    num_bad: int = 0
    cut: Cut | None = None
    borrowed: MicroBatch | None = None
    num_lenders: int | None = None

    @property
    def is_last(self) -> bool:
        """Whether the epoch ends with this micro-batch.

        Processes: collective, until it is known.
        """
        if callable(self.ending):
            self.ending = self.ending()
        return self.ending

    @property
    def samples(self) -> Sequence[int] | np.ndarray[Any, Any] | None:
        """The positions in the data of the samples in this process's batch; None if unknown, or without a batch."""
        if self.cut is not None:
            return self.cut.samples
        if self.batch is None:
            return None
        if self.indices is None or not self.bad:
            return self.indices
        skipped = {bad.index for bad in self.bad}
        return [int(index) for index in self.indices if index not in skipped]

    def seed_of_step(self, seed: int, purpose: str, *epoch: int, data_index: int) -> int:
        """Return the seed for the step on this process's batch: a function of its place in the run alone."""
        # With the number, because micro-batches of one index would draw the same dropout.
        number = () if self.cut is None else (self.cut.number,)
        place = (self.index, data_index, *number) if self.unit is None else (self.unit,)
        return derive_seed(seed, purpose, *epoch, *place)

    @property
    def places(self) -> list[tuple[int, int]] | None:
        """Where its samples were read; None if they are still in that order."""
        if self.cut is None:
            return None
        return self.cut.places


ReadBatch = tuple[MicroBatch, dict[str, Any]]  # a micro-batch, and the position after it, taken before reading ahead


def read_when_needed(read_next: Callable[[], ReadBatch | None]) -> Iterator[ReadBatch]:
    """Yield what is read until there is nothing more.

    The next one is read only when it is asked for, or whether this one is the last: a stream may use the model.
    """
    following: list[ReadBatch | Exception | None] = []

    def has_ended() -> bool:
        if not following:
            try:
                following.append(read_next())
            except Exception as error:  # noqa: BLE001 - raised where it is needed, after the stages of the step
                following.append(error)
        return following[0] is None

    read = read_next()
    while read is not None:
        read[0].ending = has_ended
        try:
            yield read
        except GeneratorExit:
            read[0].ending = False  # else a reference cycle would keep the data open
            raise
        read[0].ending = has_ended()
        match following.pop():
            case Exception() as error:
                raise error
            case read:
                pass


class LargestBatch(NamedTuple):
    """The largest micro-batch of the data, or one of about that size.

    Attributes:
        batch: The batch.
        num_samples: Its number of samples.
        longest: The length of its longest sample.
    """

    batch: Any
    num_samples: int
    longest: int


def count_samples(batch: Any, collated: int | None) -> int:
    """Return the number of samples in a batch.

    accmt knows how many samples were collated, but a collate function may drop or split samples. So the first
    dimension of the first tensor has to confirm the number.

    Args:
        batch: The batch.
        collated: The number of samples it was made from; None if unknown, as for a batch that a stream yields whole.

    Raises:
        DataError: The batch does not confirm `collated`, or shows no number.
    """
    samples = first_dimension(batch)
    if samples is not None and collated in (None, samples):
        return samples
    # A guess here would weight the loss wrongly without any sign: packed rows, or `[time, batch]`.
    got = "a batch without tensors or lists"
    if samples is not None:
        got = f"a first dimension of {samples}"
    if collated is not None:
        got += f", in a batch of {collated} collated samples"
    raise fail(
        DataError,
        "the number of samples in a batch, which weights its loss",
        got=got,
        expected="the samples as the first dimension of the first tensor, as many as were collated",
        do="define get_batch_size(self, batch) in the module, for example with `return len(batch[1])`",
    )


def first_dimension(batch: Any) -> int | None:
    """Return the first dimension of the first tensor or array in a batch; without any, the length of its first list.

    Returns:
        The number; None if the batch has neither.
    """
    first = batch[0] if type(batch) in (list, tuple) and batch else batch
    if type(first) is torch.Tensor and first.ndim:  # as in most batches: without a further call
        return first.size(0)
    rows = _rows_of_first_tensor(batch)
    if rows is None:
        return _length_of_first_list(batch)
    return rows


def _rows_of_first_tensor(batch: Any) -> int | None:
    match batch:
        case torch.Tensor():
            if batch.ndim == 0:
                return None
            return batch.size(0)  # `size`: a nested tensor has no shape
        case np.ndarray():
            if batch.ndim == 0:
                return None
            return len(batch)
    for value in _values_of(batch):
        rows = _rows_of_first_tensor(value)
        if rows is not None:
            return rows
    return None


def _length_of_first_list(batch: Any) -> int | None:
    """Return the length of the first list that contains no other collection, such as a list of strings."""
    for value in _values_of(batch):
        length = _length_of_first_list(value)
        if length is not None:
            return length
    match batch:
        case str() | bytes():  # "positive" is no batch of 8
            return None
        case Sequence() if batch:
            return len(batch)
    return None


def _values_of(batch: Any) -> Iterable[Any]:
    match batch:
        case Mapping():
            return batch.values()
        case str() | bytes():  # whose characters are strings again, without end
            return ()
        case Sequence():
            return batch
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, part.name) for part in fields(batch)]
    return ()
