"""Micro-batches, and the number of samples in a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from accmt.data.fetching import BadSample
from accmt.data.seeding import derive_seed
from accmt.errors import DataError, explain
from accmt.messages import warn_once

_ARRAYS = (torch.Tensor, np.ndarray)
_MAX_SHAPES = 6
_COUNT_YOURSELF = "if the collate function drops or adds samples, define get_batch_size in the module"


class Cut(NamedTuple):
    """The origin of a micro-batch that was split by a token budget.

    Attributes:
        number: Its number in the accumulation window, from 0.
        num_finished: Planned batches that end with it: all of the window for the last micro-batch, else none.
        places: In an evaluation, for each sample of this process's batch, the index of the batch it was read in and
            its position there; None in training.
        num_targets: Labeled tokens in a row of packed documents, over which its loss is averaged; None otherwise.
        samples: The positions in the data of this process's samples; None for data without indices.
    """

    number: int
    num_finished: int
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
        num_samples: Samples over all processes; None if only the batches show it.
        own_samples: Samples collated into this process's batch; None if only the batch shows it. The batch may hold a
            different number: see `find_batch_size`.
        is_last: Whether the epoch ends with this micro-batch.
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
    is_last: bool = False
    is_partial: bool = False
    bad: tuple[BadSample, ...] = ()
    num_bad: int = 0
    cut: Cut | None = None
    indices: Sequence[int] | np.ndarray[Any, Any] | None = field(default=None, compare=False, repr=False)
    borrowed: MicroBatch | None = None
    num_lenders: int | None = None

    @property
    def samples(self) -> Sequence[int] | np.ndarray[Any, Any] | None:
        """The positions in the data of the samples in this process's batch; None if unknown, or without a batch."""
        if self.cut is not None:
            return self.cut.samples
        if self.batch is None or self.indices is None or not self.bad:
            return None if self.batch is None else self.indices
        skipped = {bad.index for bad in self.bad}
        return [int(index) for index in self.indices if index not in skipped]

    @property
    def place(self) -> tuple[int, ...]:
        """Its position in the epoch."""
        return (self.index,) if self.cut is None else (self.index, self.cut.number)

    def seed_of_step(self, seed: int, purpose: str, *epoch: int, data_index: int) -> int:
        """Return the seed for the step on this process's batch: a function of its place in the run alone."""
        number = () if self.cut is None else (self.cut.number,)
        return derive_seed(seed, purpose, *epoch, self.index, data_index, *number)

    @property
    def is_unread(self) -> bool:
        """Whether this process has no batch because none of its samples could be read."""
        return self.batch is None and bool(self.bad)

    @property
    def num_finished(self) -> int:
        """The number of planned batches that end with it."""
        return 1 if self.cut is None else self.cut.num_finished

    @property
    def places(self) -> list[tuple[int, int]] | None:
        """Where its samples were read; None if they are still in that order."""
        return None if self.cut is None else self.cut.places


