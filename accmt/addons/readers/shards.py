"""Reads the shards of MosaicML Streaming, LitData and WebDataset by index, each by its own library.

The order of these libraries' own streams depends on the number of processes and workers, so only their access by index
is used, and the streams are rejected.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from accmt.addons.readers.formats import Format, Layout, Opened, Piece, load_library
from accmt.addons.readers.places import DataFile, find_files, index_of
from accmt.errors import DataError, fail

_LIBRARIES = {"streaming": "MosaicML Streaming", "litdata": "LitData"}
_INDEX = "index.json"
_MDS_INSTALL = '"accmt-trainer[mds]" && pip install --no-deps "mosaicml-streaming>=0.13"'
_NO_CHECK = "LITDATA_DISABLE_VERSION_CHECK"
_TAR_END = 1024  # bytes of zeros
_TAR_BLOCK = 512
_OF_MEMBER = 400  # bytes of memory for a file in an open tar file


def reject_stream(data: Any, kind: str) -> None:
    """Reject the streams of MosaicML Streaming and LitData, which can be read by index instead.

    They choose samples by the rank and the worker that read them, repeat some so that all get equally many, and resume
    only from a loader of their own.

    Raises:
        DataError: It is such a stream.
    """
    for base in type(data).__mro__:
        library = _LIBRARIES.get(base.__module__.partition(".")[0])
        if library is not None and base.__name__.endswith("StreamingDataset"):
            got = f"a {base.__name__} of {library}, which gives each process and loader worker samples of its own"
            expected = "the same samples in the same order on every process, with any number of workers"
            streams = getattr(data, "streams", None)
            place = streams[0].local if streams else getattr(getattr(data, "input_dir", None), "path", None) or "FOLDER"
            do = f"read its shards by index: accmt.read_files({str(place)!r}), a local folder"
            raise fail(DataError, f"the {kind} data", got=got, expected=expected, do=do)


def find_shards(where: str, path: str) -> tuple[list[DataFile], Format] | None:
    """Return the shards of a folder of MosaicML Streaming or LitData, in their order; None for any other path.

    Raises:
        DataError: A shard is missing or has another size than its index says, or the format cannot be read by index.
        MissingPackageError: The library is not installed.
    """
    index = Path(path, _INDEX)
    if "://" in path or not index.is_file():
        return None
    try:
        found = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        do = "copy the folder again"
        raise fail(DataError, str(index), got=f"{error}", expected="an index of shards", do=do) from error
    if "shards" in found:
        sizes = {shard["raw_data"]["basename"]: shard["raw_data"]["bytes"] for shard in found["shards"]}
        packed = [shard for shard in found["shards"] if not Path(path, shard["raw_data"]["basename"]).is_file()]
        _require_plain(index, {shard["compression"] for shard in packed} - {None})
        files = _list_shards(where, path, sizes)
        return files, Mds(Path(path), files)
    if "chunks" in found and "config" in found:
        config = found["config"]
        _require_plain(index, {config.get(key) for key in ("compression", "encryption")} - {None})
        if (loader := config.get("item_loader") or "PyTreeLoader") != "PyTreeLoader":
            do = "write the samples with litdata.optimize without an item_loader, or convert them to Parquet"
            raise fail(
                DataError, str(index), got=f"chunks of {loader}", expected="chunks of samples (PyTreeLoader)", do=do
            )
        files = _list_shards(where, path, {chunk["filename"]: chunk["chunk_bytes"] for chunk in found["chunks"]})
        return files, LitData(Path(path), files, [chunk["chunk_size"] for chunk in found["chunks"]])
    return None


def _require_plain(index: Path, kinds: set[Any]) -> None:
    if kinds:
        got = f"shards with {', '.join(sorted(map(str, kinds)))}"
        do = "write them again without compression and encryption, or convert them to Parquet, which is compressed"
        raise fail(DataError, str(index), got=got, expected="shards whose samples can be read one by one", do=do)


def _list_shards(where: str, path: str, sizes: Mapping[str, int]) -> list[DataFile]:
    files = []
    for name, size in sizes.items():
        try:
            (file,) = find_files(where, [str(Path(path, name))], {}, ())
        except FileNotFoundError as error:
            got, do = "no such file", "copy it again, with the whole folder"
            raise fail(
                DataError, str(Path(path, name)), got=got, expected=f"the shard that {_INDEX} names", do=do
            ) from error
        if file.size != size:
            raise file.torn(f"{file.size} bytes", f"{size} bytes, as {_INDEX} says")
        files.append(file)
    return files


class Mds:
    """Reads shards of MosaicML Streaming, by its `LocalDataset`.

    Args:
        folder: The folder of the shards.
        files: The shards.

    Raises:
        DataError: A column is pickled, so that reading it could run any code.
        MissingPackageError: MosaicML Streaming is not installed.
    """

    def __init__(self, folder: Path, files: Sequence[DataFile]) -> None:
        library = load_library(f"the MDS shards of {folder}", "streaming", _MDS_INSTALL)
        shards = library.LocalDataset(local=str(folder)).shards
        self._shards = {file.path: shard for file, shard in zip(files, shards, strict=True)}
        for file, shard in zip(files, shards, strict=True):
            try:
                shard.validate(allow_unsafe_types=False)
            except ValueError as error:
                do = "write the column again with an encoding other than pkl"
                raise fail(
                    DataError, file.name, got=f"{error}", expected="columns that can be read safely", do=do
                ) from error

    def examine(self, file: DataFile) -> Layout:
        """Return the number of samples of a shard."""
        shard = self._shards[file.path]
        columns = zip(shard.column_names, shard.column_encodings, strict=True)
        schema = ", ".join(f"{name}: {encoding}" for name, encoding in columns)
        return Layout(np.array([len(shard)], np.int64), file.digest(), schema)

    def open(self, file: DataFile) -> Opened:
        """Open a shard."""
        return _Samples(file, self._shards[file.path])


class LitData:
    """Reads chunks of LitData, by the access by index of its `StreamingDataset`.

    Args:
        folder: The folder of the chunks.
        files: The chunks.
        sizes: The number of samples of each.

    Raises:
        MissingPackageError: LitData is not installed.
    """

    def __init__(self, folder: Path, files: Sequence[DataFile], sizes: Sequence[int]) -> None:
        before = os.environ.get(_NO_CHECK)
        os.environ[_NO_CHECK] = before or "1"  # else it asks a package index for newer versions whenever data is opened
        try:
            load_library(f"the chunks of {folder}", "litdata", '"accmt-trainer[litdata]"')
        finally:
            if before is None:
                del os.environ[_NO_CHECK]
            else:
                os.environ[_NO_CHECK] = before
        self._folder = folder.absolute()
        begins = np.cumsum([0, *sizes]).tolist()
        self._ranges = {file.path: range(*ends) for file, *ends in zip(files, begins[:-1], begins[1:], strict=True)}
        self._dataset: tuple[int, Any] | None = None

    def examine(self, file: DataFile) -> Layout:
        """Return the number of samples of a chunk."""
        return Layout(np.array([len(self._ranges[file.path])], np.int64), file.digest())

    def open(self, file: DataFile) -> Opened:
        """Open a chunk; a process has one dataset for all of them."""
        if self._dataset is None or self._dataset[0] != os.getpid():
            import litdata

            self._dataset = os.getpid(), litdata.StreamingDataset(str(self._folder))
        return _Samples(file, self._dataset[1], self._ranges[file.path].start)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}


class _Samples:
    """An open shard of a library that reads samples by index, which is its only piece."""

    def __init__(self, file: DataFile, source: Any, begin: int = 0) -> None:
        self._file, self._source, self._begin = file, source, begin

    def piece(self, number: int) -> Piece:
        return self

    def take(self, rows: Sequence[int]) -> list[Any]:
        return [self._read(row) for row in rows]

    def _read(self, row: int) -> Any:
        try:
            return self._source[self._begin + row]
        except Exception as error:
            error.add_note(f"This happened while reading sample {row} of {self._file.name}.")
            raise


class WebDataset:
    """Reads tar files in WebDataset's layout, by wids. A sample has the bytes of its files, by their extension.

    Raises:
        MissingPackageError: wids is not installed.
    """

    def __init__(self) -> None:
        load_library("tar files", "wids", '"accmt-trainer[webdataset]"')

    def examine(self, file: DataFile) -> Layout:
        """Count the samples of a tar file.

        Raises:
            DataError: The file is torn, or in a bucket.
        """
        if file.storage is not None:
            got, do = "a tar file in a bucket", "copy the tar files to a local disk, or convert them to Parquet"
            raise fail(
                DataError, file.name, got=got, expected="a local tar file, whose samples can be read by index", do=do
            )
        index = index_of(file, "samples and files of a tar file", lambda target: _count(file, target))
        samples, members = index.tolist()
        layout = np.array([samples], np.int64)
        return Layout(layout, file.digest(), is_random=False, num_bytes=members * _OF_MEMBER)

    def open(self, file: DataFile) -> Opened:
        """Open a tar file."""
        return _TarFile(file)


def _count(file: DataFile, target: IO[bytes]) -> None:
    opened = _open_tar(file)
    try:
        ends = [offset + _TAR_BLOCK + size for _, offset, size in opened.reader.by_index]
        if file.read(max(0, file.size - _TAR_END), file.size) != bytes(_TAR_END) or max(ends, default=0) > file.size:
            raise file.torn("no end of the archive", "a complete tar file, which ends with zeros")
        target.write(np.array([len(opened), len(ends)], np.int64).tobytes())
    finally:
        opened.close()


def _open_tar(file: DataFile) -> Any:
    import struct

    import wids.wids

    try:
        return wids.wids.IndexedTarSamples(path=file.path)
    except (OSError, ValueError, struct.error) as error:
        raise file.torn(error, "a complete tar file") from error


class _TarFile:
    def __init__(self, file: DataFile) -> None:
        self._opened = _open_tar(file)

    def piece(self, number: int) -> Piece:
        return self

    def take(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return [
            {
                name.lstrip("."): value.getvalue() if hasattr(value, "getvalue") else value
                for name, value in self._opened[row].items()
            }
            for row in rows
        ]

    def __del__(self) -> None:
        if hasattr(self, "_opened"):
            self._opened.close()
