"""Logs images, tables and files: they are written to the run folder, and delivered to trackers from there."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from accmt.errors import ArgumentError, explain, fail
from accmt.files import dumps, staging_folder
from accmt.messages import warn_once
from accmt.tracking.history import History, folder_name
from accmt.tracking.values import TABLE_FILE, Kind, import_pillow, to_plain

if TYPE_CHECKING:
    from PIL.Image import Image

MEDIA_FOLDER = "media"
_ACCEPTED_IMAGES = (
    "uint8 or floats from 0 to 1: tensors [images, channels, height, width] or NumPy arrays [images, height, width, "
    "channels] with 1, 3 or 4 channels or without that dimension; a single image; a list; Pillow images"
)
_TOLERANCE = 0.01
_MODES = ("L", "RGB", "RGBA")


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
            raise fail(ArgumentError, "log_images", got=got, expected="a dict of images by name", do=do)
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
            raise fail(ArgumentError, where, got=got, expected="unique column names", do=do)
        plain = ([to_plain(cell) for cell in row] for row in data)
        rows = [[dumps(cell) if isinstance(cell, dict | list) else cell for cell in row] for row in plain]
        for number, row in enumerate(rows):
            if len(row) != len(titles):
                got = f"{len(row)} cells in row {number} for {len(titles)} columns"
                raise fail(
                    ArgumentError, where, got=got, expected="one cell per column", do="data=[[text, label], ...]"
                )
        content = dumps({"columns": titles, "data": rows})
        self._add("table", name, step, lambda target: (target / TABLE_FILE).write_text(content, encoding="utf-8"))

    def log_artifact(self, path: str | PathLike[str], step: int) -> None:
        """Log a copy of a file."""
        source = Path(path)
        _check("log_artifact", step)
        if not source.is_file():
            got, do = ("a folder", "log_artifacts(folder)") if source.is_dir() else ("no such file", "check the path")
            raise fail(ArgumentError, f"log_artifact({str(path)!r})", got=got, expected="a file", do=do)
        self._add("artifact", source.name, step, lambda target: shutil.copy2(source, target / source.name))

    def log_artifacts(self, folder: str | PathLike[str], step: int) -> None:
        """Log copies of all files of a folder."""
        source = Path(folder).absolute()
        _check("log_artifacts", step)
        where = f"log_artifacts({str(folder)!r})"
        if not source.is_dir():
            got, do = ("a file", "log_artifact(path)") if source.is_file() else ("no such folder", "check the path")
            raise fail(ArgumentError, where, got=got, expected="a folder", do=do)
        if self._run_folder.resolve().is_relative_to(source.resolve()):
            got = "a folder that contains the run folder, which would be copied into itself"
            do = "pass the folder that has only the files to log"
            raise fail(ArgumentError, where, got=got, expected="a folder outside the run folder's path", do=do)
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
        raise fail(ArgumentError, where, got=f"step={step!r}", expected="a step number >= 0", do="leave out step")
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise fail(
                ArgumentError,
                where,
                got=f"the name {name!r}",
                expected="a non-empty string",
                do=f'{where}("samples", ...)',
            )


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
        raise fail(
            ArgumentError, _where(name), got="no images", expected="one or more", do="skip the call if there are none"
        )
    return made


def write_images(images: Sequence[Image], folder: Path) -> None:
    """Write `0.png`, `1.png` and so on; with fast compression, because the run waits."""
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png", compress_level=1)


def _to_image(name: str, image: Any) -> Image:
    pillow = import_pillow()
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
        raise fail(ArgumentError, _where(name), got=f"{type(image).__name__}{shape}", expected=_ACCEPTED_IMAGES, do=do)
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
