"""Converts values for trackers: plain floats, flat configurations, names that each tracker accepts, and media.

None means "no value" and is omitted from a row. NaN and infinities are passed on, so that a diverging run is visible:
`history.jsonl` stores them as the strings "NaN", "Infinity" and "-Infinity", TensorBoard and MLflow keep NaN, and
MLflow's database stores an infinity as the largest float.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from zlib import crc32

import numpy as np
import torch

from accmt.errors import ArgumentError, DataError, MetricError, MissingPackageError, explain
from accmt.files import dumps, loads, staging_folder
from accmt.messages import warn_once
from accmt.options.checks import as_float
from accmt.tracking.history import History, folder_name

if TYPE_CHECKING:
    from PIL.Image import Image

HIGHER_IS_BETTER = "higher is better"
LOWER_IS_BETTER = "lower is better"
"""Values of `metrics.<name>` in the configuration of a run."""

Scalar: TypeAlias = str | int | float | bool


def to_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Convert one row to plain Python floats; entries that are None are omitted."""
    numbers = {name: _item(value) for name, value in values.items() if value is not None}
    for name, number in numbers.items():
        if not isinstance(number, int | float):
            got = f"{values[name]!r:.200} ({type(values[name]).__name__})"
            expected = "a number: int, float, bool, or a NumPy or torch scalar"
            do = f"log {name!r} as a number, for example its mean"
            raise MetricError(explain(f"the logged value {name!r}", got, expected, do))
    return {name: as_float(number) for name, number in numbers.items()}


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
    if isinstance(value, type) or callable(value):
        return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else str(value)
    number = _item(value)
    return number if type(number) in (int, float, bool) else str(value)


def flatten(config: Mapping[str, Any]) -> dict[str, Scalar]:
    """Flatten a nested configuration: `{"optim": {"lr": 1}}` becomes `{"optim.lr": 1}`.

    Lists and empty dicts become JSON strings, None becomes "None", because trackers accept scalars only.
    """
    flat: dict[str, Scalar] = {}
    for key, value in to_plain(config).items():
        if isinstance(value, dict) and value:
            flat |= {f"{key}.{inner}": item for inner, item in flatten(value).items()}
        elif isinstance(value, dict | list):
            flat[key] = dumps(value)
        else:
            flat[key] = "None" if value is None else value
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
        if cleaned in self._taken:
            cleaned = f"{cleaned}_{crc32(name.encode()):08x}"
        self._taken.add(cleaned)
        self._cleaned[name] = cleaned
        return cleaned


