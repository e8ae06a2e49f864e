"""SwanLab."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any
from uuid import uuid4

from accmt.addons.trackers.common import STATUS, ServiceSpec
from accmt.addons.trackers.delivery_state import Row
from accmt.addons.trackers.spec import RunStart, TrackerRun
from accmt.tracking.history import RunPlace
from accmt.tracking.values import Media, Scalar


class SwanLab(ServiceSpec):
    """SwanLab: project `track_name`, run `run_name`. Keywords are those of `swanlab.init`.

    Without a key (`SWANLAB_API_KEY`, `swanlab login`) the run is offline in `<run folder>/swanlab`, written when
    the run ends: after a kill, the next attempt or `accmt sync` delivers its rows. A resumed run has the same id, and
    writes another folder if it is offline.
    """

    name = "swanlab"
    package = "swanlab"
    key_advice = "set SWANLAB_API_KEY, or run `swanlab login`"

    def accepted_names(self) -> frozenset[str] | None:
        reserved = {"project", "id", "resume", "log_dir", "kwargs"}
        return frozenset(inspect.signature(import_module("swanlab").init).parameters) - reserved

    def build(self, start: RunStart) -> TrackerRun:
        return SwanLabRun(start, is_offline=self.is_offline(start.kwargs))

    def is_offline_wanted(self, kwargs: Mapping[str, Any]) -> bool:
        mode = kwargs.get("mode") or import_module("swanlab").Settings().mode
        return mode in ("offline", "local", "disabled")

    def has_key(self, kwargs: Mapping[str, Any]) -> bool:
        return bool(import_module("swanlab").Settings().api_key)

    def upload_command(self, place: RunPlace) -> str:
        return f"swanlab sync {place.run_folder}/swanlab/run-*"


class SwanLabRun(TrackerRun):
    base = "accelerate.tracking:SwanLabTracker"
    settles_in_s = math.inf

    def __init__(self, start: RunStart, *, is_offline: bool) -> None:
        place = start.place
        options = {"name": place.run_name, "log_dir": str(place.run_folder / "swanlab"), **start.kwargs}
        if is_offline and options.get("mode") not in ("disabled", "local"):
            options["mode"] = "offline"
        # The id is chosen here, so that a resumed run also finds it offline.
        super().__init__(place.track_name, **options, id=start.resume.run_id or uuid4().hex, resume="allow")
        self._tags = start.resume.tags

    @property
    def run_id(self) -> str:
        return str(self.run.id)

    def start(self) -> None:
        super().start()
        self.run.config.update(self._tags)

    def store_init_configuration(self, values: dict[str, Scalar]) -> None:
        self.run.config.update(values)

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Log rows; SwanLab timestamps them on arrival."""
        for row in rows:
            self.run.log(dict(row.values), step=row.step)

    def add_images(self, media: Media) -> None:
        from swanlab import Image

        self.run.log({media.name: [Image(image) for image in media.images().values()]}, step=media.step)

    def finish(self, status: str = "FINISHED") -> None:
        """End the run as success, crashed, or (after a kill or preemption) aborted."""
        self.run.config.update({STATUS: status})
        if status == "FINISHED":
            self.run.finish()
        else:
            self.run.finish("crashed" if status == "FAILED" else "aborted", error=status)
