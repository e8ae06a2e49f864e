"""The formats of files: what each has to offer, and JSON lines, Parquet and Arrow.

JSON lines are read by index: where each line begins is found once, and kept. Of Parquet and Arrow files, pyarrow takes
rows from row groups and record batches.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Sequence
from importlib import import_module
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import xxhash

from accmt.addons.readers.places import DataFile, Numbers, index_of
from accmt.errors import DataError, MissingPackageError, fail, nearest


class Layout(NamedTuple):
    """The pieces of a file.

    Attributes:
        rows: The number of rows of each piece: a row group, a record batch, a shard.
        digest: A digest of the contents, to notice that the file has changed.
        schema: The columns with their types; None if rows may differ in them.
        is_random: Whether single rows are read quickly; otherwise a piece is read whole.
        num_bytes: The memory of all pieces that are read whole.
    """

    rows: Numbers
    digest: str
    schema: str | None = None
    is_random: bool = True
    num_bytes: int = 0


class Piece(Protocol):
    """Rows that were read together."""

    def take(self, rows: Sequence[int]) -> list[Any]:
        """Return rows by their number in the piece."""


class Opened(Protocol):
    """An open file, which is closed when nothing refers to it."""

    def piece(self, number: int) -> Piece:
        """Read a piece."""


class Format(Protocol):
    """Reads files of one format."""

    def examine(self, file: DataFile) -> Layout:
        """Return the pieces of a file.

        Raises:
            DataError: The file is torn.
        """

    def open(self, file: DataFile) -> Opened:
        """Open a file."""


def load_library(where: str, module: str, install: str) -> Any:
    """Import a library.

    Args:
        where: What needs it, for messages.
        module: The module.
        install: What to install.

    Raises:
        MissingPackageError: It is not installed, or something that it imports is not.
    """
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == name
        got = f"{name} is not installed" if is_missing else f"{name} cannot be imported: {error}"
        raise fail(
            MissingPackageError, where, got=got, expected=f"the package {name}", do=f"pip install {install}"
        ) from error


# ---- JSON lines


_CHUNK = 1 << 24
_SPACES = np.frombuffer(b" \t\r\n\v\f", np.uint8)
_EXPECTED = "one JSON object per line"


class JsonLines:
    """Reads JSON lines. A row is what is written in its line; blank lines are skipped."""

    def examine(self, file: DataFile) -> Layout:
        """Find the lines of a file.

        Raises:
            DataError: Its last line is torn.
        """
        index = _lines_of(file)
        if len(index) > 2:
            begin, end = index[-2:].tolist()
            try:
                json.loads(file.read(begin, end))
            except ValueError as error:
                reason = f"row {len(index) - 3} of {file.name}, its last one: {error}"
                raise file.torn(reason, _EXPECTED) from error
        return Layout(np.array([len(index) - 2], np.int64), f"{int(index[0]) % (1 << 64):016x}")

    def open(self, file: DataFile) -> Opened:
        """Open a file."""
        return _LinesFile(file)


def _lines_of(file: DataFile) -> Numbers:
    """Return a digest of a file, where each of its lines begins, and where the last one ends."""
    return index_of(file, "lines", lambda target: _find_lines(file, target))


def _find_lines(file: DataFile, target: IO[bytes]) -> None:
    digest, begin = xxhash.xxh3_64(), 0
    target.write(bytes(8))
    with file.open() as opened:
        while chunk := opened.read(_CHUNK):
            chunk += opened.readline()
            digest.update(chunk)
            characters = np.frombuffer(chunk, np.uint8)
            starts = np.concatenate([[0], np.flatnonzero(characters == ord("\n")) + 1])
            starts = starts[starts < len(chunk)]
            for number in np.flatnonzero(np.isin(characters[starts], _SPACES)).tolist():  # it may be blank
                end = starts[number + 1] if number + 1 < len(starts) else len(chunk)
                if not chunk[starts[number] : end].strip():
                    starts[number] = -1
            target.write((starts[starts >= 0] + begin).astype(np.int64).tobytes())
            begin += len(chunk)
    target.write(np.int64(begin).tobytes())
    target.seek(0)
    target.write(np.uint64(digest.intdigest()).tobytes())


class _LinesFile:
    """An open file, which is its only piece. Reads at a position, so that forked processes can share it."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._index = _lines_of(file)
        self._descriptor = -1
        if file.storage is None:
            self._descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)

    def piece(self, number: int) -> Piece:
        return self

    def take(self, rows: Sequence[int]) -> list[Any]:
        bounds = [(int(self._index[row + 1]), int(self._index[row + 2])) for row in rows]
        file = self._file
        with file.reading():
            if file.storage is None:
                lines = [os.pread(self._descriptor, end - begin, begin) for begin, end in bounds]
            else:  # at the same time
                begins, ends = map(list, zip(*bounds, strict=True))
                paths = [file.path] * len(rows)
                lines = file.storage.fs.cat_ranges(paths, begins, ends, on_error="raise")
        parsed = []
        for row, line in zip(rows, lines, strict=True):
            try:
                parsed.append(json.loads(line))
            except ValueError as error:
                got = f"row {row} of {file.name}: {error}"
                raise fail(DataError, file.name, got=got, expected=_EXPECTED, do="correct this line") from error
        return parsed


