"""Images, tables and files that a run logs: they lie in the run folder first, and trackers get them from there."""

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

import numpy as np
import torch

from accmt.errors import ArgumentError, DataError, MissingPackageError, explain
from accmt.files import dumps, loads, staging_folder
from accmt.messages import warn_once
from accmt.tracking.history import History, folder_name
from accmt.tracking.values import to_plain

if TYPE_CHECKING:
    from PIL.Image import Image

MEDIA_FOLDER = "media"
_TABLE_FILE = "table.json"
_ACCEPTED_IMAGES = (
    "uint8, or floats from 0 to 1: tensors [images, channels, height, width], NumPy arrays [images, height, width, "
    "channels], with 1, 3 or 4 channels or none; one image without the first; a list; Pillow's images"
)
_TOLERANCE = 0.01
_MODES = ("L", "RGB", "RGBA")

Kind: TypeAlias = Literal["images", "table", "artifact"]


@dataclass(frozen=True)
class Media:
    """Something logged that is no number, as it lies in the run folder.

    Args:
        kind: What it is; an artifact is a file or a folder of files.
        name: Its name; that of an artifact is the file's or the folder's.
        step: The step that it belongs to.
        time: When it was logged, in seconds since the epoch.
        folder: Where its files are; nothing else has this folder.
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
        """Return the images by name: `samples`, or `samples/0`, `samples/1` and so on where there are several."""
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
        if problem:  # out of reach of the OSError, which would look like a server that is down
            raise DataError(explain(str(path), problem, "the table as it was logged", "nothing: it is lost"))
        return content["columns"], content["data"]


class MediaLog:
    """Takes images, tables and files of a run; all is with the operating system before a call returns.

    On a full disk there is one warning, and what was to be logged is lost.

    Processes: main only.
    """

    def __init__(self, history: History, notify: Callable[[], None]) -> None:
        self._history = history
        self._notify = notify
        self._run_folder = history.path.parent

    def log_images(self, images: Any, step: int) -> None:
        """Log images, as `AcceleratorModule.log_images` says."""
        if not isinstance(images, Mapping):
            got, do = f"{type(images).__name__}", 'log_images({"samples": images})'
            raise ArgumentError(explain("log_images", got, "images by name", do))
        _check("log_images", step, *images)
        for name, made in [(name, to_images(name, value)) for name, value in images.items()]:
            self._add("images", name, step, partial(write_images, made))

    def log_table(self, name: str, columns: Sequence[str], data: Iterable[Iterable[Any]], step: int) -> None:
        """Log a table, as `AcceleratorModule.log_table` says."""
        _check("log_table", step, name)
        content = dumps(_check_table(name, columns, data))
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
            raise ArgumentError(explain(where, got, "a folder of its own", "pass the folder of the files alone"))
        name = source.resolve().name
        self._add("artifact", name, step, lambda target: shutil.copytree(source, target / name))

    def _add(self, kind: Kind, name: str, step: int, write: Callable[[Path], Any]) -> None:
        try:
            folder = self._write(name, step, write)
        except OSError as error:
            expected = "free space and write permission for what is logged; training continues without it"
            do = f"make room in {self._run_folder}"
            warn_once(explain(f"logging {name!r} at step {step}", str(error), expected, do), about="media not written")
            return
        self._history.add_media(kind, name, folder.relative_to(self._run_folder).as_posix(), step)
        self._notify()

    def _write(self, name: str, step: int, write: Callable[[Path], Any]) -> Path:
        """Make `media/<name>/<step>`, or with `-2` and so on behind it, complete or not at all."""
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
        raise ArgumentError(explain(where, f"step={step!r}", "the number of a step, from 0", "leave step out"))
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise ArgumentError(explain(where, f"the name {name!r}", "text", f'{where}("samples", ...)'))


def _check_table(name: str, columns: Sequence[str], data: Iterable[Iterable[Any]]) -> dict[str, Any]:
    where = f"log_table({name!r}, ...)"
    titles = [columns] if isinstance(columns, str) else list(columns)
    if not titles or len(set(titles)) < len(titles) or not all(isinstance(title, str) for title in titles):
        got, do = f"columns={columns!r:.200}", 'columns=["text", "label"]'
        raise ArgumentError(explain(where, got, "unique column names", do))
    rows = [[_to_cell(cell) for cell in row] for row in data]
    for number, row in enumerate(rows):
        if len(row) != len(titles):
            got = f"{len(row)} cells in row {number}, for {len(titles)} columns"
            raise ArgumentError(explain(where, got, "one cell per column", "data=[[text, label], ...]"))
    return {"columns": titles, "data": rows}


def _to_cell(value: Any) -> Any:
    plain = to_plain(value)
    return dumps(plain) if isinstance(plain, dict | list) else plain


def to_images(name: str, images: Any) -> list[Image]:
    """Turn a batch, a list or a single one of tensors, arrays or Pillow's images into Pillow's images.

    Shapes: a tensor `[images, channels, height, width]`, a NumPy array `[images, height, width, channels]`; with 1, 3
    or 4 channels, or without that dimension; one image without the first.

    Args:
        name: Their name, for messages.
        images: Floats outside of 0 to 1 are cut off, with one warning.

    Processes: waits for the device of a tensor.
    """
    is_batch = isinstance(images, list | tuple) or getattr(images, "ndim", None) == 4
    made = [_to_image(name, image) for image in (images if is_batch else [images])]
    if not made:
        raise ArgumentError(explain(_where(name), "no image", "one or more", "log nothing where there is none"))
    return made


def write_images(images: Sequence[Image], folder: Path) -> None:
    """Write `0.png`, `1.png` and so on; larger than they might be, for the run waits for them."""
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png", compress_level=1)


def read_image(path: Path) -> Image:
    """Read a file of `write_images`."""
    problem = ""
    try:
        with _pillow().open(path) as image:
            copy: Image = image.copy()
            return copy
    except OSError as error:
        problem = str(error)
    # Out of reach of the OSError, which would look like a server that is down.
    raise DataError(explain(str(path), problem, "the image as it was logged", "nothing: it is lost"))


def _to_image(name: str, image: Any) -> Image:
    pillow = _pillow()
    if isinstance(image, pillow.Image):
        shown: Image = image if image.mode in _MODES else image.convert("RGB")
        return shown
    pixels = _to_pixels(image)
    if pixels is None:
        shape = f" of shape {list(image.shape)} and {image.dtype}" if hasattr(image, "shape") else ""
        do = 'log_images({"samples": images})'
        raise ArgumentError(explain(_where(name), f"{type(image).__name__}{shape}", _ACCEPTED_IMAGES, do))
    if pixels.dtype != np.uint8:
        pixels = _scale(name, pixels)
    made: Image = pillow.fromarray(pixels)
    return made


def _to_pixels(image: Any) -> np.ndarray[Any, Any] | None:
    """Return `[height, width]` or `[height, width, 3 or 4]`, bytes or floats; None where it is no image."""
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu()
        image = (image.float() if image.is_floating_point() else image).numpy()
        image = np.moveaxis(image, 0, -1) if image.ndim == 3 else image
    if not isinstance(image, np.ndarray) or not image.size:
        return None
    if image.ndim == 3 and image.shape[-1] == 1:
        image = image[..., 0]
    has_shape = image.ndim == 2 or (image.ndim == 3 and image.shape[-1] in (3, 4))
    has_type = image.dtype == np.uint8 or np.issubdtype(image.dtype, np.floating)
    return np.ascontiguousarray(image) if has_shape and has_type else None


def _scale(name: str, pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    lowest, highest = pixels.min(), pixels.max()
    if not (lowest >= -_TOLERANCE and highest <= 1 + _TOLERANCE):
        expected = "0 to 1, or uint8; what is outside is cut off"
        message = explain(_where(name), f"floats from {lowest:.4g} to {highest:.4g}", expected, "scale them")
        warn_once(message, about=f"pixels of {name}")
    scaled: np.ndarray[Any, Any] = np.nan_to_num(pixels.astype(np.float32)).clip(0, 1) * 255
    return scaled.round().astype(np.uint8)


def _where(name: str) -> str:
    return f"log_images({{{name!r}: ...}})"


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        message = explain("log_images", "no Pillow", "the package that writes images", "pip install pillow")
        raise MissingPackageError(message) from error
    return Image
