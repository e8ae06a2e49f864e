"""`read_files`: the rows of files, by index."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from accmt.addons.readers.formats import Arrow, Format, JsonLines, Opened, Parquet, Piece
from accmt.addons.readers.places import DataFile, find_files
from accmt.addons.readers.shards import WebDataset, find_shards
from accmt.errors import ArgumentError, DataError, fail
from accmt.files import format_bytes
from accmt.messages import warn, warn_once
from accmt.options.units import read_size

_TABLES: dict[str, Callable[..., Format]] = {".parquet": Parquet, ".arrow": Arrow, ".feather": Arrow}
_OTHERS: dict[str, Callable[[], Format]] = {".jsonl": JsonLines, ".ndjson": JsonLines, ".tar": WebDataset}
_SUFFIXES = {**_TABLES, **_OTHERS}
_OPEN = 64  # files, or pieces of which single rows are read
_THREADS = 16
_FEW = 4
_RUNS = 8


def read_files(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    columns: Sequence[str] | None = None,
    transform: Callable[[Any], Any] | None = None,
    cache: int | str = "256MB",
    storage_options: Mapping[str, Any] | None = None,
) -> FileRows:
    """Read rows from files, by index.

    Args:
        paths: Files, folders, globs, or URLs of these: Parquet (`.parquet`), JSON lines (`.jsonl`, `.ndjson`) or Arrow
            (`.arrow`, `.feather`). The files of a folder or glob are sorted by name.
        columns: The columns to read of Parquet and Arrow files; None reads all.
        transform: Called with each row; returns the sample.
        cache: Memory for row groups, in each process that reads: rows are shuffled among as many row groups as fit.
        storage_options: Arguments of the file systems of URLs, such as keys.

    Returns:
        A dataset. Rows are dicts; lists of numbers in Parquet and Arrow files are NumPy arrays.

    Raises:
        FileNotFoundError: There is no such file.
        DataError: A file is torn, of another format, or has other columns than the first; or there are no rows.
        ArgumentError: `columns` is set for JSON lines, or `cache` is not a size.
        MissingPackageError: The library of a format, or of a kind of URL, is not installed.

    Examples:
        Rows of Parquet files in a bucket:

            rows = accmt.read_files("s3://bucket/news/*.parquet", columns=["input_ids", "labels"])
            trainer.fit(module, rows)
    """
    listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    return FileRows(
        "read_files",
        [os.fspath(path) for path in listed],
        columns=columns,
        transform=transform,
        cache=cache,
        storage_options=storage_options,
    )


class FileRows(Dataset[Any]):
    """The rows of files; see `read_files`.

    Args:
        where: What names the paths, for messages.
        arrays: Whether lists of numbers become arrays.

    Attributes:
        files: The files, in their order.
        has_columns: Whether rows come from tables: all have the same keys, with None if missing.
    """

    def __init__(
        self,
        where: str,
        paths: Sequence[str],
        *,
        columns: Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        cache: int | str = "256MB",
        storage_options: Mapping[str, Any] | None = None,
        arrays: bool = True,
    ) -> None:
        self._transform = transform
        try:
            size = read_size("cache", cache)
        except ArgumentError as error:
            accepted = "a number of bytes from 1, or a number with KB, MB, GB or TB"
            raise fail(
                ArgumentError, f"{where}(cache=...)", got=repr(cache), expected=accepted, do='cache="256MB"'
            ) from error
        self.files: list[DataFile] = []
        self._formats: list[Format] = []
        for path in paths:
            if (found := find_shards(where, path)) is not None:
                _reject_columns(where, path, columns)
                self.files += found[0]
                self._formats += [found[1]] * len(found[0])
                continue
            files = find_files(where, [path], storage_options or {}, tuple(_SUFFIXES))
            self.files += files
            self._formats += _choose_formats(where, files, columns, arrays=arrays)
        with ThreadPoolExecutor(_THREADS) as threads:
            layouts = list(threads.map(lambda number: self._formats[number].examine(self.files[number]), self._numbers))
        known = [(file, layout.schema) for file, layout in zip(self.files, layouts, strict=True)]
        for file, schema in known[1:]:
            first, expected = known[0]
            if schema != expected:
                do = f"convert one of them, or pass columns= that both have, without {first.name} or in another call"
                got = f"{schema or 'rows that may have any keys'}"
                raise fail(
                    DataError, file.name, got=got, expected=f"{expected or 'JSON lines'}, as in {first.name}", do=do
                )
        self._digests = [f"{layout.rows.sum()} rows, {layout.digest}" for layout in layouts]
        self._first_pieces = np.cumsum([0, *(len(layout.rows) for layout in layouts)])
        self._starts = np.cumsum(np.concatenate([[0], *(layout.rows for layout in layouts)]), dtype=np.int64)
        if not len(self):
            do = "check the program that wrote it"
            raise fail(
                DataError, where, got=f"{', '.join(paths)}, which has no rows", expected="at least one row", do=do
            )
        empty = [file.name for file, layout in zip(self.files, layouts, strict=True) if not layout.rows.sum()]
        if empty:
            more = f" and {len(empty) - _FEW} more" if len(empty) > _FEW else ""
            warn(f"{where}: no rows in {', '.join(empty[:_FEW])}{more}")
        self.has_columns = any(layout.schema is not None for layout in layouts)
        self._is_random = all(layout.is_random for layout in layouts)
        num_bytes = sum(layout.num_bytes for layout in layouts if not layout.is_random)
        # Pieces that are shuffled together, and kept.
        self._together = max(1, min(len(self._starts) - 1, int((len(self._starts) - 1) * size / max(num_bytes, 1))))
        self._num_bytes = num_bytes
        self._forget()

    @property
    def _numbers(self) -> range:
        return range(len(self.files))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return rows; those of one piece are read together."""
        own = np.asarray(indices, np.int64)
        length = len(self)
        own = np.where(own < 0, own + length, own)
        if len(own) and (own.min() < 0 or own.max() >= length):
            message = f"index {int(own.max())} of {length} rows"
            raise IndexError(message)
        pieces = np.searchsorted(self._starts, own, side="right") - 1
        rows: list[Any] = [None] * len(own)
        for piece in np.unique(pieces).tolist():
            places = np.flatnonzero(pieces == piece)
            taken = self._piece(piece).take((own[places] - self._starts[piece]).tolist())
            for place, row in zip(places.tolist(), taken, strict=True):
                rows[place] = row
        return rows if self._transform is None else [self._transform(row) for row in rows]

    def shuffle_rows(self, generator: torch.Generator) -> torch.Tensor:
        """Return the indices in random order; rows that are read by row groups are shuffled within several of these.

        The row groups are drawn in random order, and as many of them as `cache` allows are shuffled together.
        """
        pieces = len(self._starts) - 1
        if self._is_random or self._together == pieces:
            return torch.randperm(len(self), generator=generator)
        if self._together < _FEW:
            mean = format_bytes(self._num_bytes // pieces)
            warn_once(
                f"rows are shuffled among {self._together} of {pieces} row groups at a time, which have {mean} each: "
                "write smaller row groups, or pass read_files a larger cache",
                about="row groups",
            )
        drawn = torch.randperm(pieces, generator=generator).numpy()
        order = np.empty(len(self), np.int64)
        end = 0
        for first in range(0, pieces, self._together):
            chosen = drawn[first : first + self._together]
            begin = end
            for piece in chosen:
                start, stop = self._starts[piece], self._starts[piece + 1]
                order[end : end + stop - start] = np.arange(start, stop)
                end += stop - start
            order[begin:end] = order[begin:end][torch.randperm(end - begin, generator=generator).numpy()]
        return torch.from_numpy(order)

    def spread(self, number: int) -> list[int]:
        """Return about this many indices from all parts of the rows, quick to read."""
        length = len(self)
        if self._is_random or length <= number:
            return list(range(0, length, max(1, length // number)))
        run = -(-number // _RUNS)
        starts = np.linspace(0, length - run, _RUNS, dtype=np.int64).tolist()
        return sorted({index for start in starts for index in range(start, start + run)})

    def describe_files(self) -> dict[str, str]:
        """Return a digest of each file, to find files that have changed, by the file's name within the paths."""
        described: dict[str, str] = {}
        for file, digest in zip(self.files, self._digests, strict=True):
            name = file.label if file.label not in described else f"{len(described)}: {file.label}"
            described[name] = digest
        return described

    def _piece(self, number: int) -> Piece:
        """Return a piece, kept among those that were read last."""
        if self._process != os.getpid():
            self._forget()  # what a fork inherits shares positions in files, and connections
        file = bisect_right(self._first_pieces, number) - 1
        self.files[file].require_unchanged()
        if number in self._pieces:
            self._pieces.move_to_end(number)
            return self._pieces[number]
        most = _OPEN if self._is_random else self._together
        while len(self._pieces) >= most:
            self._pieces.popitem(last=False)
        piece = self._open(file).piece(number - int(self._first_pieces[file]))
        self._pieces[number] = piece
        return piece

    def _open(self, number: int) -> Opened:
        if number not in self._opened:
            while len(self._opened) >= _OPEN:
                self._opened.popitem(last=False)
            self._opened[number] = self._formats[number].open(self.files[number])
        self._opened.move_to_end(number)
        return self._opened[number]

    def _forget(self) -> None:
        self._process = os.getpid()
        self._opened: OrderedDict[int, Opened] = OrderedDict()
        self._pieces: OrderedDict[int, Piece] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": OrderedDict(), "_pieces": OrderedDict()}


def _choose_formats(
    where: str, files: Sequence[DataFile], columns: Sequence[str] | None, *, arrays: bool
) -> list[Format]:
    made: dict[Any, Format] = {}
    formats = []
    for file in files:
        suffix = next((suffix for suffix in _SUFFIXES if file.path.endswith(suffix)), None)
        if suffix is None:
            do = "convert it, for example with `datasets.load_dataset(...).to_parquet(...)`"
            raise fail(DataError, where, got=file.name, expected=f"a file that ends with {', '.join(_SUFFIXES)}", do=do)
        if suffix in _OTHERS:
            _reject_columns(where, file.name, columns)
        if (kind := _SUFFIXES[suffix]) not in made:
            made[kind] = _TABLES[suffix](columns, arrays=arrays) if suffix in _TABLES else _OTHERS[suffix]()
        formats.append(made[kind])
    return formats


def _reject_columns(where: str, name: str, columns: Sequence[str] | None) -> None:
    if columns is not None:
        raise fail(
            ArgumentError,
            where,
            got=f"columns= for {name}",
            expected="columns of Parquet or Arrow files",
            do="use transform=",
        )
