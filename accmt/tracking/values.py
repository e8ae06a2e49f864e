"""Converts values for trackers: plain floats, flat configurations, names that each tracker accepts, and stored media.

None means "no value" and is omitted from a row. NaN and infinities are passed on, so that a diverging run is visible:
`history.jsonl` stores them as the strings "NaN", "Infinity" and "-Infinity", TensorBoard and MLflow keep NaN, and
MLflow's database stores an infinity as the largest float.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from zlib import crc32

import numpy as np
import torch

from accmt.errors import DataError, MetricError, MissingPackageError, fail
from accmt.files import dumps, loads
from accmt.options.checks import as_float

if TYPE_CHECKING:
    from PIL.Image import Image

HIGHER_IS_BETTER = "higher is better"
LOWER_IS_BETTER = "lower is better"
"""Values of `metrics.<name>` in the configuration of a run."""

Scalar: TypeAlias = str | int | float | bool


def to_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Convert one row to plain Python floats; entries that are None are omitted."""
    floats: dict[str, float] = {}
    for name, value in values.items():
        if value is None:
            continue
        number = _item(value)
        if not isinstance(number, int | float):
            got = f"{value!r:.200} ({type(value).__name__})"
            expected = "a number: int, float, bool, or a NumPy or torch scalar"
            do = f"log {name!r} as a number, for example its mean"
            raise fail(MetricError, f"the logged value {name!r}", got=got, expected=expected, do=do)
        floats[name] = as_float(number)
    return floats


def to_plain(value: Any) -> Any:
    """Convert a configuration to JSON-serializable values: dicts with string keys, lists, scalars and None.

    Classes and functions become their dotted names; all other objects (paths, enums, dtypes) become their `str`.
    """
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    number = _item(value)
    if type(number) in (int, float, bool):
        return number
    return str(value)


def flatten(config: Mapping[str, Any]) -> dict[str, Scalar]:
    """Flatten a nested configuration: `{"optim": {"lr": 1}}` becomes `{"optim.lr": 1}`.

    Lists and empty dicts become JSON strings, None becomes "None", because trackers accept scalars only.
    """
    flat: dict[str, Scalar] = {}
    for key, value in to_plain(config).items():
        match value:
            case dict() if value:
                for inner, item in flatten(value).items():
                    flat[f"{key}.{inner}"] = item
            case dict() | list():
                flat[key] = dumps(value)
            case None:
                flat[key] = "None"
            case _:
                flat[key] = value
    return flat


class CleanNames:
    """Maps our names to names that one tracker accepts, consistently and without collisions.

    Args:
        clean: Makes a name that the tracker accepts. If two names have the same result, a digest of the original is
            appended to the later one.
        known: Names assigned before, such as by an earlier process; new names are added to it.
    """

    def __init__(self, clean: Callable[[str], str], known: dict[str, str] | None = None) -> None:
        self._clean = clean
        self._cleaned = {} if known is None else known
        self._taken = set(self._cleaned.values())

    def rename(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {self._cleaned.get(name) or self._add(name): value for name, value in values.items()}

    def _add(self, name: str) -> str:
        cleaned = self._clean(name)
        if cleaned in self._taken:  # "a b" and "a_b" would be one curve
            cleaned = f"{cleaned}_{crc32(name.encode()):08x}"
        self._taken.add(cleaned)
        self._cleaned[name] = cleaned
        return cleaned


def _item(value: Any) -> Any:
    """Return the element of a NumPy or torch scalar; return anything else unchanged."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, np.ndarray | np.generic) and value.size == 1:
        return value.item()
    return value  # the caller names a value that is no number


# ---- Images, tables and files, which are delivered from the run folder.


TABLE_FILE = "table.json"

Kind: TypeAlias = Literal["images", "table", "artifact"]


@dataclass(frozen=True)
class Media:
    """Logged images, table or artifact, stored in the run folder.

    Args:
        kind: The kind; an artifact is a file or a folder of files.
        name: The name; for an artifact, that of the file or folder.
        step: The step at which it was logged.
        time: The time at which it was logged, in seconds since the epoch.
        folder: The folder of its files, which contains nothing else.
    """

    kind: Kind
    name: str
    step: int
    time: float
    folder: Path

    @classmethod
    def of_line(cls, run_folder: Path, line: Mapping[str, Any]) -> Media:
        """Read a line of `history.jsonl`."""
        media = line["media"]
        return cls(media["kind"], media["name"], line["step"], line["time"], run_folder / media["path"])

    @property
    def path(self) -> Path:
        return self.folder / self.name

    def images(self) -> dict[str, Image]:
        """Return the images by name: `samples`, or `samples/0`, `samples/1` and so on if there are several."""
        paths = sorted(self.folder.glob("*.png"), key=lambda path: int(path.stem))
        names = [self.name] if len(paths) == 1 else [f"{self.name}/{path.stem}" for path in paths]
        return dict(zip(names, map(read_image, paths), strict=True))

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Return the columns and the rows of a table."""
        path, problem = self.folder / TABLE_FILE, ""
        try:
            content = loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            problem = str(error)
        if problem:  # not chained to the OSError, which would look like an outage of the server
            raise fail(
                DataError,
                str(path),
                got=problem,
                expected="the table that was logged",
                do="log it again: it cannot be recovered",
            )
        return content["columns"], content["data"]


def read_image(path: Path) -> Image:
    """Read a file written by `write_images`."""
    problem = ""
    try:
        with import_pillow().open(path) as image:
            copy: Image = image.copy()
            return copy
    except OSError as error:
        problem = str(error)
    # Not chained to the OSError, which would look like an outage of the server.
    raise fail(
        DataError,
        str(path),
        got=problem,
        expected="the image that was logged",
        do="log it again: it cannot be recovered",
    )


def import_pillow() -> ModuleType:
    """Return Pillow's module of images; it is imported only where images are logged."""
    try:
        from PIL import Image
    except ImportError as error:
        got, expected = "Pillow is not installed", "Pillow, to write images"
        raise fail(MissingPackageError, "log_images", got=got, expected=expected, do="pip install pillow") from error
    return Image
