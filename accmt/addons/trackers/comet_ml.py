"""Comet."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from accmt.addons.trackers.common import STATUS, ServiceSpec
from accmt.addons.trackers.delivery_state import Row
from accmt.addons.trackers.spec import RunStart, TrackerRun
from accmt.tracking.history import RunPlace
from accmt.tracking.values import Media


class CometML(ServiceSpec):
    """Comet: project `track_name`, experiment `run_name`. Keywords are those of `comet_ml.start`.

    Without a key (`COMET_API_KEY`, `comet login`) the experiment is offline, and its archive in `<run folder>/comet` is
    written when the run ends: after a kill, the next attempt or `accmt sync` delivers its rows. A resumed run has the
    same experiment key, and writes another archive if it is offline.
    """

    name = "comet_ml"
    package = "comet-ml"
    kwargs_of = "comet_ml:start"
    reserved = frozenset({"experiment_key", "mode", "project"})
    key_advice = "set COMET_API_KEY, or run `comet login`"

    def build(self, start: RunStart) -> TrackerRun:
        return CometMLRun(start, is_offline=self.is_offline(start.kwargs))

    def is_offline_wanted(self, kwargs: Mapping[str, Any]) -> bool:
        return kwargs.get("online") is False or os.environ.get("COMET_START_ONLINE", "").lower() in ("0", "false")

    def has_key(self, kwargs: Mapping[str, Any]) -> bool:
        return bool(kwargs.get("api_key") or import_module("comet_ml.config").get_config()["comet.api_key"])

    def upload_command(self, place: RunPlace) -> str:
        return f"comet upload {place.run_folder}/comet/*.zip"


class CometMLRun(TrackerRun):
    base = "accelerate.tracking:CometMLTracker"

    def __init__(self, start: RunStart, *, is_offline: bool) -> None:
        from comet_ml import ExperimentConfig

        folder = start.place.run_folder / "comet"
        if is_offline:
            folder.mkdir(exist_ok=True)
        config = ExperimentConfig(
            name=start.place.run_name,
            offline_directory=str(folder),
            display_summary_level=0 if start.is_quiet else None,
        )
        options = {
            "experiment_config": config,
            **start.kwargs,
            "online": not is_offline,
            "experiment_key": start.resume.run_id,
            "mode": "create" if start.resume.run_id is None else "get_or_create",
        }
        super().__init__(start.place.track_name, **options)
        self.is_offline = is_offline
        self.settles_in_s = math.inf if is_offline else 0.0  # online, each batch of rows is flushed
        self._tags = start.resume.tags

    @property
    def run_id(self) -> str:
        return str(self.writer.get_key())

    def start(self) -> None:
        super().start()
        self.writer.log_others(self._tags)

    def log_rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.writer.log_metrics(dict(row.values), step=row.step)
        self._flush()

    def add_images(self, media: Media) -> None:
        for name, image in media.images().items():
            self.writer.log_image(image, name=name, step=media.step)
        self._flush()

    def add_table(self, media: Media) -> None:
        """Log a table as `<name>/<step>.csv`."""
        columns, rows = media.table()
        self.writer.log_table(f"{media.name}/{media.folder.name}.csv", tabular_data=rows, headers=columns)
        self._flush()

    def add_artifact(self, media: Media) -> None:
        """Log a file, or the files of a folder, as assets."""
        if media.path.is_dir():
            self.writer.log_asset_folder(str(media.path), step=media.step, log_file_name=True, recursive=True)
        else:
            self.writer.log_asset(str(media.path), file_name=media.name, step=media.step)
        self._flush()

    def finish(self, status: str = "FINISHED") -> None:
        """Store the status under "other", because Comet has no status, and end the experiment."""
        self.writer.log_other(STATUS, status)
        self.writer.end()

    def _flush(self) -> None:
        """Wait until the service has received everything."""
        if not self.is_offline and not self.writer.flush():
            message = "Comet did not accept the rows in time"
            raise TimeoutError(message)
