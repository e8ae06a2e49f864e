"""Fingerprints of a few samples, to check that all processes, or a resumed run, have the same data.

Each entry of a sample (a field of a dict, an element of a tuple) has a separate fingerprint, so that a randomly
augmented image does not hide that its label is the same. Images and audio are compared with a tolerance, because
another machine or decoder version may round differently. Values of unknown types are left out, as are values that
differ when the same sample is read twice under one seed.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import starmap
from time import monotonic
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader

from accmt.data.fetching import Fetched, SeededDataset, WorkerStart, start_reading
from accmt.data.seeding import BatchIndices, derive_seed
from accmt.libraries.private_names import shut_down_workers

Entry: TypeAlias = str | list[float]
"""A digest of values that must be equal, or a tolerance and a few values for numbers that may be rounded."""
Fingerprint: TypeAlias = dict[str, Entry]
"""The entries of a sample, by their path in it."""
Rows: TypeAlias = dict[str, Fingerprint]
"""Fingerprints by sample index: JSON, stored in checkpoints."""

MAX_ROWS = 5
_MAX_ENTRIES = 32
_MAX_DEPTH = 6
_BUDGET_S = 1.0  # for all samples; the first is always read
_NUM_VALUES = 8
_OF_MEDIA, _OF_FEATURES = 0.02, 1e-4  # tolerances, relative to the largest value
_MEDIA_SIZE = 256  # arrays of at least this size are treated as images or audio


def read_rows(dataset: Any, length: int, *, num_workers: int, context: Any = None) -> Rows:
    """Return the fingerprints of a few samples at positions that depend only on the length.

    Each is read twice under one seed, in a worker if training uses workers: files that a dataset opens on its first
    read must not be open in the process that starts the workers.
    """
    twice: list[BatchIndices] = []
    for index in sorted({0, 1, length // 3, 2 * length // 3, length - 1} & set(range(length))):
        twice += [BatchIndices([index], derive_seed(0, "fingerprint", index))] * 2
    seeded = SeededDataset(dataset, skips_bad=True)
    if num_workers == 0:
        return _rows_of(map(_fingerprint_fetched, map(seeded.__getitems__, twice)))
    collate: Any = _fingerprint_fetched
    batches: Any = twice  # what `SeededDataset` reads
    loader: DataLoader[Any] = DataLoader(
        seeded,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=1,
        worker_init_fn=WorkerStart(),
        multiprocessing_context=context,
    )
    reading = start_reading(loader)
    try:
        return _rows_of(reading)
    finally:  # torch would stop them only when nothing refers to the iterator, such as a traceback
        shut_down_workers(loader, reading)


def _fingerprint_fetched(fetched: Fetched) -> tuple[list[int], list[Fingerprint]]:
    return list(fetched.indices), list(map(fingerprint, fetched.samples))


def _rows_of(readings: Iterator[Any]) -> Rows:
    rows: Rows = {}
    deadline = monotonic() + _BUDGET_S
    for (index,), first in readings:
        _, second = next(readings)
        if first and second:  # empty if the sample could not be read
            repeated: Fingerprint = {}
            for path, entry in first[0].items():
                # A value that differs is drawn from a generator that accmt cannot seed: it would be a false alarm.
                if second[0].get(path) == entry:
                    repeated[path] = entry
            rows[str(index)] = repeated
        if monotonic() > deadline:
            break
    return rows


def rows_of_samples(samples: Sequence[Any]) -> Rows:
    """Return the fingerprints of samples that have already been read, by position."""
    return {str(place): fingerprint(sample) for place, sample in enumerate(samples[:MAX_ROWS])}


def fingerprint(sample: Any) -> Fingerprint:
    """Return the fingerprint of a sample without values of unknown types."""
    entries: Fingerprint = {}
    for path, value in _entries(sample, "", 0):
        entry = _entry_of(value)
        if entry is not None:
            entries[path] = entry
        if isinstance(entry, list):  # a few values do not show that an image was resized
            entries[f"{path} shape"] = str(getattr(value, "shape", getattr(value, "size", ())))
        if len(entries) >= _MAX_ENTRIES:
            break
    return entries


def compare(rows: Rows, reference: Rows) -> Literal["same", "partly", "different"]:
    """Compare samples at the same indices.

    "partly" means that some entry that distinguishes samples is the same throughout; the others may be augmented, or
    computed differently.
    """
    pairs_by_path = defaultdict(list)
    for index in sorted(rows.keys() & reference.keys()):
        for path in rows[index].keys() & reference[index].keys():
            pairs_by_path[path].append((rows[index][path], reference[index][path]))
    are_alike, tells_apart = True, False
    for pairs in pairs_by_path.values():
        if not all(starmap(_is_alike, pairs)):
            are_alike = False
        elif any(not _is_alike(pairs[0][0], entry) for entry, _ in pairs):  # one label for all samples shows nothing
            tells_apart = True
    if are_alike:
        return "same"
    if tells_apart:
        return "partly"
    return "different"


def _entries(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name, None) for field in fields(value)}
    match value:
        case Mapping() if depth < _MAX_DEPTH:
            for key in sorted(value, key=str)[:_MAX_ENTRIES]:
                yield from _entries(value[key], f"{path}.{key}", depth + 1)
        case list() | tuple() if depth < _MAX_DEPTH and not _is_plain(value):
            for number, item in enumerate(value[:_MAX_ENTRIES]):
                yield from _entries(item, f"{path}.{number}", depth + 1)
        case _:
            yield path, value


def _is_plain(value: Any) -> bool:
    """Return whether a list holds only numbers and strings, such as token ids, at any depth."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (int, float, bool, str, bytes)


