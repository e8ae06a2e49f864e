"""Rows of supervised fine-tuning from files: JSON lines, what `datasets` writes, and other files that it reads."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, Dataset

from accmt.errors import DataError, MissingPackageError, explain

_KINDS = {".jsonl": "json lines", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_EXPECTED = f"a file ({', '.join(_KINDS)}), or a folder that `Dataset.save_to_disk` wrote"


def read_rows(where: str, paths: Sequence[str], split: str) -> Any:
    """Return the rows of files and folders, by index.

    Args:
        where: Which setting names them, for messages.
        paths: Of several, the rows come one after the other.
        split: What is taken of a folder that holds several sets.

    Raises:
        FileNotFoundError: One is not there.
        DataError: One is something else, or holds no rows.
    """
    parts = [_read(where, Path(path), split) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        if not len(part):
            raise DataError(explain(where, f"{path}, without a row", "rows", "look at what wrote it"))
    return parts[0] if len(parts) == 1 else ConcatDataset(parts)


def _read(where: str, path: Path, split: str) -> Any:
    if not path.exists():
        got = f"{path}: no such file, seen from {Path.cwd()}"
        raise FileNotFoundError(explain(where, got, _EXPECTED, "correct the path"))
    if path.suffix == ".jsonl" and path.is_file():
        return JsonLines(where, path)
    try:
        import datasets
    except ImportError as error:
        got, do = f"{path}, and datasets is not installed", 'pip install "datasets>=5.1"; or write JSON lines (.jsonl)'
        raise MissingPackageError(explain(where, got, "the package datasets", do)) from error
    if path.is_file() and path.suffix in _KINDS:
        try:
            return datasets.load_dataset(path.suffix[1:], data_files=str(path), split="train")
        except (datasets.exceptions.DatasetsError, ValueError, OSError, StopIteration) as error:
            reason = error.__cause__ or error
            got = f"{path}: {reason}" if str(reason) else f"{path}, without a row"
            expected = f"rows in the form of {path.suffix}"
            raise DataError(explain(where, got, expected, "look at what wrote it; or write JSON lines")) from error
    try:
        found = datasets.load_from_disk(str(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(explain(where, f"{path}: {error}", _EXPECTED, "name a file in it")) from error
    if not isinstance(found, datasets.DatasetDict):
        return found
    if split not in found:
        got, do = f"{path} with {', '.join(found)}", f"name one of them: {path / next(iter(found))}"
        raise DataError(explain(where, got, f"the set `{split}`", do))
    return found[split]


class JsonLines(Dataset[dict[str, Any]]):
    """The rows of a file of JSON lines, as they are written, each read when it is asked for.

    `datasets` would give all rows the entries of all others, such as the arguments of every tool, and None in them.
    """

    def __init__(self, where: str, path: Path) -> None:
        self._where = where
        self._path = path
        self._starts = array("q")
        start = 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    self._starts.append(start)
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self._path.open("rb") as file:  # opened each time: processes that read must not share a position
            file.seek(self._starts[index])
            line = file.readline()
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError as error:
            got, expected = f"row {index} of {self._path}: {error}", "one JSON object on each line"
            raise DataError(explain(self._where, got, expected, "correct that line")) from error
        return row
