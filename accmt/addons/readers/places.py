"""Finds the files of data: paths, folders, globs and URLs, and what identifies a version of a file."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
import xxhash

from accmt.errors import ArgumentFileError, DataError, MissingPackageError, StoreError, fail
from accmt.files import replace_file

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "adl": "azure"}
_MAGIC = "*?["
_TAIL = 1 << 16  # the footer of most Parquet files
_BLOCK = 1 << 12
_BLOCKS = 14
_KEPT_FROM = 1 << 24  # a smaller file is indexed again within milliseconds
_VERSION = 1
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5")  # what buckets say of the contents of a file


class Storage:
    """A file system of fsspec, opened again in each process: connections do not survive a fork.

    Args:
        url: A path or URL on it.
        options: Arguments of the file system.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url = url
        self._options = dict(options)
        self._of: tuple[int, Any] | None = None

    @property
    def fs(self) -> Any:
        """The file system."""
        if self._of is None or self._of[0] != os.getpid():
            self._of = os.getpid(), self.open()[0]
        return self._of[1]

    def open(self) -> tuple[Any, str]:
        """Return the file system and the path on it.

        Raises:
            MissingPackageError: The package for this kind of URL is not installed.
            DataError: fsspec does not know this kind of URL.
        """
        from fsspec.core import url_to_fs

        try:
            fs, path = url_to_fs(self._url, **self._options)
        except ImportError as error:
            extra = _EXTRAS.get(self._url.partition("://")[0])
            do = f'pip install "accmt-trainer[{extra}]"' if extra else "install the package that it names"
            raise fail(
                MissingPackageError, self._url, got=str(error), expected="an installed fsspec file system", do=do
            ) from error
        except ValueError as error:
            do = "use s3://, gs://, az://, hf:// or another protocol that fsspec knows"
            raise fail(
                DataError, self._url, got=str(error), expected="a path, or a URL that fsspec can open", do=do
            ) from error
        return fs, str(path)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_of": None}


class DataFile(NamedTuple):
    """A file with rows.

    Attributes:
        name: Its path or URL, for messages.
        label: Its name within the path that it was found with.
        path: Its path on the file system.
        size: Its size in bytes.
        version: What changes when the file is replaced: its time of modification, or what the bucket says.
        storage: The file system; None for a local file.
    """

    name: str
    label: str
    path: str
    size: int
    version: str
    storage: Storage | None = None

    def open(self) -> Any:
        """Open it to read bytes.

        Raises:
            StoreError: Now, or in a later read: the disk or the store does not return them.
        """
        return Path(self.path).open("rb") if self.storage is None else _FileInStore(self)

    def read(self, begin: int, end: int) -> bytes:
        """Return some of its bytes.

        Raises:
            StoreError: The disk or the store does not return them.
        """
        if self.storage is not None:
            with self.reading():
                return bytes(self.storage.fs.cat_file(self.path, start=begin, end=end))
        with self.reading(), self.open() as file:
            file.seek(begin)
            return bytes(file.read(end - begin))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise what the disk or the store answers, whose types differ between file systems, as a StoreError."""
        try:
            yield
        except Exception as error:
            got = f"its store answered {type(error).__name__}: {error}"
            do = "check the store, the network and the credentials, and resume the run"
            raise fail(StoreError, self.name, got=got, expected="its bytes", do=do) from error

    def require_unchanged(self) -> None:
        """Check a local file before it is read with what was known of it at the start.

        Raises:
            StoreError: It is gone, was replaced, or was written to.
        """
        if self.storage is not None:
            return
        try:
            size, version = _identify(os.stat(self.path))  # noqa: PTH116 - for each batch, and twice as fast
        except OSError as error:
            got, do = f"{error.strerror}", "restore it, and resume the run"
            raise fail(StoreError, self.name, got=got, expected="the file, until the run ends", do=do) from error
        if (size, version) != (self.size, self.version):
            got = f"a file that has changed while it was in use: {size} bytes"
            expected = f"the file as it was at the start: {self.size} bytes"
            do = "do not write files that a run reads; restore it, and resume the run"
            raise fail(StoreError, self.name, got=got, expected=expected, do=do)

    def digest(self) -> str:
        """Return a digest of its size and of parts of it, from its beginning to its end; or what the bucket says."""
        found = xxhash.xxh3_64(str(self.size).encode())
        tail = max(0, self.size - _TAIL)
        if self.storage is not None:
            if self.version:
                return self.version
            found.update(self.read(tail, self.size))
            return found.hexdigest()
        with self.open() as file:
            for begin in sorted({tail * number // _BLOCKS for number in range(_BLOCKS)}):
                file.seek(begin)
                found.update(file.read(_BLOCK))
            file.seek(tail)
            found.update(file.read(_TAIL))
        return found.hexdigest()

    def torn(self, reason: object, expected: str) -> DataError:
        """Return the error for a file that cannot be read."""
        do = "write or copy it again: a program that was interrupted, or a full disk, leaves such a file"
        return fail(DataError, self.name, got=f"{reason}", expected=expected, do=do)


class _FileInStore(io.RawIOBase):
    """An open file in a store; pyarrow passes on the StoreErrors of its reads."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        storage: Any = file.storage
        with file.reading():
            self._opened = storage.fs.open(file.path, "rb")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._opened.seek(offset, whence))

    def tell(self) -> int:
        return int(self._opened.tell())

    def readinto(self, buffer: Any) -> int:
        with self._file.reading():
            return int(self._opened.readinto(buffer))

    def close(self) -> None:
        self._opened.close()
        super().close()