def find_batch_size(batch: Any, collated: int | None = None) -> int | None:
    """Return the number of samples in a batch.

    This is the first dimension of its tensors and arrays, or else the length of its lists; for another class, that of
    its attributes. If a collate function drops or adds samples, the number in the batch counts. `collated` identifies
    batches whose first dimension is something else, such as time. A warning is logged if `collated` is used although
    the batch does not confirm it.

    Args:
        batch: The batch.
        collated: The number of samples it was made from; None if unknown.

    Returns:
        The number of samples; None if neither the batch nor `collated` shows it.

    Raises:
        DataError: The batch contradicts itself or `collated`.
    """
    sizes: set[int] = set()
    _add_sizes(batch, sizes)
    if len(sizes) == 1 and (collated is None or collated in sizes):
        return sizes.pop()
    if not sizes:  # no tensors or arrays
        lengths = list(_lengths_of_lists(batch))
        if lengths:
            return collated if collated in lengths else lengths[0]
        if hasattr(batch, "__dict__") and not isinstance(batch, Mapping):  # an object with tensors as attributes
            return find_batch_size(vars(batch), collated)
        if collated is not None:
            warn_once(
                "the batch size cannot be read from a batch, so the number of collated samples is used (here "
                f"{collated}); {_COUNT_YOURSELF}",
                about="samples that no batch shows",
            )
        return collated
    if collated is not None and (collated in sizes or _is_list_of(batch, collated, sizes)):
        # Other first dimensions are not those of samples, or samples were dropped.
        others = {len(array) for array in _arrays_in(batch) if collated not in array.shape[:2]}
        if others and not _is_list_of(batch, collated, set()):
            warn_once(
                f"the number of collated samples is used as batch size (here {collated}), although the batch has "
                f"tensors with a first dimension of {', '.join(map(str, sorted(others)[:_MAX_SHAPES]))}; "
                f"{_COUNT_YOURSELF}",
                about="samples beside other first dimensions",
            )
        return collated
    if len(sizes) > 1 or _may_be_other_than_samples(batch, collated):
        shapes = [list(array.shape) for array in _arrays_in(batch)]
        shown = ", ".join(map(str, shapes[:_MAX_SHAPES])) + (", ..." if len(shapes) > _MAX_SHAPES else "")
        made = "" if collated is None else f", made from {collated} samples"
        raise DataError(
            explain(
                "the number of samples in a batch, which weights its loss",
                f"a batch of shapes {shown}{made}",
                "the samples as the first dimension of every tensor",
                "define get_batch_size(self, batch) in the module, for example with `return batch[1].shape[0]`",
            )
        )
    return sizes.pop()


def _add_sizes(batch: Any, sizes: set[int]) -> None:
    """Add the first dimensions of all tensors and arrays; called for each batch, so not a generator, for speed."""
    if isinstance(batch, _ARRAYS):
        if batch.ndim:
            sizes.add(len(batch))
        return
    for value in _values_of(batch) if type(batch) not in (list, tuple) else batch:
        if type(value) is torch.Tensor and value.ndim:  # as in most batches: without a further call
            sizes.add(value.size(0))  # a nested tensor has no shape
        else:
            _add_sizes(value, sizes)


def _arrays_in(batch: Any) -> Iterator[Any]:
    if isinstance(batch, _ARRAYS):
        if batch.ndim:
            yield batch
        return
    for value in _values_of(batch):
        yield from _arrays_in(value)


def _values_of(batch: Any) -> Iterable[Any]:
    if isinstance(batch, (list, tuple)):
        return batch
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return batch
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, one.name) for one in fields(batch)]
    return ()


def _lengths_of_lists(batch: Any) -> Iterator[int]:
    """Yield the lengths of the innermost lists."""
    found = False
    for value in _values_of(batch):
        for length in _lengths_of_lists(value):
            found = True
            yield length
    if not found and isinstance(batch, Sequence) and not isinstance(batch, str | bytes) and batch:
        yield len(batch)


def _is_list_of(batch: Any, collated: int, sizes: set[int]) -> bool:
    """Return whether the samples are in a list: the batch itself, or one of its parts.

    A pair of inputs and targets is not a list of two samples: their tensors share a first dimension.
    """
    parts = [value for value in _values_of(batch) if isinstance(value, list | tuple)]
    is_pair = len(sizes) == 1 and any(isinstance(value, _ARRAYS) for value in _values_of(batch))
    is_list_of_samples = isinstance(batch, list) and not is_pair
    return any(len(part) == collated for part in parts) or (is_list_of_samples and len(batch) == collated)


def _may_be_other_than_samples(batch: Any, collated: int | None) -> bool:
    """Return whether the only first dimension may not be that of samples.

    It may be time, with samples as the second dimension; one row that packs all samples; or the channels of images in
    a list.
    """
    arrays = list(_arrays_in(batch))
    if all(array.ndim > 1 and array.shape[1] == collated for array in arrays):
        return True
    widths = {array.shape[1] if array.ndim > 1 else 1 for array in arrays}
    is_one_row = arrays[0].shape[0] == 1 and len(widths) == 1 and widths.pop() > 1
    are_images = isinstance(batch, list) and len(batch) == collated and all(array.ndim > 2 for array in arrays)
    return is_one_row or are_images