def _entry_of(value: Any) -> Entry | None:
    try:
        match value:
            case torch.Tensor():
                tensor = value.detach().cpu()
                if tensor.dtype is torch.bfloat16:  # numpy has no such type
                    tensor = tensor.to(torch.float32)
                return _entry_of_array(tensor)
            case np.ndarray() | np.generic():
                return _entry_of_array(np.asarray(value))
            case float() if not math.isnan(value):
                return [_OF_FEATURES, value]
        image = sys.modules.get("PIL.Image")  # not imported, it made no sample
        if image is not None and isinstance(value, image.Image):
            return _entry_of_array(np.asarray(value))
        if _is_plain(value):
            return _digest(repr(value).encode())
        return None
    except Exception:  # noqa: BLE001 - a tensor without values, a closed file: nothing to compare
        return None


def _entry_of_array(value: Any) -> Entry | None:
    array = np.asarray(value)
    if array.dtype.kind not in "biufcSU":
        return None
    is_media = array.size >= _MEDIA_SIZE and (array.dtype.kind == "f" or array.dtype == np.uint8)
    if array.dtype.kind != "f" and not is_media:
        return _digest(f"{array.dtype.kind}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    # A fingerprint is JSON, and NaN is not equal to itself.
    flat = np.nan_to_num(array.reshape(-1).astype(np.float64), posinf=0.0, neginf=0.0)
    chosen = flat[:: max(1, flat.size // _NUM_VALUES)][:_NUM_VALUES]
    values = list(chosen)
    if flat.size:  # numpy warns about the mean of nothing
        values += [flat.mean(), np.abs(flat).mean()]
    tolerance = _OF_FEATURES
    if is_media:
        tolerance = _OF_MEDIA
    return [tolerance, *map(float, values)]


def _digest(content: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(content)


def _is_alike(entry: Entry, reference: Entry) -> bool:
    if isinstance(entry, str) or isinstance(reference, str) or len(entry) != len(reference):
        return entry == reference
    tolerance, *values = entry
    largest = max(map(abs, values), default=0.0)
    return all(abs(a - b) <= tolerance * largest for a, b in zip(values, reference[1:], strict=True))
