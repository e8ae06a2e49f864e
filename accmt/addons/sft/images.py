"""Images in conversations: where they stand in the text, and what a processor makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from io import BytesIO
from os import PathLike, fspath
from typing import Any, NamedTuple

import numpy as np
import torch

from accmt.errors import DataError, MissingPackageError, fail

_SOURCES = ("image", "path", "url", "image_url", "base64")
_KINDS = ("image", "image_url")
_OTHER_KINDS = ("video", "audio", "input_audio", "video_url", "audio_url")
_EXPECTED = 'a path, an image of PIL or an array, such as {"type": "image", "path": "cat.png"}'


class ImageError(Exception):
    """A processor rejected images, or makes of them what cannot be aligned with the text."""


class RowImages(NamedTuple):
    """The images of a row.

    Attributes:
        tensors: What the processor makes of them, such as `pixel_values`; images are along the first dimension.
        tokens: Further entries with one value for each token of the row.
        end: The index after the last token that stands for an image.
    """

    tensors: dict[str, torch.Tensor]
    tokens: dict[str, list[int]]
    end: int

    def slice(self, start: int, stop: int | None) -> RowImages:
        """Return the entries of a part of the row."""
        return RowImages(self.tensors, {name: row[start:stop] for name, row in self.tokens.items()}, self.end - start)


class Expanded(NamedTuple):
    """The tokens of a row with those of its images.

    Attributes:
        input_ids: All tokens.
        places: For each, its place in the text, in which an image is one token; None for tokens of images.
        images: The images.
    """

    input_ids: list[int]
    places: list[int | None]
    images: RowImages


class ImageReader(NamedTuple):
    """Reads images, and replaces the token of each by as many as the model needs.

    Attributes:
        processor: A processor of transformers with a tokenizer and an image processor.
    """

    processor: Any

    def expand(self, text: str, short: Sequence[int], images: Sequence[Any]) -> Expanded | None:
        """Return the tokens of a text with those of its images; None if it has none.

        Args:
            text: The text, in which each image is one token.
            short: Its tokens.
            images: The images, in the order of the text.

        Raises:
            ImageError: The processor rejects the images, or changes the text in a way that cannot be followed.
        """
        token = self.processor.image_token
        if text.count(token) != len(images):
            raise ImageError(f"its text has {text.count(token)} times {token}, for {len(images)} images")
        if not images:
            return None
        try:
            expanded, tensors, tokens = self._process(text, images)
        except Exception as error:  # a processor may raise any error
            raise ImageError(f"{type(error).__name__}: {error}") from error
        places = _align(short, expanded, self.processor.tokenizer.convert_tokens_to_ids(token))
        if places is None:
            raise ImageError(f"{type(self.processor).__name__} changes tokens beside those of the images")
        end = max(index for index, place in enumerate(places) if place is None) + 1
        return Expanded(expanded, places, RowImages(tensors, tokens, end))

    def draw_filler(self) -> dict[str, Any]:
        """Return the tokens and entries of a message with a small black image."""
        message = {"role": "user", "content": [{"type": "image"}]}
        try:
            text = self.processor.apply_chat_template([message], tokenize=False)
        except Exception:  # noqa: BLE001 - a template may raise any error, such as of a missing text
            text = ""
        text = text if text.count(self.processor.image_token) == 1 else self.processor.image_token
        ids, tensors, tokens = self._process(text, [np.zeros((28, 28, 3), np.uint8)])
        return {"input_ids": ids, **tokens, **tensors}

    def _process(
        self, text: str, images: Sequence[Any]
    ) -> tuple[list[int], dict[str, torch.Tensor], dict[str, list[int]]]:
        """Return the tokens, the entries of images, and further entries with one value per token."""
        outputs = self.processor(text=[text], images=[list(images)], add_special_tokens=False, return_tensors="pt")
        tensors, tokens = dict[str, torch.Tensor](), dict[str, list[int]]()
        for name, value in outputs.items():
            if name in ("input_ids", "attention_mask") or not isinstance(value, torch.Tensor):
                continue
            if value.shape == outputs["input_ids"].shape:
                tokens[name] = value[0].tolist()
            else:
                tensors[name] = value
        return outputs["input_ids"][0].tolist(), tensors, tokens


def _align(short: Sequence[int], expanded: Sequence[int], image: int) -> list[int | None] | None:
    """Return for each expanded token its place in the short row, None for those of images.

    Either the token of an image is repeated, or it is replaced by any tokens, which can be distinguished from the text
    if there is one image.

    Returns:
        None if the text around the images was changed, too.
    """
    others_of = [[token for token in row if token != image] for row in (short, expanded)]
    if image in expanded and others_of[0] == others_of[1]:
        others = iter([place for place, token in enumerate(short) if token != image])
        return [None if token == image else next(others) for token in expanded]
    if short.count(image) != 1:
        return None
    before = short.index(image)
    behind = len(short) - before - 1
    number = len(expanded) - before - behind
    if number < 1 or expanded[:before] != short[:before] or expanded[before + number :] != short[before + 1 :]:
        return None
    return [*range(before), *[None] * number, *range(before + 1, len(short))]


def split_processor(processor: Any) -> tuple[Any, ImageReader | None]:
    """Return the tokenizer of a processor, with the chat template, and the reader of images; None for a tokenizer."""
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is None or getattr(processor, "image_processor", None) is None:
        return processor, None
    template = getattr(processor, "chat_template", None)
    if template is not None:
        tokenizer = copy(tokenizer)
        tokenizer.chat_template = template
    return tokenizer, ImageReader(processor)


def find_images(messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], where: str) -> list[tuple[int, Any]]:
    """Return the index of the message of each image, and what the row has of the image.

    Raises:
        DataError: A part has no image, or is a video or audio; or `images` of the row has more or fewer than parts.
    """
    found, beside = list[tuple[int, Any]](), list(row.get("images") or ())
    number = len(beside)
    for index, part in ((index, part) for index, one in enumerate(messages) for part in _parts_of(one)):
        at = f"{where}, message {index}"
        if part.get("type") in _OTHER_KINDS:
            do = "remove the part; of other inputs than text, only images are supported"
            raise fail(DataError, at, got=f"a part of type {part['type']}", expected="parts of text and images", do=do)
        if part.get("type") not in _KINDS:
            continue
        source = next((part[name] for name in _SOURCES if part.get(name) is not None), None)
        if isinstance(source, Mapping) and "url" in source:  # OpenAI's format
            source = source["url"]
        if source is None:
            if not beside:
                got = f"an image without a source; the row has {number} under 'images'"
                raise fail(
                    DataError, at, got=got, expected=_EXPECTED, do='add "path" to the part, or "images" to the row'
                )
            source = beside.pop(0)
        found.append((index, source))
    if beside:
        got = f"{number} images under 'images', {len(beside)} of them without a part in the messages"
        do = 'add a part {"type": "image"} to the content of a message for each of them'
        raise fail(DataError, where, got=got, expected="a part for each image", do=do)
    return found


def without_images(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose images are only named, as chat templates need them."""
    content = message.get("content")
    if not any(part.get("type") in _KINDS for part in _parts_of(message)):
        return message
    parts = [{"type": "image"} if part.get("type") in _KINDS else part for part in content or ()]
    return {**message, "content": parts}


