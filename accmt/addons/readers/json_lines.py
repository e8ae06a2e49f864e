"""Reads JSON lines by index: where each line begins is found once, and kept."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
import xxhash

from accmt.addons.readers.layout import Layout, Opened, Piece
from accmt.addons.readers.places import DataFile, Numbers, index_of
from accmt.errors import DataError, explain

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
        if file.storage is None:
            lines = [os.pread(self._descriptor, end - begin, begin) for begin, end in bounds]
        else:  # at the same time
            begins, ends = map(list, zip(*bounds, strict=True))
            lines = file.storage.fs.cat_ranges([file.path] * len(rows), begins, ends)
        parsed = []
        for row, line in zip(rows, lines, strict=True):
            try:
                parsed.append(json.loads(line))
            except ValueError as error:
                got = f"row {row} of {file.name}: {error}"
                raise DataError(explain(file.name, got, _EXPECTED, "correct this line")) from error
        return parsed