# ---- Parquet and Arrow


_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_FILE_MAGIC = b"ARROW1"
_INSTALL = '"accmt-trainer[parquet]"'


class _Tables:
    """Reads files of tables.

    Args:
        columns: The columns to read; None reads all.
        arrays: Whether lists of numbers become arrays.

    Raises:
        MissingPackageError: pyarrow is not installed.
    """

    def __init__(self, columns: Sequence[str] | None, *, arrays: bool = True) -> None:
        load_library("Parquet and Arrow files", "pyarrow.parquet", _INSTALL)
        self._columns = None if columns is None else list(columns)
        self._arrays = arrays


class Parquet(_Tables):
    """Reads Parquet files, one row group at a time."""

    def examine(self, file: DataFile) -> Layout:
        """Read the footer of a file.

        Raises:
            DataError: The file is torn, or lacks a column.
        """
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(_source_of(file)) as opened:
                metadata, schema = opened.metadata, opened.schema_arrow
        except (OSError, ValueError) as error:  # pyarrow's errors are of these types
            raise file.torn(error, "a complete Parquet file, which ends with its footer") from error
        _require_columns(file, schema.names, self._columns)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        rows = np.array([group.num_rows for group in groups], np.int64)
        num_bytes = sum(group.total_byte_size for group in groups)
        return Layout(rows, file.digest(), _describe(schema, self._columns), is_random=False, num_bytes=num_bytes)

    def open(self, file: DataFile) -> Opened:
        """Open a file."""
        return _ParquetFile(file, self._columns, arrays=self._arrays)


class _ParquetFile:
    def __init__(self, file: DataFile, columns: list[str] | None, *, arrays: bool = True) -> None:
        from pyarrow import parquet

        self._file, self._columns, self._arrays = file, columns, arrays
        self._opened = parquet.ParquetFile(_source_of(file), pre_buffer=True, page_checksum_verification=True)

    def piece(self, number: int) -> Piece:
        try:
            # pyarrow's threads do not survive a fork.
            table = self._opened.read_row_group(number, self._columns, use_threads=False)
        except (OSError, ValueError) as error:
            raise self._file.torn(f"row group {number}: {error}", "a row group that can be read") from error
        return _Table(table.combine_chunks(), arrays=self._arrays)


def _source_of(file: DataFile) -> Any:
    """Return what pyarrow opens: the path of a local file, which it closes itself."""
    return file.path if file.storage is None else file.open()


class Arrow(_Tables):
    """Reads Arrow files, in the format of files (Feather) or of streams, one record batch at a time."""

    def examine(self, file: DataFile) -> Layout:
        """Count the rows of the record batches of a file.

        Raises:
            DataError: The file is torn, or lacks a column.
        """
        opened = _ArrowFile(file, None)
        try:
            _require_columns(file, opened.schema.names, self._columns)
            index = index_of(file, "rows of record batches", opened.write_rows)
            num_bytes = opened.batch(0).nbytes * len(index) if len(index) else 0
            # Compressed batches have to be decompressed whole, and those in a bucket to be fetched.
            is_random = file.storage is None and num_bytes <= file.size
            schema = _describe(opened.schema, self._columns)
            return Layout(index, file.digest(), schema, is_random=is_random, num_bytes=num_bytes)
        finally:
            opened.close()

    def open(self, file: DataFile) -> Opened:
        """Open a file."""
        return _ArrowFile(file, self._columns, arrays=self._arrays)


