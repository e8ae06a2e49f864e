"""Groups samples of like length, so that batches have less padding: datasets in their order, streams in a buffer.

As in transformers, some 50 batches of samples that are neighbours in the random order are sorted by length. So an epoch
stays random in the large, and the samples of a batch are alike. What a process gets stays a function of the seed, the
epoch and the place: the size of a group depends on the batch size of one process, not on the number of processes.

Source: `LengthGroupedSampler` in transformers/trainer_pt_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from accmt.data.lengths import find_length, known_lengths
from accmt.data.samplers import TensorSampler, call_set_epoch
from accmt.data.seeding import derive_seed, seeded_generators
from accmt.errors import DataError, explain

_BATCHES = 50
_GROUPS = 4  # at least, where data are few


class LengthGroupedSampler(TensorSampler):
    """Draws a random order, and sorts each group of neighbours in it by length, the longest first.

    The longest sample of all is the first of an epoch, so that memory runs out at once or never.

    Args:
        lengths: The length of each sample.
        batch_size: Samples of a batch of one process.
        shuffle: Whether the order is random; else it is that of the data.
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
    """Return what orders a dataset.

    Raises:
        DataError: Its lengths are not known without reading all samples.
    """
    lengths = known_lengths(data, length_of)
    if lengths is None:
        got = f"a {type(data).__name__}, whose samples would all have to be read first"
        expected = 'a datasets.Dataset with a column "length" or "input_ids", a list of samples, or `lengths`'
        do = "set the dataset's attribute `lengths`, one for each sample; or use max_tokens, which needs none"
        raise DataError(explain("Trainer(group_by_length=True)", got, expected, do))
    if len(lengths) != len(data):
        got, expected = f"{len(lengths)} lengths", f"one for each of the {len(data)} samples"
        raise DataError(explain("Trainer(group_by_length=True)", got, expected, "correct the dataset's `lengths`"))
    return LengthGroupedSampler(lengths, batch_size, shuffle=shuffle)


@dataclass(frozen=True)
class StreamGroups:
    """How the samples of a stream are grouped.

    Attributes:
        batch_size: Samples of a batch of one process.
        length_of: What the module says is the length of a sample.
    """

    batch_size: int
    length_of: Callable[[Any], Any] | None = None

    def group(self, data: Any, seed: int) -> GroupedStream:
        """Return a stream of the same samples in groups."""
        is_stateful = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        kind = StatefulGroupedStream if is_stateful else GroupedStream
        return kind(data, _BATCHES * self.batch_size, self.length_of, seed)


class GroupedStream(IterableDataset[Any]):
    """Reads samples of a stream into a buffer, and yields those in it by length, the longest first.

    Each buffer is read under a seed of its own, and leaves the generators as they were: whether a batch is the first of
    a buffer, or of a run that is resumed within one, changes nothing that is drawn elsewhere.

    Args:
        data: The stream.
        size: Samples of a buffer.
        length_of: As in `StreamGroups`.
        seed: The run's.
    """

    def __init__(self, data: Any, size: int, length_of: Callable[[Any], Any] | None, seed: int) -> None:
        self.data = data
        self._size = size
        self._length_of = length_of
        self._seed = seed
        self._epoch = 0
        self._start = self._place = (0, 0)  # a buffer, and how many of its samples are taken

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "data":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.data, name)  # a generator, a sampler

    def __len__(self) -> int:
        return len(self.data)

    def set_epoch(self, epoch: int) -> None:
        """Let the stream and the seeds of buffers be those of an epoch."""
        self._epoch = epoch
        call_set_epoch(self.data, epoch)

    def __iter__(self) -> Iterator[Any]:
        (first, skipped), self._start = self._start, (0, 0)
        stream = iter(self.data)
        for number in count(first):
            self._begin_buffer(number, is_first=number == first)
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

    def _begin_buffer(self, number: int, *, is_first: bool) -> None:
        """Note what a state needs."""


class StatefulGroupedStream(GroupedStream):
    """The same for a stream that keeps its own position: it resumes at a buffer's beginning, and reads that again."""

    _at_buffer: Any = None  # the stream's state at the beginning of the buffer; None is that of the stream

    def _begin_buffer(self, number: int, *, is_first: bool) -> None:
        if number == 0:
            self._at_buffer = None
        elif not is_first:  # else it is the one that was loaded
            self._at_buffer = deepcopy(self.data.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return where reading is: the stream's state at the buffer, and how much of that is taken."""
        return {"stream": deepcopy(self._at_buffer), "place": list(self._place)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `iter` continue after what was taken."""
        self._at_buffer = deepcopy(state["stream"])
        number, taken = state["place"]
        self._start = self._place = number, taken
        if self._at_buffer is not None:
            self.data.load_state_dict(deepcopy(self._at_buffer))
