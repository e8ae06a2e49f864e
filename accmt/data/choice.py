"""Chooses the source for the user's data; no source repeats samples to fill a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accmt.data.base import Source, SourceOptions, length_of
from accmt.data.planned import BatchesSource, DatasetSource
from accmt.data.streams import StreamSource, UserLoaderSource
from accmt.errors import DataError, explain


def build_source(data: Any, options: SourceOptions) -> Source:
    """Build the source for a dataset or iterable, which accmt orders and shards, or for a DataLoader with its batches.

    Processes: collective.
    """
    if isinstance(data, DataLoader):
        return _wrap_user_loader(data, options)
    if isinstance(data, Mapping | str | bytes):
        raise _wrong_kind(data, options)
    if not is_stream(data):
        if options.batch_sampler is None:
            return DatasetSource(data, options)
        torch_options = options.torch_options(data)
        return _wrap_user_loader(DataLoader(data, batch_sampler=options.batch_sampler, **torch_options), options)
    if not hasattr(data, "__iter__"):
        raise _wrong_kind(data, options)
    return StreamSource(data, options.without_split_stream(data))


def is_stream(data: Any) -> bool:
    """Return whether data can only be read from the start: it has no length or no access by index."""
    return isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


def _wrong_kind(data: Any, options: SourceOptions) -> DataError:
    got = type(data).__name__ + (f" with the keys {list(data)}" if isinstance(data, Mapping) else "")
    expected = "a Dataset (with __len__ and __getitem__), an IterableDataset, a datasets.Dataset or a DataLoader"
    do = 'pass one of these to fit; if you have a dict of datasets, pass one of them, such as data["train"]'
    return DataError(explain(f"the {options.kind} data", got, expected, do))


def _wrap_user_loader(user_loader: DataLoader[Any], options: SourceOptions) -> Source:
    from accelerate.data_loader import DataLoaderStateMixin

    if isinstance(user_loader, DataLoaderStateMixin):
        got, do = "a DataLoader already sharded by accelerator.prepare", "let the Trainer prepare it"
        raise DataError(explain(f"the {options.kind} data", got, "the DataLoader before prepare", do))
    options = options.without_second_sharding(user_loader, user_loader.batch_sampler)
    is_plain = type(user_loader).__iter__ is DataLoader.__iter__ and not isinstance(
        user_loader.dataset, IterableDataset
    )
    if is_plain and length_of(user_loader.batch_sampler) is not None:
        return BatchesSource(user_loader, options)
    return UserLoaderSource(user_loader, options.without_split_stream(user_loader.dataset))