class _ArrowFile:
    """An open Arrow file; a local one is mapped into memory.

    Raises:
        DataError: The file is torn.
    """

    def __init__(self, file: DataFile, columns: list[str] | None, *, arrays: bool = True) -> None:
        import pyarrow as pa

        self._file, self._columns, self._arrays = file, columns, arrays
        try:
            self._bytes = pa.memory_map(file.path) if file.storage is None else pa.PythonFile(file.open(), "r")
            if self._bytes.read(len(_FILE_MAGIC)) == _FILE_MAGIC:
                self._reader: Any = pa.ipc.open_file(self._bytes)
                self.num_batches = self._reader.num_record_batches
                self._batches: list[Any] | None = None
            else:  # a stream, whose batches are only found one after the other
                self._bytes.seek(max(0, file.size - len(_STREAM_END)))
                if self._bytes.read() != _STREAM_END:
                    raise file.torn("no end of its stream", "an Arrow file with its footer, or a stream with its end")
                self._bytes.seek(0)
                self._reader = pa.ipc.open_stream(self._bytes)
                self._batches = list(self._reader)
                self.num_batches = len(self._batches)
        except DataError:
            raise
        except (OSError, ValueError) as error:
            raise file.torn(error, "a complete Arrow file") from error
        self.schema = self._reader.schema

    def batch(self, number: int) -> Any:
        try:
            return self._reader.get_batch(number) if self._batches is None else self._batches[number]
        except (OSError, ValueError) as error:
            raise self._file.torn(f"record batch {number}: {error}", "a batch that can be read") from error

    def write_rows(self, target: IO[bytes]) -> None:
        rows = [self.batch(number).num_rows for number in range(self.num_batches)]
        target.write(np.array(rows, np.int64).tobytes())

    def piece(self, number: int) -> Piece:
        batch = self.batch(number)
        return _Table(batch if self._columns is None else batch.select(self._columns), arrays=self._arrays)

    def close(self) -> None:
        self._bytes.close()


class _Table:
    def __init__(self, table: Any, *, arrays: bool) -> None:
        self._table = table
        self._values_of = _values if arrays else _objects

    def take(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        taken = self._table.take(rows)
        names = taken.schema.names
        return [dict(zip(names, row, strict=True)) for row in zip(*map(self._values_of, taken.columns), strict=True)]


def _values(column: Any) -> list[Any]:
    """Return the values of a column: Python objects, and arrays for lists of numbers, which become tensors."""
    import pyarrow as pa

    kind = column.type
    is_fixed = pa.types.is_fixed_size_list(kind)
    if is_fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        of = kind.value_type
        is_number = pa.types.is_integer(of) or pa.types.is_floating(of) or pa.types.is_boolean(of)
        values = column.flatten()
        if is_number and not column.null_count and not values.null_count:
            numbers = np.array(values.to_numpy(zero_copy_only=False))  # a copy: others cannot be written to
            ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))
            return np.split(numbers, ends[:-1]) if len(ends) else []
    return _objects(column)


def _objects(column: Any) -> list[Any]:
    objects: list[Any] = column.to_pylist()
    return objects


def _describe(schema: Any, columns: Sequence[str] | None) -> str:
    names = sorted(schema.names if columns is None else columns)
    return ", ".join(f"{name}: {schema.field(name).type}" for name in names)


def _require_columns(file: DataFile, names: Sequence[str], wanted: Sequence[str] | None) -> None:
    for name in wanted or ():
        if name not in names:
            near = nearest(name, names)
            do = f"write {near!r}" if near else "correct the name"
            raise fail(
                DataError, f"columns of {file.name}", got=repr(name), expected=f"one of {', '.join(names)}", do=do
            )
