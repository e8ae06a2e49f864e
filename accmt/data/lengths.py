"""How long samples are, in tokens: one that was read, or all of a dataset without reading them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from accmt.errors import DataError, explain


def find_length(sample: Any, length_of: Callable[[Any], Any] | None = None) -> int:
    """Return the length of a sample: what `length_of` says, if anything; else its "length", or that of its "input_ids".

    Raises:
        DataError: It has none, or one that is no whole number from 0.
    """
    length = None if length_of is None else length_of(sample)
    length = _look_up(sample) if length is None else length
    if isinstance(length, torch.Tensor) and length.ndim == 0:
        length = length.item()
    if isinstance(length, int | np.integer) and not isinstance(length, bool) and length >= 0:
        return int(length)
    where = "the length of a sample, for max_tokens or group_by_length"
    do = 'def length_of(self, sample): return len(sample["tokens"]) in the module, say; or leave them out'
    if length is not None:
        raise DataError(explain(where, f"{length!r}", "a whole number from 0", do))
    held = f"the entries {list(sample)}" if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
    expected = '"length" or "input_ids" in each sample, or a method length_of in the module'
    raise DataError(explain(where, f"{held}, which do not say it", expected, do))


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
    """Return the lengths of a dataset's samples where they are known without reading samples.

    They are known of a `datasets.Dataset` with a column "length" or "input_ids", of a list or tuple of samples, of a
    dataset with an attribute `lengths`, and of a torch `Subset` of these.

    Args:
        data: The dataset.
        length_of: What the module says is the length of a sample, if it says anything; it needs the samples.
        indices: Of which samples; None is all.

    Returns:
        The lengths `[samples]`; None where they are not known.
    """
    if isinstance(data, Subset):
        inner = data.indices if indices is None else [data.indices[index] for index in indices]
        return known_lengths(data.dataset, length_of, inner)
    if isinstance(data, list | tuple):
        chosen = data if indices is None else [data[index] for index in indices]
        return np.fromiter((find_length(sample, length_of) for sample in chosen), np.int64, len(chosen))
    if length_of is not None:
        return None
    if _is_in_columns(data):
        return _read_column(data if indices is None else data.select(indices))
    lengths = getattr(data, "lengths", None)
    if lengths is None or callable(lengths):
        return None
    every = np.asarray(lengths, np.int64)
    return every if indices is None else every[np.asarray(indices, np.int64)]


def _is_in_columns(data: Any) -> bool:
    """Return whether a dataset of `datasets` holds lengths that no function of the user's makes at each read."""
    datasets = sys.modules.get("datasets")  # not imported, it made no data
    if datasets is None or not isinstance(data, datasets.Dataset) or data.format["type"] == "custom":
        return False
    return not {"length", "input_ids"}.isdisjoint(data.column_names)


def _read_column(data: Any) -> np.ndarray[Any, Any]:
    """Read the lengths of a dataset of `datasets`: of its lists the offsets only, not what they hold."""
    name = "length" if "length" in data.column_names else "input_ids"
    tables: Iterable[Any] = data.select_columns(name).with_format("arrow").iter(batch_size=100_000)
    chunks = [chunk for table in tables for chunk in table[name].chunks]
    lengths = [(chunk if name == "length" else chunk.value_lengths()).to_numpy() for chunk in chunks]
    return np.concatenate([np.empty(0, np.int64), *lengths]).astype(np.int64)
