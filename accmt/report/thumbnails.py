"""The newest of the images that runs logged, made small and put into the page."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING

from accmt.errors import DataError
from accmt.report.records import RunRecord
from accmt.tracking.media import Media

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_STEPS = 3
MOST_IMAGES = 8
MOST_PIXELS = 256


def write_images(runs: Sequence[RunRecord]) -> str:
    """Return a section with the images of each name at its last three updates; empty where there are none.

    Of one call up to eight are shown, none larger than 256 pixels; the run folder has them as they were.
    """
    shown = "".join(_write_name(run, name, logged) for run in runs for name, logged in run.images.items())
    return f'<section id="Images"><h2>Images</h2>{shown}</section>' if shown else ""


def _write_name(run: RunRecord, name: str, logged: Sequence[Media]) -> str:
    figures = "".join(_write_step(media) for media in reversed(logged[-MOST_STEPS:]))
    return f"<h3>{escape(run.name)}: {escape(name)}</h3>{figures}"


def _write_step(media: Media) -> str:
    try:
        images = list(media.images().values())
    except DataError:  # a disk that lost some images does not lose the report
        return f"<p>update {media.step:,}: not readable in {escape(str(media.folder))}</p>"
    pictures = "".join(f'<img alt="" src="{_to_data_uri(image)}">' for image in images[:MOST_IMAGES])
    more = f" (the first {MOST_IMAGES} of {len(images)})" if len(images) > MOST_IMAGES else ""
    return f"<figure>{pictures}<figcaption>update {media.step:,}{more}</figcaption></figure>"


def _to_data_uri(image: Image) -> str:
    image.thumbnail((MOST_PIXELS, MOST_PIXELS))
    content = BytesIO()
    image.save(content, "png", optimize=True)
    return f"data:image/png;base64,{b64encode(content.getvalue()).decode()}"
