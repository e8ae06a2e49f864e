"""Trackio."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from accmt.addons.trackers.common import clean_file_name
from accmt.addons.trackers.delivery_state import Row
from accmt.addons.trackers.spec import RunStart, TrackerRun, TrackerSpec
from accmt.tracking.history import RunPlace
from accmt.tracking.values import Media, Scalar


class Trackio(TrackerSpec):
    """Trackio: project `track_name`, run `run_name`, in Trackio's own store. Keywords are those of `trackio.init`.

    The store is the folder `TRACKIO_DIR`, by default `trackio` in the Hugging Face cache; `space_id` or `server_url`
    send the run elsewhere. A resumed run continues the same Trackio run; points that a killed attempt logged after the
    checkpoint stay, and new ones with the same name and step are skipped. Trackio has no run status.
    """

    name = "trackio"
    is_exclusive = True
    package = "trackio"
    kwargs_of = "trackio:init"
    reserved = frozenset({"project", "resume", "config"})

    def build(self, start: RunStart) -> TrackerRun:
        return TrackioRun(start)

    def is_remote(self, place: RunPlace, kwargs: Mapping[str, Any]) -> bool:
        elsewhere = ("space_id", "server_url")
        return any(kwargs.get(name) or os.environ.get(f"TRACKIO_{name.upper()}") for name in elsewhere)

    def dashboard_command(self, place: RunPlace) -> list[str]:
        return ["trackio", "show", "--project", place.track_name]


class TrackioRun(TrackerRun):
    base = "accelerate.tracking:TrackioTracker"
    settles_in_s = 2.0  # Trackio's thread writes every half second

    def __init__(self, start: RunStart) -> None:
        # `embed` prints advice on the dashboard.
        options = {"name": start.place.run_name, "embed": not start.is_quiet, **start.kwargs}
        resume = "never" if start.resume.run_id is None else "allow"
        super().__init__(start.place.track_name, **options, resume=resume)
        self._tags = start.resume.tags

    @property
    def run_id(self) -> str:
        return str(self.run.id)

    def store_init_configuration(self, values: dict[str, Scalar]) -> None:
        """Store the configuration, which is sent with the first row."""
        self.run.config.update({**values, **self._tags})

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Log rows; Trackio timestamps them on arrival."""
        for row in rows:
            self.run.log(dict(row.values), step=row.step)

    def add_images(self, media: Media) -> None:
        from trackio import Image

        self.run.log({name: Image(image) for name, image in media.images().items()}, step=media.step)

    def add_table(self, media: Media) -> None:
        from trackio import Table

        columns, rows = media.table()
        self.run.log({media.name: Table(columns=columns, data=rows, allow_mixed_types=True)}, step=media.step)

    def add_artifact(self, media: Media) -> None:
        """Log a file or folder as a new version of the artifact with its name."""
        self.run.log_artifact(media.path, name=clean_file_name(media.name), type="file")

    def finish(self, status: str = "FINISHED") -> None:
        super().finish()