def _item(value: Any) -> Any:
    """Return the element of a NumPy or torch scalar; return anything else unchanged."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    if isinstance(value, np.ndarray | np.generic):
        return value.item() if value.size == 1 else value
    return value


# ---- Images, tables and files: they are written to the run folder and delivered from there.


MEDIA_FOLDER = "media"
_TABLE_FILE = "table.json"
_ACCEPTED_IMAGES = (
    "uint8 or floats from 0 to 1: tensors [images, channels, height, width] or NumPy arrays [images, height, width, "
    "channels] with 1, 3 or 4 channels or without that dimension; a single image; a list; Pillow images"
)
_TOLERANCE = 0.01
_MODES = ("L", "RGB", "RGBA")

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
        path, problem = self.folder / _TABLE_FILE, ""
        try:
            content = loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            problem = str(error)
        if problem:  # not chained to the OSError, which would look like an outage of the server
            raise DataError(
                explain(str(path), problem, "the table that was logged", "log it again: it cannot be recovered")
            )
        return content["columns"], content["data"]


class MediaLog:
    """Logs images, tables and files of a run; they are passed to the operating system before a call returns.

    If the disk is full, accmt warns once, and what you log is lost.

    Processes: main only.
    """

    def __init__(self, history: History, notify: Callable[[], None]) -> None:
        self._history = history
        self._notify = notify
        self._run_folder = history.path.parent

    def log_images(self, images: Any, step: int) -> None:
        """Log images; see `AcceleratorModule.log_images`."""
        if not isinstance(images, Mapping):
            got, do = f"{type(images).__name__}", 'log_images({"samples": images})'
            raise ArgumentError(explain("log_images", got, "a dict of images by name", do))
        _check("log_images", step, *images)
        for name, made in [(name, to_images(name, value)) for name, value in images.items()]:
            self._add("images", name, step, partial(write_images, made))

    def log_table(self, name: str, columns: Sequence[str], data: Iterable[Iterable[Any]], step: int) -> None:
        """Log a table; see `AcceleratorModule.log_table`."""
        _check("log_table", step, name)
        where = f"log_table({name!r}, ...)"
        titles = [columns] if isinstance(columns, str) else list(columns)
        if not titles or len(set(titles)) < len(titles) or not all(isinstance(title, str) for title in titles):
            got, do = f"columns={columns!r:.200}", 'columns=["text", "label"]'
            raise ArgumentError(explain(where, got, "unique column names", do))
        plain = ([to_plain(cell) for cell in row] for row in data)
        rows = [[dumps(cell) if isinstance(cell, dict | list) else cell for cell in row] for row in plain]
        for number, row in enumerate(rows):
            if len(row) != len(titles):
                got = f"{len(row)} cells in row {number} for {len(titles)} columns"
                raise ArgumentError(explain(where, got, "one cell per column", "data=[[text, label], ...]"))
        content = dumps({"columns": titles, "data": rows})
        self._add("table", name, step, lambda target: (target / _TABLE_FILE).write_text(content, encoding="utf-8"))

    def log_artifact(self, path: str | PathLike[str], step: int) -> None:
        """Log a copy of a file."""
        source = Path(path)
        _check("log_artifact", step)
        if not source.is_file():
            got, do = ("a folder", "log_artifacts(folder)") if source.is_dir() else ("no such file", "check the path")
            raise ArgumentError(explain(f"log_artifact({str(path)!r})", got, "a file", do))
        self._add("artifact", source.name, step, lambda target: shutil.copy2(source, target / source.name))

    def log_artifacts(self, folder: str | PathLike[str], step: int) -> None:
        """Log copies of all files of a folder."""
        source = Path(folder).absolute()
        _check("log_artifacts", step)
        where = f"log_artifacts({str(folder)!r})"
        if not source.is_dir():
            got, do = ("a file", "log_artifact(path)") if source.is_file() else ("no such folder", "check the path")
            raise ArgumentError(explain(where, got, "a folder", do))
        if self._run_folder.resolve().is_relative_to(source.resolve()):
            got = "a folder that contains the run folder, which would be copied into itself"
            do = "pass the folder that has only the files to log"
            raise ArgumentError(explain(where, got, "a folder outside the run folder's path", do))
        name = source.resolve().name
        self._add("artifact", name, step, lambda target: shutil.copytree(source, target / name))

    def _add(self, kind: Kind, name: str, step: int, write: Callable[[Path], Any]) -> None:
        try:
            folder = self._write(name, step, write)
        except OSError as error:
            expected = "free disk space and write permission; training continues, and this is not logged"
            do = f"free disk space in {self._run_folder}"
            warn_once(explain(f"logging {name!r} at step {step}", str(error), expected, do), about="media not written")
            return
        self._history.add_media(kind, name, folder.relative_to(self._run_folder).as_posix(), step)
        self._notify()

    def _write(self, name: str, step: int, write: Callable[[Path], Any]) -> Path:
        """Create `media/<name>/<step>` atomically, with a suffix `-2` and so on if it exists."""
        parent = self._run_folder / MEDIA_FOLDER / folder_name(name)
        parent.mkdir(parents=True, exist_ok=True)
        numbered = (f"{step:08d}" if number == 1 else f"{step:08d}-{number}" for number in itertools.count(1))
        folder = next(parent / name for name in numbered if not (parent / name).exists())
        with staging_folder(parent, "media") as staged:
            content = staged / "content"
            content.mkdir()
            write(content)
            content.rename(folder)
        return folder


def _check(where: str, step: Any, *names: Any) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ArgumentError(explain(where, f"step={step!r}", "a step number >= 0", "leave out step"))
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise ArgumentError(explain(where, f"the name {name!r}", "a non-empty string", f'{where}("samples", ...)'))


def to_images(name: str, images: Any) -> list[Image]:
    """Convert a batch, a list or a single image (tensor, array or Pillow image) to Pillow images.

    Shapes: a tensor `[images, channels, height, width]`, a NumPy array `[images, height, width, channels]`; with 1, 3
    or 4 channels, or without that dimension; a single image has no first dimension.

    Args:
        name: The name of the images, for messages.
        images: The images. Floats outside 0 to 1 are clipped, with one warning.

    Processes: waits for the device of a tensor.
    """
    is_array = isinstance(images, np.ndarray | torch.Tensor)
    is_batch = isinstance(images, list | tuple) or (is_array and images.ndim == 4)
    made = [_to_image(name, image) for image in (images if is_batch else [images])]
    if not made:
        raise ArgumentError(explain(_where(name), "no images", "one or more", "skip the call if there are none"))
    return made


def write_images(images: Sequence[Image], folder: Path) -> None:
    """Write `0.png`, `1.png` and so on; with fast compression, because the run waits."""
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png", compress_level=1)


def read_image(path: Path) -> Image:
    """Read a file written by `write_images`."""
    problem = ""
    try:
        with _pillow().open(path) as image:
            copy: Image = image.copy()
            return copy
    except OSError as error:
        problem = str(error)
    # Not chained to the OSError, which would look like an outage of the server.
    raise DataError(explain(str(path), problem, "the image that was logged", "log it again: it cannot be recovered"))


def _to_image(name: str, image: Any) -> Image:
    pillow = _pillow()
    if isinstance(image, pillow.Image):
        shown: Image = image if image.mode in _MODES else image.convert("RGB")
        return shown
    pixels = image
    if isinstance(image, torch.Tensor):
        tensor = image.detach().cpu()
        pixels = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        pixels = np.moveaxis(pixels, 0, -1) if pixels.ndim == 3 else pixels
    is_image = isinstance(pixels, np.ndarray) and pixels.size > 0
    if is_image:
        pixels = pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels
        has_shape = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[-1] in (3, 4))
        is_image = has_shape and (pixels.dtype == np.uint8 or np.issubdtype(pixels.dtype, np.floating))
    if not is_image:
        shape = (
            f" of shape {list(image.shape)} and {image.dtype}" if isinstance(image, np.ndarray | torch.Tensor) else ""
        )
        do = 'log_images({"samples": images})'
        raise ArgumentError(explain(_where(name), f"{type(image).__name__}{shape}", _ACCEPTED_IMAGES, do))
    if pixels.dtype != np.uint8:
        lowest, highest = pixels.min(), pixels.max()
        if not (lowest >= -_TOLERANCE and highest <= 1 + _TOLERANCE):
            expected = "0 to 1, or uint8; values outside are clipped"
            message = explain(_where(name), f"floats from {lowest:.4g} to {highest:.4g}", expected, "scale them")
            warn_once(message, about=f"pixels of {name}")
        pixels = (np.nan_to_num(pixels.astype(np.float32)).clip(0, 1) * 255).round().astype(np.uint8)
    made: Image = pillow.fromarray(np.ascontiguousarray(pixels))
    return made


def _where(name: str) -> str:
    return f"log_images({{{name!r}: ...}})"


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        message = explain("log_images", "Pillow is not installed", "Pillow, to write images", "pip install pillow")
        raise MissingPackageError(message) from error
    return Image
