"""Chooses the loader that fits what the user gave; none of them repeats a sample to fill a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch.utils.data import DataLoader, IterableDataset

from accmt.data.options import Loader, LoaderOptions, length_of
from accmt.data.sized import BatchLoader, SizedLoader
from accmt.data.streams import StreamLoader, UserDataLoader
from accmt.errors import DataError, explain


def build_loader(data: Any, options: LoaderOptions) -> Loader:
    """Build the loader that fits: a sized dataset is ordered and shared by us, a DataLoader keeps its batches.

    Processes: collective.

    Args:
        data: A dataset (anything with `__len__` and `__getitem__`), an iterable, or a DataLoader.
        options: Sizes, order and sharing.

    Raises:
        DataError: The data have no samples, or are of no such kind.
    """
    if isinstance(data, DataLoader):
        return _build_user_loader(data, options)
    if isinstance(data, Mapping | str | bytes):
        _wrong_kind(data, options)
    has_length = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if has_length and not isinstance(data, IterableDataset):
        return _build_sized_loader(data, options)
    if not hasattr(data, "__iter__"):
        _wrong_kind(data, options)
    return StreamLoader(data, options)


def _wrong_kind(data: Any, options: LoaderOptions) -> NoReturn:
    keys = f" with the keys {list(data)}" if isinstance(data, Mapping) else ""
    raise DataError(
        explain(
            f"the {options.kind} data",
            type(data).__name__ + keys,
            "a Dataset (with __len__ and __getitem__), an IterableDataset, a datasets.Dataset or a DataLoader",
            'pass one of these to fit; of a dict of datasets one of its values, such as data["train"]',
        )
    )


def _build_sized_loader(dataset: Any, options: LoaderOptions) -> Loader:
    if options.batch_sampler is None:
        return SizedLoader(dataset, options)
    given: DataLoader[Any] = DataLoader(dataset, batch_sampler=options.batch_sampler, **options.torch_options(dataset))
    return _build_user_loader(given, options)


def _build_user_loader(given: DataLoader[Any], options: LoaderOptions) -> Loader:
    _reject_prepared(given, options)
    options = options.without_second_sharding(given, given.batch_sampler)
    is_plain = type(given).__iter__ is DataLoader.__iter__ and not isinstance(given.dataset, IterableDataset)
    if is_plain and length_of(given.batch_sampler) is not None:
        return BatchLoader(given, options)
    return UserDataLoader(given, options)


def _reject_prepared(given: DataLoader[Any], options: LoaderOptions) -> None:
    from accelerate.data_loader import DataLoaderStateMixin

    if isinstance(given, DataLoaderStateMixin):
        raise DataError(
            explain(
                f"the {options.kind} data",
                "a DataLoader that accelerator.prepare has shared already",
                "the DataLoader as it was before",
                "leave preparing to the Trainer",
            )
        )
