"""ClearML."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import isfinite
from typing import Any

from accmt.addons.trackers.common import STATUS, ServiceSpec
from accmt.addons.trackers.delivery_state import Row
from accmt.addons.trackers.spec import RunStart, TrackerRun
from accmt.tracking.history import RunPlace
from accmt.tracking.values import Media, Scalar


class ClearML(ServiceSpec):
    """ClearML: project `track_name`, task `run_name`. Keywords are those of `clearml.Task.init`.

    ClearML patches no libraries (`auto_connect_frameworks`, `auto_connect_arg_parser`) unless you pass these keywords.
    Without a key (`CLEARML_API_ACCESS_KEY`, `clearml-init`) the task is an offline session in ClearML's cache folder
    (`CLEARML_CACHE_DIR`, by default `~/.clearml/cache`), as with `CLEARML_OFFLINE_MODE=1`. A resumed run continues
    the same task; offline, which ClearML cannot continue, it starts a new session with all rows. A thread sends the
    reports, unless `report_use_subprocess` in `clearml.conf` requests a process. Git is inspected when the run starts.
    """

    name = "clearml"
    package = "clearml"
    kwargs_of = "clearml:Task.init"
    reserved = frozenset({"project_name", "task_name", "continue_last_task", "reuse_last_task_id"})
    key_advice = "set CLEARML_API_ACCESS_KEY and CLEARML_API_SECRET_KEY, or run `clearml-init`"

    def build(self, start: RunStart) -> TrackerRun:
        return ClearMLRun(start, is_offline=self.is_offline(start.kwargs))

    def is_offline_wanted(self, kwargs: Mapping[str, Any]) -> bool:
        return os.environ.get("CLEARML_OFFLINE_MODE", "").lower() in ("1", "true", "yes", "on")

    def has_key(self, kwargs: Mapping[str, Any]) -> bool:
        keys = import_module("clearml.backend_api.session.defs")
        in_file = import_module("clearml.config").config_obj.get("api.credentials.access_key", None)
        return bool(keys.ENV_ACCESS_KEY.get() or keys.ENV_AUTH_TOKEN.get() or in_file)

    def upload_command(self, place: RunPlace) -> str:
        return "clearml-task --import-offline-session <the zip file named at the end of the run>"


class ClearMLRun(TrackerRun):
    base = "accelerate.tracking:ClearMLTracker"
    settles_in_s = 10.0  # ClearML's thread sends every five seconds

    def __init__(self, start: RunStart, *, is_offline: bool) -> None:
        unpatched = {"auto_connect_frameworks": False, "auto_connect_arg_parser": False}
        names = {"project_name": start.place.track_name, "task_name": start.place.run_name}
        # Otherwise ClearML would clear and reuse a task with the same name.
        same_run = {
            "reuse_last_task_id": False,
            "continue_last_task": (not is_offline and start.resume.run_id) or False,
        }
        super().__init__(**{**unpatched, **start.kwargs, **names, **same_run})
        self._is_offline = is_offline
        self._tags = start.resume.tags

    @property
    def run_id(self) -> str:
        return str(self.task.id)

    def start(self) -> None:
        from clearml import Task
        from clearml.config import config

        if self._is_offline:
            Task.set_offline(offline_mode=True)
        # ClearML asks git about the repository in one thread while another forks a process for its reports, or a loader
        # its workers: these keep git's pipes open, and the end of the task waits five minutes for git, long done.
        development = config.get("development")
        development.put("vcs_repo_detect_async", value=False)
        development.put("report_use_subprocess", development.get("report_use_subprocess", False))
        super().start()
        self.task.set_initial_iteration(0)  # otherwise a continued task adds its last iteration to each step
        self._set_parameters(self._tags)

    def store_init_configuration(self, values: dict[str, Scalar]) -> None:
        """Store the configuration as parameters, by which ClearML compares tasks."""
        self._set_parameters(values)

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Log rows under Accelerate's titles and series, except NaN and infinities, which ClearML would show as 0.

        Source: `default_nan_value` and `default_inf_value` in `clearml/backend_interface/metrics/events.py`.
        """
        for row in rows:
            self.log({name: value for name, value in row.values.items() if isfinite(value)}, step=row.step)

    def add_images(self, media: Media) -> None:
        for name, image in media.images().items():
            series = name.removeprefix(f"{media.name}/")
            self.task.get_logger().report_image(media.name, series, iteration=media.step, image=image)

    def add_table(self, media: Media) -> None:
        columns, rows = media.table()
        content = [columns, *rows]
        self.task.get_logger().report_table(media.name, media.name, iteration=media.step, table_plot=content)

    def add_artifact(self, media: Media) -> None:
        """Upload a file, or a folder as a zip file; it replaces the one with the same name."""
        self.task.upload_artifact(media.name, artifact_object=str(media.path), wait_on_upload=True)

    def finish(self, status: str = "FINISHED") -> None:
        """End the task as completed, failed, or (after a kill or preemption) stopped."""
        self._set_parameters({STATUS: status})
        super().finish()
        if status == "FAILED":
            self.task.mark_failed(force=True, status_reason=status)
        elif status != "FINISHED":
            self.task.mark_stopped(force=True, status_message=status)

    def _set_parameters(self, values: Mapping[str, Scalar]) -> None:
        self.task.update_parameters({f"General/{name}": value for name, value in values.items()})