def load_image(source: Any, where: str) -> Any:
    """Return an image of PIL, or an array as it is.

    Raises:
        DataError: It cannot be read.
        MissingPackageError: Pillow is not installed.
    """
    if isinstance(source, np.ndarray | torch.Tensor):
        return source
    if isinstance(source, Mapping):  # an image of `datasets` that is not decoded
        source = BytesIO(source["bytes"]) if source.get("bytes") else source.get("path")
    if isinstance(source, PathLike):
        source = fspath(source)
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        do = "download the images first, and write their paths"
        raise fail(DataError, where, got=f"the image {source:.80}", expected="images on a disk", do=do)
    try:
        import PIL.Image
        from transformers.image_utils import load_image as load
    except ImportError as error:
        do = 'pip install "accmt-trainer[images]"'
        raise fail(
            MissingPackageError, where, got="an image, but Pillow is not installed", expected="Pillow", do=do
        ) from error
    try:
        return load(PIL.Image.open(source) if isinstance(source, BytesIO) else source)
    except (OSError, TypeError, ValueError) as error:
        shown = source if isinstance(source, str) else type(source).__name__
        got, do = f"the image {shown:.80}: {str(error):.200}", "correct it; paths are relative to the working directory"
        raise fail(DataError, where, got=got, expected=_EXPECTED, do=do) from error


def _parts_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list | tuple) else []
