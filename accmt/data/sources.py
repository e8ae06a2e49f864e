"""Chooses the source for the user's data, and lets processes with separate data end their epochs together."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accmt.data.base import Source, SourceOptions, length_of
from accmt.data.batches import MicroBatch, ReadBatch, read_when_needed
from accmt.data.fetching import Fetched
from accmt.data.planned import BatchesSource, DatasetSource
from accmt.errors import DataError, fail
from accmt.processes import (
    gather_numbers,
    gather_objects,
    num_data_processes,
    num_processes,
    process_index,
    sum_over_processes,
)
from accmt.registry import addon

_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
"""The names of file formats in `datasets.load_dataset`."""


def build_source(data: Any, options: SourceOptions) -> Source:
    """Build the source for a dataset or iterable, which accmt orders and shards, or for a DataLoader with its batches.

    No source repeats samples to fill a batch. If each process has its own data, they end their epochs together.

    Processes: collective.
    """
    require_readable(data, options.kind)
    source = _choose_source(data, options)
    if num_data_processes() > 1 and source.shard.count == 1:
        return UnshardedSource(source)
    return source


def _choose_source(data: Any, options: SourceOptions) -> Source:
    if isinstance(data, DataLoader):
        return _wrap_user_loader(data, options)
    _require_samples(data, options)
    if is_stream(data):
        source: Source = addon("stream_source")(data, options.without_split_stream(data))
        return source
    if options.batch_sampler is None:
        return DatasetSource(data, options)
    loader = DataLoader(data, batch_sampler=options.batch_sampler, **options.torch_options())
    return _wrap_user_loader(loader, options)


def _require_samples(data: Any, options: SourceOptions) -> None:
    """Check that data are samples: a path, a dict of datasets or a class fails only later, and not by name."""
    if isinstance(data, Mapping | str | bytes | type) or (is_stream(data) and not hasattr(data, "__iter__")):
        got = type(data).__name__
        expected = "a Dataset (with __len__ and __getitem__), an IterableDataset, a datasets.Dataset or a DataLoader"
        do = 'pass one of these to fit; if you have a dict of datasets, pass one of them, such as data["train"]'
        match data:
            case Mapping():  # `load_dataset` without `split`
                got += f" with the keys {list(data)}"
            case str() | os.PathLike():
                got, form = repr(str(data)), _FORMATS.get(Path(data).suffix, "csv")
                do = f'load it: datasets.load_dataset("{form}", data_files={str(data)!r}, split="train")'
            case type():
                got, do = f"the class {data.__name__}", f"pass an object of it: {data.__name__}(...)"
            case _ if hasattr(data, "__getitem__") and not isinstance(data, bytes):
                got += ", which has __getitem__ but no __len__"
                do = "def __len__(self): return the number of samples"
        raise options.error(got, expected, do)
    if hasattr(data, "iloc") and hasattr(data, "to_dict"):  # pandas: indexing selects columns
        got, expected = f"a {type(data).__name__} of pandas", "data whose [index] is a sample"
        raise options.error(got, expected, 'pass frame.to_dict("records")')


def require_readable(data: Any, kind: str) -> None:
    """Check that a stream is none whose order depends on processes and loader workers.

    Raises:
        DataError: It is; the message has what to use.
    """
    stream = data.dataset if isinstance(data, DataLoader) else data
    if is_stream(stream):
        addon("reject_stream")(stream, kind)


def is_stream(data: Any) -> bool:
    """Return whether data can only be read from the start: it has no length or no access by index."""
    return isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


def _wrap_user_loader(user_loader: DataLoader[Any], options: SourceOptions) -> Source:
    from accelerate.data_loader import DataLoaderStateMixin

    # Sharded by both, each process would train on a part of its part.
    if isinstance(user_loader, DataLoaderStateMixin):
        got, do = "a DataLoader already sharded by accelerator.prepare", "let the Trainer prepare it"
        raise options.error(got, "the DataLoader before prepare", do)
    options = options.without_second_sharding(user_loader, user_loader.batch_sampler)
    is_plain = type(user_loader).__iter__ is DataLoader.__iter__ and not isinstance(
        user_loader.dataset, IterableDataset
    )
    if is_plain and length_of(user_loader.batch_sampler) is not None:
        return BatchesSource(user_loader, options)
    source: Source = addon("user_loader_source")(user_loader, options.without_split_stream(user_loader.dataset))
    return source


# ---- Processes with separate data


_KIND = "part of each process"


class UnshardedSource:
    """Lets processes with separate data of unequal length end their epochs together.

    For each micro-batch they agree which of them have a batch.

    Processes: collective.
    """

    def __init__(self, source: Source) -> None:
        self.dataloader: DataLoader[Any] = source.dataloader
        self.micro_batches_per_batch = source.micro_batches_per_batch
        self.shard = source.shard
        self._source = source
        self._measure()

    def samples_in(self, first: int, last: int) -> int | None:
        return None  # a process does not know those of the others

    def micro_batches(self, epoch: int, first: int = 0) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch from `first` on, until no process has a batch."""
        micro_batches, index = self._source.micro_batches(epoch, first), count(first)
        for micro_batch, _ in read_when_needed(lambda: self._read(micro_batches, next(index))):
            if micro_batch.index == first:  # this epoch of the source, whose length may have changed, has begun
                self._measure()
            yield micro_batch

    def _read(self, micro_batches: Iterator[MicroBatch], index: int) -> ReadBatch | None:
        micro_batch = without_batch = MicroBatch(index, None, own_samples=0)
        try:
            micro_batch = next(micro_batches, None) or without_batch
        except Exception:
            sum_over_processes((1, 0, 0))  # the others wait for the sums
            raise
        # A process that has ended has no batch; nor has one that could read none of its samples.
        has_ended, has_batch = micro_batch is without_batch, micro_batch.batch is not None
        counts = sum_over_processes((not has_ended, has_batch, micro_batch.num_bad))
        num_reading, num_batches, num_bad = map(int, counts)
        if num_reading == 0:
            return None
        is_partial = num_batches < num_processes()
        return replace(micro_batch, num_samples=None, is_partial=is_partial, num_bad=num_bad), {}

    def samples_of(self, epoch: int, index: int) -> list[int] | None:
        return self._source.samples_of(epoch, index)

    def read_again(self, epoch: int, index: int) -> Fetched | None:
        return self._source.read_again(epoch, index)

    def digest_of_samples(self, first: int, last: int) -> str | None:
        return self._source.digest_of_samples(first, last)

    def set_epoch_again(self) -> None:
        self._source.set_epoch_again()

    def end_workers(self) -> None:
        self._source.end_workers()

    def position(self, epoch: int, num_micro_batches: int) -> dict[str, Any]:
        return {"kind": _KIND, "positions": gather_objects(self._source.position(epoch, num_micro_batches))}

    def resume_from(self, epoch: int, first_micro_batch: int, position: Mapping[str, Any]) -> None:
        position_of_process: Mapping[str, Any] = {}
        if first_micro_batch > 0:
            positions = position.get("positions", [])
            if len(positions) != num_processes():
                got = f"{num_processes()} processes, but the position is of {len(positions)}"
                expected = "the same number of processes as before: each has its own data, which no other can resume"
                do = "resume on the same number of processes, with the same data_options"
                raise fail(DataError, "the data of each process in a resumed epoch", got=got, expected=expected, do=do)
            position_of_process = positions[process_index()]
        self._source.resume_from(epoch, first_micro_batch, position_of_process)
        self._measure()

    def _measure(self) -> None:
        local: float | None = self._source.num_micro_batches
        if local is None:  # unknown: no number of the others is larger
            local = math.inf
        [longest] = max(gather_numbers((local,)))
        self.num_micro_batches: int | None = None
        if longest != math.inf:
            self.num_micro_batches = int(longest)