def _identify(status: os.stat_result) -> tuple[int, str]:
    return status.st_size, str(status.st_mtime_ns)  # without the inode, which file systems in user space may change


def find_files(where: str, paths: Sequence[str], options: Mapping[str, Any], suffixes: Sequence[str]) -> list[DataFile]:
    """Return the files of paths, folders, globs and URLs: in the order of the paths, sorted by name within each.

    Args:
        where: What names them, for messages.
        paths: The paths.
        options: Arguments of the file systems.
        suffixes: The names of files to take from folders.

    Raises:
        ArgumentFileError: A path does not exist, or nothing matches it.
        DataError: A folder has no such file.
        MissingPackageError: The package for a kind of URL is not installed.
    """
    return [file for path in paths for file in _find(where, path, options, suffixes)]


def _find(where: str, path: str, options: Mapping[str, Any], suffixes: Sequence[str]) -> Iterator[DataFile]:
    from fsspec.implementations.local import LocalFileSystem

    storage = Storage(path, options)
    fs, root = storage.open()
    is_local = isinstance(fs, LocalFileSystem)
    folder, expected = root.rpartition("/")[0], "a file, a folder or a glob"
    if any(mark in root for mark in _MAGIC) and not fs.exists(root):
        matched = (name for name in fs.glob(root) if not name.rpartition("/")[2].startswith("."))
        names, expected = [name for name in matched if not fs.isdir(name)], "a glob that matches files"
        folder = re.split(f"[{_MAGIC}]", root)[0].rpartition("/")[0]
    elif fs.isdir(root):
        folder = root
        hidden = re.compile(r"(^|/)[._]")  # a file, or a folder above it, that has no data: `.git`, `_SUCCESS`
        found = [name for name in fs.find(root) if name.endswith(tuple(suffixes))]
        names = [name for name in found if not hidden.search(name[len(root) :])]
        if not names:
            got = f"{path}: a folder without such files"
            raise fail(
                DataError, where, got=got, expected=f"files that end with {', '.join(suffixes)}", do="correct the path"
            )
    else:
        names = [root] if fs.exists(root) else []
    if not names:
        at = f"; the working directory is {Path.cwd()}" if is_local and not Path(path).is_absolute() else ""
        raise fail(ArgumentFileError, where, got=f"{path}: no such file{at}", expected=expected, do="correct the path")
    for name in sorted(names):
        label = name.removeprefix(folder).lstrip("/")
        if is_local:
            size, version = _identify(Path(name).stat())
            yield DataFile(_shown(name), label, name, size, version)
        else:
            info = fs.info(name)
            version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
            yield DataFile(fs.unstrip_protocol(name), label, name, int(info["size"]), version, storage)


def _shown(name: str) -> str:
    path, here = Path(name), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else name


# ---- Indices: what is known of a file after reading it once


def index_of(file: DataFile, kind: str, build: Callable[[IO[bytes]], None]) -> Numbers:
    """Return the index of a file: int64 numbers, built once, and then mapped into memory.

    It is kept in the user's cache folder, under the path of the file and its version.

    Args:
        file: The file.
        kind: What the index has.
        build: Writes the numbers.
    """
    if file.size < _KEPT_FROM or not file.version:
        return _build_in_memory(build)
    key = _digest(f"{kind} {_VERSION} {file.name if file.storage else file.path}")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accmt" / "rows"
    path = folder / f"{key}-{_digest(f'{file.size} {file.version}')}.index"
    if not path.is_file():

        def write(part: Path) -> None:
            with part.open("wb") as target:
                build(target)

        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, write)
        except OSError:  # no such folder, or it is full
            return _build_in_memory(build)
        for older in set(folder.glob(f"{key}-*.index")) - {path}:
            older.unlink(missing_ok=True)
    return np.memmap(path, np.int64, "r")


def _build_in_memory(build: Callable[[IO[bytes]], None]) -> Numbers:
    target = BytesIO()
    build(target)
    return np.frombuffer(target.getbuffer(), np.int64)


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())
