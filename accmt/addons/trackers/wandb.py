"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from accmt.addons.trackers.common import STATUS, ServiceSpec, clean_file_name
from accmt.addons.trackers.delivery_state import Row
from accmt.addons.trackers.spec import RunStart, TrackerRun
from accmt.tracking.history import RunPlace
from accmt.tracking.values import Media, Scalar

_AXIS = "global_step"
# The exit codes of a shell; wandb itself uses 255 after Ctrl-C, and shows such a run as stopped.
_EXIT_CODES = {"FINISHED": 0, "FAILED": 1, "KILLED": 255, "PREEMPTED": 143}


class WandB(ServiceSpec):
    """Weights & Biases: project `track_name`, run `run_name`. Keywords are those of `wandb.init`.

    The x-axis is `global_step`, so that rows are accepted in any order. Without an API key (`WANDB_API_KEY`,
    `wandb login`) the run is written offline to `<run folder>/wandb`, as with `WANDB_MODE=offline`. A resumed run has
    the same id, and offline another folder; points that a killed attempt logged after the checkpoint are kept, and new
    ones of the same name and step are skipped.
    """

    name = "wandb"
    package = "wandb"
    kwargs_of = "wandb:init"
    reserved = frozenset({"id", "resume", "dir", "project"})
    key_advice = "set WANDB_API_KEY, or run `wandb login`"

    def build(self, start: RunStart) -> TrackerRun:
        return WandBRun(start, is_offline=self.is_offline(start.kwargs))

    def is_offline_wanted(self, kwargs: Mapping[str, Any]) -> bool:
        return (kwargs.get("mode") or os.environ.get("WANDB_MODE")) in ("offline", "disabled", "dryrun")

    def has_key(self, kwargs: Mapping[str, Any]) -> bool:
        return bool(import_module("wandb").login(prompt=False, verify=False))

    def upload_command(self, place: RunPlace) -> str:
        return f"wandb sync {place.run_folder}/wandb/offline-run-*"

    def is_outage(self, error: BaseException | None) -> bool:
        return isinstance(error, import_module("wandb").errors.CommError) or super().is_outage(error)


class WandBRun(TrackerRun):
    """A run of Weights & Biases with `global_step` as x-axis.

    wandb's own step can only increase: a row of an earlier step, such as one that waited for an outage to end, would
    be lost.
    """

    base = "accelerate.tracking:WandBTracker"
    settles_in_s = 2.0  # the settings below make wandb's process write its file every second

    def __init__(self, start: RunStart, *, is_offline: bool) -> None:
        # By default, a kill loses 15 seconds, and the exit waits 90 seconds for an unreachable server.
        settings = {"x_transaction_log_flush_interval": 1.0, "init_timeout": 30.0, "silent": start.is_quiet}
        user_settings = start.kwargs.get("settings") or {}
        options = {
            "name": start.place.run_name,
            **start.kwargs,
            "settings": {**settings, **user_settings} if isinstance(user_settings, dict) else user_settings,
            "dir": str(start.place.run_folder),
            "id": start.resume.run_id,
            "resume": "allow",
        }
        if is_offline and options.get("mode") != "disabled":
            options["mode"] = "offline"
        super().__init__(start.place.track_name, **options)
        self._tags = start.resume.tags

    @property
    def run_id(self) -> str:
        return str(self.run.id)

    def start(self) -> None:
        super().start()
        self.run.define_metric(_AXIS, hidden=True)
        self.run.define_metric("*", step_metric=_AXIS)
        self.run.config.update(self._tags, allow_val_change=True)

    def store_init_configuration(self, values: dict[str, Scalar]) -> None:
        """Store the configuration; values that changed in a resumed run are replaced."""
        self.run.config.update(values, allow_val_change=True)

    def log_rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.run.log({**row.values, _AXIS: row.step, "_timestamp": row.time})

    def add_images(self, media: Media) -> None:
        from wandb import Image

        self._log_media(media, [Image(image) for image in media.images().values()])

    def add_table(self, media: Media) -> None:
        from wandb import Table

        columns, rows = media.table()
        self._log_media(media, Table(columns=columns, data=rows, allow_mixed_types=True))

    def add_artifact(self, media: Media) -> None:
        """Log a file or folder as a new version of the artifact with its name."""
        from wandb import Artifact

        artifact = Artifact(clean_file_name(media.name), type="file")
        if media.path.is_dir():
            artifact.add_dir(str(media.path))
        else:
            artifact.add_file(str(media.path), name=media.name)
        self.run.log_artifact(artifact)

    def finish(self, status: str = "FINISHED") -> None:
        """End the run with an exit code, from which wandb infers its state, and the exact status in the summary."""
        self.run.summary[STATUS] = status
        if status == "PREEMPTED":
            self.run.mark_preempting()
        self.run.finish(exit_code=_EXIT_CODES[status])

    def _log_media(self, media: Media, value: Any) -> None:
        self.run.log({media.name: value, _AXIS: media.step, "_timestamp": media.time})
