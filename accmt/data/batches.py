"""What a loader yields, and how many samples a batch holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from accmt.data.fetching import BadSample
from accmt.errors import DataError, explain
from accmt.messages import warn_once

_ARRAYS = (torch.Tensor, np.ndarray)
_MAX_SHAPES = 6
_COUNT_YOURSELF = "if the collate function drops samples or adds some, define get_batch_size in the module"


class Cut(NamedTuple):
    """What a micro-batch is of whose samples were cut by a budget of tokens.

    Attributes:
        number: From 0 in its window.
        num_finished: Batches as planned that end with it: all of its window with the last, else none.
        places: For each sample of this process's batch the index of the batch in which it was read, and its place in
            it, in an evaluation; None in training.
        num_targets: Tokens with a label in a row of packed documents, which its loss is the mean of; None elsewhere.
        samples: The positions in the data of the samples of this process's batch, in an evaluation; None for data
            without indices.
    """

    number: int
    num_finished: int
    places: list[tuple[int, int]] | None = None
    num_targets: int | None = None
    samples: list[int] | None = None


@dataclass(slots=True)
class MicroBatch:
    """One batch on every process.

    Attributes:
        index: From 0 in its epoch; of one that was cut, that of the first batch of its window.
        batch: This process's batch; None if it has none.
        num_samples: Samples over all processes; None where only the batches show it.
        own_samples: Samples that were collated into this process's batch; None where only the batch shows it. The batch
            may hold another number of them: `find_batch_size`.
        is_last: Whether the epoch ends with this micro-batch.
        is_partial: Whether some process has no batch; every process knows.
        bad: Samples of this process that were skipped, because they could not be read.
        num_bad: Those of all processes, in training.
        cut: What it is of, where samples were cut by a budget of tokens; None for a batch as planned.
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

    @property
    def place(self) -> tuple[int, ...]:
        """Where it is in its epoch."""
        return (self.index,) if self.cut is None else (self.index, self.cut.number)

    @property
    def is_unread(self) -> bool:
        """Whether this process has no batch because none of its samples could be read."""
        return self.batch is None and bool(self.bad)

    @property
    def num_finished(self) -> int:
        """Batches as planned that end with it."""
        return 1 if self.cut is None else self.cut.num_finished

    @property
    def places(self) -> list[tuple[int, int]] | None:
        """Where its samples were read, where they do not stand as they were read."""
        return None if self.cut is None else self.cut.places


def find_batch_size(batch: Any, collated: int | None = None) -> int | None:
    """Return the number of samples that a batch holds.

    That is the first dimension of its tensors and arrays, else the length of its lists; for a batch of another class,
    that of its attributes. A collate function may drop samples or add some: then the number that the batch holds
    counts. `collated` identifies batches whose first dimension is something else, such as time. Where it counts
    although the batch does not show it, a warning says so.

    Args:
        batch: The batch.
        collated: The number of samples from which it was made; None if unknown.

    Returns:
        The number of samples; None where neither the batch nor `collated` shows it.

    Raises:
        DataError: The batch contradicts itself or `collated`.
    """
    sizes: set[int] = set()
    _add_sizes(batch, sizes)
    if len(sizes) == 1 and (collated is None or collated in sizes):
        return sizes.pop()
    if not sizes:
        return _size_without_arrays(batch, collated)
    if collated is not None and (collated in sizes or _is_list_of(batch, collated, sizes)):
        _warn_if_doubtful(batch, collated)
        return collated
    if len(sizes) > 1 or _may_be_other_than_samples(batch, collated):
        raise _unknown_size(batch, collated)
    return sizes.pop()


def _add_sizes(batch: Any, sizes: set[int]) -> None:
    """Add the first dimensions of all tensors and arrays; called for each batch, where a generator costs too much."""
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


def _size_without_arrays(batch: Any, collated: int | None) -> int | None:
    lengths = list(_lengths_of_lists(batch))
    if lengths:
        return collated if collated in lengths else lengths[0]
    if hasattr(batch, "__dict__") and not isinstance(batch, Mapping):  # an object with tensors as attributes
        return find_batch_size(vars(batch), collated)
    if collated is not None:
        warn_once(
            f"a batch does not show how many samples it holds, so those that were collated count, here {collated}; "
            f"{_COUNT_YOURSELF}",
            about="samples that no batch shows",
        )
    return collated


def _warn_if_doubtful(batch: Any, collated: int) -> None:
    """Warn once that first dimensions differ: of things that are no samples, or because samples were dropped."""
    others = {len(array) for array in _arrays_in(batch) if collated not in array.shape[:2]}
    if others and not _is_list_of(batch, collated, set()):
        warn_once(
            f"the samples that were collated count, here {collated}, although the batch has tensors whose first "
            f"dimension is {', '.join(map(str, sorted(others)[:_MAX_SHAPES]))}; {_COUNT_YOURSELF}",
            about="samples beside other first dimensions",
        )


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

    A pair of inputs and targets is no list of two samples: their tensors agree on a first dimension.
    """
    parts = [value for value in _values_of(batch) if isinstance(value, list | tuple)]
    is_pair = len(sizes) == 1 and any(isinstance(value, _ARRAYS) for value in _values_of(batch))
    is_list_of_samples = isinstance(batch, list) and not is_pair
    return any(len(part) == collated for part in parts) or (is_list_of_samples and len(batch) == collated)


def _may_be_other_than_samples(batch: Any, collated: int | None) -> bool:
    """Return whether the only first dimension may be something else than samples.

    Time, where the samples are the second dimension; one row into which all samples were packed; or the channels of
    images in a list.
    """
    arrays = list(_arrays_in(batch))
    if all(array.ndim > 1 and array.shape[1] == collated for array in arrays):
        return True
    widths = {array.shape[1] if array.ndim > 1 else 1 for array in arrays}
    is_one_row = arrays[0].shape[0] == 1 and len(widths) == 1 and widths.pop() > 1
    are_images = isinstance(batch, list) and len(batch) == collated and all(array.ndim > 2 for array in arrays)
    return is_one_row or are_images


def _unknown_size(batch: Any, collated: int | None) -> DataError:
    shapes = [list(array.shape) for array in _arrays_in(batch)]
    shown = ", ".join(map(str, shapes[:_MAX_SHAPES])) + (", ..." if len(shapes) > _MAX_SHAPES else "")
    made = "" if collated is None else f", made from {collated} samples"
    return DataError(
        explain(
            "the number of samples in a batch, the weight of its loss",
            f"a batch of shapes {shown}{made}",
            "the samples as the first dimension of every tensor",
            "define get_batch_size(self, batch) in the module, for example as `return batch[1].shape[0]`",
        )
    )
