"""Lengths of samples in tokens, grouping by length for less padding, and the largest micro-batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset

from accmt.addons.token_batches.budget import TokenBudget
from accmt.data.samplers import TensorSampler, call_set_epoch
from accmt.data.seeding import derive_seed, seeded_generators
from accmt.errors import DataError, fail
from accmt.state import Stateful


def find_length(sample: Any, length_of: Callable[[Any], Any] | None = None) -> int:
    """Return the length of a sample: from `length_of` if given, else its "length", or that of its "input_ids".

    Raises:
        DataError: It has no length, or one that is not a non-negative whole number.
    """
    length = None if length_of is None else length_of(sample)
    length = _look_up(sample) if length is None else length
    if isinstance(length, torch.Tensor) and length.ndim == 0:
        length = length.item()
    if isinstance(length, int | np.integer) and not isinstance(length, bool) and length >= 0:
        return int(length)
    where = "the length of a sample, for max_tokens or group_by_length"
    do = 'add def length_of(self, sample): return len(sample["tokens"]) to the module, or remove these options'
    if length is not None:
        raise fail(DataError, where, got=f"{length!r}", expected="a whole number of at least 0", do=do)
    held = f"the entries {list(sample)}" if isinstance(sample, Mapping) else type(sample).__name__
    expected = '"length" or "input_ids" in each sample, or a length_of method in the module'
    raise fail(DataError, where, got=f"a sample without a length: {held}", expected=expected, do=do)


def _look_up(sample: Any) -> Any:
    if isinstance(sample, tuple) and sample:  # inputs and target
        return _look_up(sample[0])
    if not isinstance(sample, Mapping):
        return None
    if "length" in sample:
        return sample["length"]
    ids = sample.get("input_ids")
    if ids is None:
        return None
    return ids.shape[-1] if isinstance(ids, torch.Tensor | np.ndarray) else len(ids)


def known_lengths(
    data: Any, length_of: Callable[[Any], Any] | None = None, indices: Sequence[int] | None = None
) -> np.ndarray[Any, Any] | None:
    """Return the lengths of a dataset's samples if they are known without reading samples.

    They are known for a `datasets.Dataset` with a column "length" or "input_ids", a list or tuple of samples, a dataset
    with an attribute `lengths`, and a torch `Subset` of these.

    Args:
        data: The dataset.
        length_of: The module's `length_of`, if it has one; it needs the samples.
        indices: The samples to consider; None means all.

    Returns:
        The lengths `[samples]`; None if they are not known.
    """
    if isinstance(data, Subset):
        inner = data.indices if indices is None else [data.indices[index] for index in indices]
        return known_lengths(data.dataset, length_of, inner)
    if isinstance(data, list | tuple):
        chosen = data if indices is None else [data[index] for index in indices]
        return np.fromiter((find_length(sample, length_of) for sample in chosen), np.int64, len(chosen))
    if length_of is not None:
        return None
    datasets = sys.modules.get("datasets")  # if it is not imported, the data is not from it
    # A custom transform may create other columns, or other values, on read.
    if datasets is not None and isinstance(data, datasets.Dataset) and data.format["type"] != "custom":
        name = next((name for name in ("length", "input_ids") if name in data.column_names), None)
        if name is not None:
            chosen = data if indices is None else data.select(indices)
            # Of lists, only the offsets are read, not their values.
            tables: Iterable[Any] = chosen.select_columns(name).with_format("arrow").iter(batch_size=100_000)
            chunks = [chunk for table in tables for chunk in table[name].chunks]
            read = [(chunk if name == "length" else chunk.value_lengths()).to_numpy() for chunk in chunks]
            return np.concatenate([np.empty(0, np.int64), *read]).astype(np.int64)
    lengths = getattr(data, "lengths", None)
    if lengths is None or callable(lengths):
        return None
    every = np.asarray(lengths, np.int64)
    return every if indices is None else every[np.asarray(indices, np.int64)]


# ---- The largest micro-batch of a dataset


_AS_LARGE = 0.9


def find_largest(
    lengths: np.ndarray[Any, Any], size: int, budget: TokenBudget | None = None, *, packs: bool = False
) -> list[int]:
    """Return the samples of a micro-batch that needs about the most memory.

    Among micro-batches of about as many tokens, it is the one with the longest samples, which need most for attention.

    Args:
        lengths: The lengths of all samples.
        size: Samples per micro-batch; with a budget, per optimizer step.
        budget: The limits of a micro-batch; None means `size` samples.
        packs: Whether samples are packed instead of padded.
    """
    order = np.argsort(-lengths, kind="stable")
    widths = np.maximum(lengths[order], 1)
    if budget is None:
        return _as_list(order[:size])
    widths = np.asarray(budget.widths(widths.tolist()))
    most = min(size, budget.max_samples, len(order))
    if packs:  # one row: the longest sample, then repeatedly the longest that still fits
        chosen, room = [0], budget.max_tokens - int(widths[0])
        while len(chosen) < most:
            place = max(chosen[-1] + 1, int(np.searchsorted(-widths, -room)))
            if room < 1 or place >= len(widths):
                break
            chosen.append(place)
            room -= int(widths[place])
        return _as_list(order[chosen])
    numbers = np.clip(budget.max_tokens // widths, 1, np.minimum(most, len(order) - np.arange(len(order))))
    tokens = numbers * widths
    first = int(np.argmax(tokens >= _AS_LARGE * tokens.max()))
    return _as_list(order[first : first + numbers[first]])


def _as_list(indices: np.ndarray[Any, Any]) -> list[int]:
    return [int(index) for index in indices]


# ---- Grouping by length: datasets in their order, streams in a buffer
#
# As in transformers, about 50 consecutive batches of the random order are sorted by length. The epoch stays random at a
# large scale, while the samples of a batch have similar lengths. The samples of a process remain a function of seed,
# epoch and position: the group size depends on the batch size of one process, not on the number of processes.
#
# Source: `LengthGroupedSampler` in transformers/trainer_pt_utils.py.


_BATCHES = 50
_GROUPS = 4  # minimum, for small datasets


class LengthGroupedSampler(TensorSampler):
    """Draws a random order, and sorts each group of neighbors in it by length, the longest first.

    The longest sample comes first in an epoch, so that running out of memory happens immediately or never.

    Args:
        lengths: The length of each sample.
        batch_size: Samples per batch of one process.
        shuffle: Whether the order is random; otherwise it is the order of the data.
    """

    def __init__(self, lengths: np.ndarray[Any, Any], batch_size: int, *, shuffle: bool = True) -> None:
        self._lengths = lengths
        self._size = batch_size * max(1, min(_BATCHES, len(lengths) // (batch_size * _GROUPS)))
        self._shuffle = shuffle

    def __len__(self) -> int:
        return len(self._lengths)

    def draw(self) -> torch.Tensor:
        """Draw the indices of an epoch from torch's generator."""
        number = len(self)
        drawn = torch.randperm(number).numpy() if self._shuffle else np.arange(number)
        places, lengths = np.arange(number), self._lengths[drawn]
        order = drawn[np.lexsort((places, -lengths, places // self._size))]
        if number:
            longest = int(self._lengths[order].argmax())
            order[[0, longest]] = order[[longest, 0]]
        return torch.from_numpy(order)


def group_dataset(
    data: Any, length_of: Callable[[Any], Any] | None, batch_size: int, *, shuffle: bool
) -> LengthGroupedSampler:
    """Return the sampler for a dataset.

    Raises:
        DataError: Its lengths are not known without reading all samples.
    """
    lengths = known_lengths(data, length_of)
    if lengths is None:
        got = f"a {type(data).__name__}, all of whose samples would have to be read first"
        expected = 'a datasets.Dataset with a column "length" or "input_ids", a list of samples, or `lengths`'
        do = "set the dataset's attribute `lengths`, one per sample; or use max_tokens, which does not need lengths"
        raise fail(DataError, 'Trainer(data_options={"group_by_length": True})', got=got, expected=expected, do=do)
    if len(lengths) != len(data):
        got, expected = f"{len(lengths)} lengths", f"{len(data)} lengths, one per sample"
        raise fail(
            DataError,
            'Trainer(data_options={"group_by_length": True})',
            got=got,
            expected=expected,
            do="correct the dataset's `lengths`",
        )
    return LengthGroupedSampler(lengths, batch_size, shuffle=shuffle)


def group_stream(
    data: Any, seed: int, *, batch_size: int, length_of: Callable[[Any], Any] | None = None
) -> GroupedStream:
    """Return a stream of the same samples, grouped by length.

    Args:
        data: The stream.
        seed: The run's seed.
        batch_size: Samples per batch of one process.
        length_of: The module's `length_of`.
    """
    kind = StatefulGroupedStream if isinstance(data, Stateful) else GroupedStream
    return kind(data, _BATCHES * batch_size, length_of, seed)


class GroupedStream(IterableDataset[Any]):
    """Reads samples of a stream into a buffer, and yields them by length, the longest first.

    Each buffer is read under its own seed, and the generators are restored afterwards: where a buffer begins, or a run
    resumes within one, does not affect other random numbers.

    Args:
        data: The stream.
        size: Samples per buffer.
        length_of: The module's `length_of`.
        seed: The run's seed.
    """

    _keeps_state = False
    _at_buffer: Any = None  # the stream's state at the beginning of the buffer; None means the stream's beginning

    def __init__(self, data: Any, size: int, length_of: Callable[[Any], Any] | None, seed: int) -> None:
        self.data = data
        self._size = size
        self._length_of = length_of
        self._seed = seed
        self._epoch = 0
        self._start = self._place = (0, 0)  # the buffer, and the number of its samples already yielded

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "data":  # during unpickling
            raise AttributeError(name)
        return getattr(self.data, name)  # a generator, a sampler

    def __len__(self) -> int:
        return len(self.data)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the stream and of the buffers' seeds."""
        self._epoch = epoch
        call_set_epoch(self.data, epoch)

    def __iter__(self) -> Iterator[Any]:
        (first, skipped), self._start = self._start, (0, 0)
        stream = iter(self.data)
        for number in count(first):
            if number == 0:
                self._at_buffer = None
            elif number > first and self._keeps_state:  # of the first one, the state was loaded
                self._at_buffer = deepcopy(self.data.state_dict())
            with seeded_generators(derive_seed(self._seed, "buffer", self._epoch, number)):
                read = list(islice(stream, self._size))
            if not read:
                return
            lengths = [find_length(sample, self._length_of) for sample in read]
            order = sorted(range(len(read)), key=lambda place: -lengths[place])
            for taken, place in enumerate(order[skipped:], skipped + 1):
                self._place = number, taken
                yield read[place]
            skipped = 0


class StatefulGroupedStream(GroupedStream):
    """The same for a stream that tracks its position: it resumes at the beginning of a buffer, and reads that again."""

    _keeps_state = True

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's state at the buffer, and how many samples of the buffer were yielded."""
        return {"stream": deepcopy(self._at_buffer), "place": list(self._place)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `iter` continue after the samples already yielded."""
        self._at_buffer = deepcopy(state["stream"])
        number, taken = state["place"]
        self._start = self._place = number, taken
        if self._at_buffer is not None:
            self.data.load_state_dict(deepcopy(self._at_buffer))
