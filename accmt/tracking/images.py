"""Turns what people have as images into PNG files, and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from accmt.errors import ArgumentError, DataError, MissingPackageError, explain
from accmt.messages import warn_once

if TYPE_CHECKING:
    from PIL.Image import Image

_EXPECTED = "uint8, or floats from 0 to 1: tensors [images, channels, height, width], NumPy arrays [images, height, "
_EXPECTED += "width, channels], with 1, 3 or 4 channels or none; one image without the first; a list; Pillow's images"
_TOLERANCE = 0.01
_MODES = ("L", "RGB", "RGBA")


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
        raise ArgumentError(explain(_where(name), f"{type(image).__name__}{shape}", _EXPECTED, do))
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
