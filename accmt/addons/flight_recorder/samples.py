"""The samples of an optimizer step, one by one: as they were read, collated alone; and the step without some of them.

A sample's number is its index in the data. A stream has no indices: there it is the position in the step, over all
processes, from 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from accmt.data import MicroBatch, Window, derive_seed, find_batch_size, seed_generators
from accmt.data.fetching import Fetched
from accmt.data.lengths import find_length
from accmt.data.windows import unpack
from accmt.errors import DataError
from accmt.processes import data_index, gather_from_data
from accmt.run import Run

Place = tuple[int, int, int]
"""An epoch, and the first and last + 1 of some micro-batches in it."""

_LONGEST = 200
_MOST_VALUES = 8
_TEXT = ("input_ids", "attention_mask")


class Sample(NamedTuple):
    """A sample of a step.

    Attributes:
        number: Its number.
        batch: A batch of this sample alone.
        text: What it is: its decoded text, or the kinds and shapes of its values.
        tokens: Its tokens; None where it has no length.
    """

    number: int
    batch: Any
    text: str
    tokens: int | None


class WatchedMaker:
    """Makes the windows of another maker, keeps what each was read from, and leaves some samples out.

    Args:
        maker: The maker of the run's loader.
        removed: Numbers of samples to leave out.
        places: The micro-batches in which they are left out.
    """

    def __init__(self, maker: Any, removed: Collection[int], places: Sequence[Place]) -> None:
        self._maker = maker
        self.removed = removed
        self.places = places
        self.read: list[MicroBatch] = []
        self.seen: set[int] = set()  # this process's samples in these places

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_maker"], name)

    def windows(self, source: Any, epoch: int, first: int) -> Iterator[Window]:
        windows: Iterator[Window] = self._maker.windows(_WatchedSource(source, self), epoch, first)
        return windows


class _WatchedSource:
    def __init__(self, source: Any, watched: WatchedMaker) -> None:
        self._source = source
        self._watched = watched
        self._epoch = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_source"], name)

    def micro_batches(self, epoch: int, first: int = 0) -> Iterator[MicroBatch]:
        self._epoch, num_before = epoch, 0
        for micro_batch in self._source.micro_batches(epoch, first):
            if self._is_changed(micro_batch.index, micro_batch.index + 1):
                num_before += self._remove(epoch, micro_batch, num_before)
            self._watched.read.append(micro_batch)
            yield micro_batch

    def samples_in(self, first: int, last: int) -> int | None:
        planned: int | None = self._source.samples_in(first, last)
        if planned is None or not self._is_changed(first, last):
            return planned
        own = [self._source.samples_of(self._epoch, index) or [] for index in range(first, last)]
        removed = sum(number in self._watched.removed for numbers in own for number in numbers)
        return planned - sum(gather_from_data(removed))

    def _is_changed(self, first: int, last: int) -> bool:
        places = (place for place in self._watched.places if place[0] == self._epoch)
        return any(first < end and begin < last for _, begin, end in places)

    def _remove(self, epoch: int, micro_batch: MicroBatch, num_before: int) -> int:
        """Leave samples of a micro-batch out, and return how many it had over all processes."""
        numbers, size = number_samples(self._source, self._watched, epoch, micro_batch, num_before)
        kept = [place for place, number in enumerate(numbers) if number not in self._watched.removed]
        every = gather_from_data((len(numbers) - len(kept), not kept))
        self._watched.seen.update(numbers)
        micro_batch.is_partial = any(is_empty for _, is_empty in every)
        if micro_batch.num_samples is not None:
            micro_batch.num_samples -= sum(removed for removed, _ in every)
        if len(kept) == len(numbers):
            return size
        if not kept:
            micro_batch.batch = [] if not self._watched.keeps_batches else None
        elif not self._watched.keeps_batches:
            samples = unpack(micro_batch.batch)
            micro_batch.batch = [samples[place] for place in kept]
        else:
            fetched = self._source.read_again(epoch, micro_batch.index)
            if fetched is None:
                micro_batch.batch = rows(micro_batch.batch, len(numbers), kept)
            else:
                if fetched.seed is not None:
                    seed_generators(fetched.seed)
                collate = self._source.dataloader.collate_fn.collate
                micro_batch.batch = collate([fetched.samples[place] for place in kept])
        micro_batch.own_samples = len(kept)
        if micro_batch.indices is not None:
            micro_batch.indices = [numbers[place] for place in kept]
        return size


def number_samples(
    source: Any, maker: Any, epoch: int, micro_batch: MicroBatch, num_before: int
) -> tuple[list[int], int]:
    """Return the numbers of this process's samples in a micro-batch, and how many it has over all processes.

    Processes: collective for a stream.

    Args:
        num_before: Samples of the step in the micro-batches before it.
    """
    indices = source.samples_of(epoch, micro_batch.index)
    if indices is not None:
        skipped = {bad.index for bad in micro_batch.bad}
        return [index for index in indices if index not in skipped], 0
    batch = micro_batch.batch
    if batch is None:
        size = 0
    else:
        size = (find_batch_size(batch, micro_batch.own_samples) if maker.keeps_batches else len(unpack(batch))) or 0
    every = gather_from_data(size)
    first = num_before + sum(every[: data_index()])
    return list(range(first, first + size)), sum(every)


def own_samples(run: Run, watched: WatchedMaker, epoch: int) -> list[Sample]:
    """Return this process's samples in the micro-batches that were read last, each collated alone.

    Processes: collective for a stream.
    """
    source, num_before, found = run.train_loader.source, 0, []
    tokenizer = find_tokenizer(run)
    for micro_batch in watched.read:
        numbers, size = number_samples(source, watched, epoch, micro_batch, num_before)
        num_before += size
        fetched: Fetched | None = None
        samples: Sequence[Any] | None = None
        if not watched.keeps_batches:
            samples, collate = unpack(micro_batch.batch), watched.collate
        elif (fetched := source.read_again(epoch, micro_batch.index)) is not None:
            samples, collate = fetched.samples, getattr(source.dataloader.collate_fn, "collate", None)
        for place, number in enumerate(numbers):
            seed_generators(derive_seed(run.seed, "collate alone", epoch, number))
            if samples is None:
                batch = rows(micro_batch.batch, len(numbers), [place])
                found.append(Sample(number, batch, describe(batch, tokenizer), _count_tokens(run, batch, batch)))
            else:
                batch = collate([samples[place]])
                text = describe(samples[place], tokenizer)
                found.append(Sample(number, batch, text, _count_tokens(run, batch, samples[place])))
    return found


def rows(value: Any, size: int, kept: Sequence[int]) -> Any:
    """Return some samples of a batch: rows of tensors and entries of lists."""
    if isinstance(value, torch.Tensor):
        return value[list(kept)] if value.shape[:1] == (size,) else value
    if isinstance(value, Mapping):
        parts = {name: rows(item, size, kept) for name, item in value.items()}
        try:
            return type(value)(parts)  # type: ignore[call-arg]
        except TypeError:
            return parts
    if isinstance(value, list | tuple):
        if len(value) == size and not any(_has_rows(item, size) for item in value):
            some = [value[place] for place in kept]
            return tuple(some) if isinstance(value, tuple) else some
        made = [rows(item, size, kept) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


def _has_rows(value: Any, size: int) -> bool:
    if isinstance(value, Mapping):
        return any(_has_rows(item, size) for item in value.values())
    return isinstance(value, torch.Tensor) and value.shape[:1] == (size,)


def find_tokenizer(run: Run) -> Any:
    """Return the tokenizer of the module or of the collate function; None if there is none."""
    collate = getattr(run.train_loader.maker, "collate", None) or run.train_loader.source.dataloader.collate_fn
    owners = [run.module, *getattr(collate, "functions", ()), collate, getattr(collate, "collate", None)]
    tokenizers = (getattr(owner, name, None) for owner in owners for name in ("tokenizer", "processing_class"))
    return next((one for one in tokenizers if hasattr(one, "decode")), None)


def describe(sample: Any, tokenizer: Any = None) -> str:
    """Return what a sample is: its text where it has tokens, otherwise the kinds and shapes of its values."""
    if isinstance(sample, tuple | list) and sample and isinstance(sample[0], Mapping):
        return ", ".join([describe(sample[0], tokenizer), *(_describe_value(one) for one in sample[1:])])
    if not isinstance(sample, Mapping):
        values = list(sample) if isinstance(sample, tuple | list) else [sample]
        return ", ".join(map(_describe_value, values))[:_LONGEST]
    if tokenizer is None or "input_ids" not in sample:
        return ", ".join(f"{name} {_describe_value(value)}" for name, value in sample.items())[:_LONGEST]
    ids, mask = sample["input_ids"], sample.get("attention_mask")
    if isinstance(ids, list | tuple) and ids and isinstance(ids[0], list | tuple):  # of several answers
        ids, mask = [token for one in ids for token in one], None
    ids = torch.as_tensor(ids).reshape(-1)
    if mask is not None:
        ids = ids[torch.as_tensor(mask).reshape(-1).bool()]
    text = repr(tokenizer.decode(ids[: 2 * _LONGEST].tolist()))
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    others = (f"{name} {_describe_value(value)}" for name, value in sample.items() if name not in _TEXT)
    return ", ".join([shown, *others])[: 2 * _LONGEST]


def _describe_value(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        tensor = torch.as_tensor(value)
        if tensor.numel() <= _MOST_VALUES:
            return str([float(f"{one:.4g}") for one in tensor.double().reshape(-1).tolist()])
        extent = f"{float(tensor.min()):.4g} to {float(tensor.max()):.4g}"
        return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} from {extent}"
    if isinstance(value, list) and len(value) > _MOST_VALUES:
        return f"list of {len(value)}"
    return repr(value)[:_LONGEST]


def _count_tokens(run: Run, batch: Any, sample: Any) -> int | None:
    """Return the tokens of a sample: those that its batch does not mask, or its length."""
    batch = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in ("attention_mask", "input_ids") if name in batch), None)
        if isinstance(found, torch.Tensor):
            return int(found.sum()) if "attention_mask" in batch else found.numel()
    try:
        return find_length(sample, getattr(run.module, "length_of", None))
    except DataError:
        return None
