"""Accelerate's trackers of services, with what they lack: the same run after a resume, true endings, rows of any order.

Only imported when a run starts, for it needs Accelerate's tracker classes as bases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any
from uuid import uuid4

from accelerate.tracking import (
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    SwanLabTracker,
    TrackioTracker,
    WandBTracker,
)

from accmt.tracking import media_adapters
from accmt.tracking.adapters import tags_of
from accmt.tracking.replay import Resume, Row
from accmt.tracking.run_folder import RunPlace
from accmt.tracking.values import Scalar

_STATUS = "accmt.status"
# What a shell shows for each ending; wandb takes 255, which it gives itself after Ctrl-C, for a run that was stopped.
_WANDB_EXIT_CODES = {"FINISHED": 0, "FAILED": 1, "KILLED": 255, "PREEMPTED": 143}


class WandBRun(media_adapters.WandBMedia, WandBTracker):  # type: ignore[misc]
    """A run of Weights & Biases, whose points stand over `global_step`.

    wandb's own step only grows: a row of an earlier step, such as one that waited for an outage to end, would be lost.

    Args:
        place: Where the records of the run go.
        resume: The run to go on with.
        kwargs: Arguments of `wandb.init`.
        is_offline: Whether the run goes to files.
        is_quiet: Whether wandb's own messages are held back.
    """

    def __init__(
        self, place: RunPlace, resume: Resume, kwargs: Mapping[str, Any], *, is_offline: bool, is_quiet: bool
    ) -> None:
        # Else a kill takes 15 seconds, and the process's exit waits 90 for a server that is not there.
        settings = {"x_transaction_log_flush_interval": 1.0, "init_timeout": 30.0, "silent": is_quiet}
        given = kwargs.get("settings") or {}
        options = {
            "name": place.run_name,
            **kwargs,
            "settings": {**settings, **given} if isinstance(given, dict) else given,
            "dir": str(place.run_folder),
            "id": resume.run_id,
            "resume": "allow",
        }
        if is_offline and options.get("mode") != "disabled":
            options["mode"] = "offline"
        super().__init__(place.track_name, **options)
        self._resume = resume

    @property
    def run_id(self) -> str:
        """The id by which wandb knows the run."""
        return str(self.run.id)

    def start(self) -> None:
        """Start the run, and put its points over `global_step`."""
        super().start()
        self.run.define_metric(media_adapters.STEP, hidden=True)
        self.run.define_metric("*", step_metric=media_adapters.STEP)
        self.run.config.update(tags_of(self._resume), allow_val_change=True)

    def store_init_configuration(self, values: dict[str, Scalar]) -> None:
        """Store the configuration; what changed in a continued run replaces what was."""
        self.run.config.update(values, allow_val_change=True)

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Log rows with the times when they were logged."""
        for row in rows:
            self.run.log({**row.values, media_adapters.STEP: row.step, "_timestamp": row.time})

    def finish(self, status: str = "FINISHED") -> None:
        """End the run with an exit code, by which wandb tells endings apart, and the true word in the summary."""
        self.run.summary[_STATUS] = status
        if status == "PREEMPTED":
            self.run.mark_preempting()
        self.run.finish(exit_code=_WANDB_EXIT_CODES[status])


class CometMLRun(media_adapters.CometMLMedia, CometMLTracker):  # type: ignore[misc]
    """A Comet experiment.

    Args:
        place: Where the records of the run go.
        resume: The run to go on with.
        kwargs: Arguments of `comet_ml.start`.
        is_offline: Whether the run goes to an archive.
        is_quiet: Whether Comet's summary at the end is held back.
    """

    def __init__(
        self, place: RunPlace, resume: Resume, kwargs: Mapping[str, Any], *, is_offline: bool, is_quiet: bool
    ) -> None:
        from comet_ml import ExperimentConfig

        folder = place.run_folder / "comet"
        if is_offline:
            folder.mkdir(exist_ok=True)
        config = ExperimentConfig(
            name=place.run_name,
            offline_directory=str(folder),
            display_summary_level=0 if is_quiet else None,
        )
        options = {
            "experiment_config": config,
            **kwargs,
            "online": not is_offline,
            "experiment_key": resume.run_id,
            "mode": "create" if resume.run_id is None else "get_or_create",
        }
        super().__init__(place.track_name, **options)
        self.is_offline = is_offline
        self._resume = resume

    @property
    def run_id(self) -> str:
        """Comet's key of the experiment."""
        return str(self.writer.get_key())

    def start(self) -> None:
        """Start the experiment."""
        super().start()
        self.writer.log_others(tags_of(self._resume))

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Log rows, and wait until a service has them."""
        for row in rows:
            self.writer.log_metrics(dict(row.values), step=row.step)
        self.flush()

    def finish(self, status: str = "FINISHED") -> None:
        """End the experiment, with the status among its others: Comet has none of its own."""
        self.writer.log_other(_STATUS, status)
        self.writer.end()


class ClearMLRun(media_adapters.ClearMLMedia, ClearMLTracker):  # type: ignore[misc]
    """A ClearML task.

    Args:
        place: Where the records of the run go.
        resume: The run to go on with.
        kwargs: Arguments of `clearml.Task.init`.
        is_offline: Whether the run goes to an offline session.
        is_quiet: Has no effect: ClearML's messages are few.
    """

    def __init__(
        self, place: RunPlace, resume: Resume, kwargs: Mapping[str, Any], *, is_offline: bool, is_quiet: bool
    ) -> None:
        del is_quiet
        unpatched = {"auto_connect_frameworks": False, "auto_connect_arg_parser": False}
        names = {"project_name": place.track_name, "task_name": place.run_name}
        # A task of the same name would be emptied and used again.
        same_run = {"reuse_last_task_id": False, "continue_last_task": (not is_offline and resume.run_id) or False}
        super().__init__(**{**unpatched, **kwargs, **names, **same_run})
        self._is_offline = is_offline
        self._resume = resume

    @property
    def run_id(self) -> str:
        """ClearML's id of the task."""
        return str(self.task.id)

    def start(self) -> None:
        """Start the task."""
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
        self.task.set_initial_iteration(0)  # a continued task adds its last iteration to each step otherwise
        self._set_parameters(tags_of(self._resume))

    def store_init_configuration(self, values: dict[str, Scalar]) -> None:
        """Store the configuration where ClearML compares tasks by it."""
        self._set_parameters(values)

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Log rows under Accelerate's titles and series, but for NaN and infinities, which ClearML would show as 0.

        Source: `default_nan_value` and `default_inf_value` in `clearml/backend_interface/metrics/events.py`.
        """
        for row in rows:
            self.log({name: value for name, value in row.values.items() if isfinite(value)}, step=row.step)

    def finish(self, status: str = "FINISHED") -> None:
        """End the task as completed, failed or, after a kill or a pre-emption, stopped."""
        self._set_parameters({_STATUS: status})
        super().finish()
        if status == "FAILED":
            self.task.mark_failed(force=True, status_reason=status)
        elif status != "FINISHED":
            self.task.mark_stopped(force=True, status_message=status)

    def _set_parameters(self, values: Mapping[str, Scalar]) -> None:
        self.task.update_parameters({f"General/{name}": value for name, value in values.items()})


class AimRun(media_adapters.AimMedia, AimTracker):  # type: ignore[misc]
    """A run in an Aim repository.

    Args:
        place: Where the records of the run go.
        resume: The run to go on with.
        kwargs: Arguments of `aim.Run`.
        is_offline: Has no effect: a repository is a folder, unless keywords say otherwise.
        is_quiet: Has no effect: Aim says nothing.
    """

    def __init__(
        self, place: RunPlace, resume: Resume, kwargs: Mapping[str, Any], *, is_offline: bool, is_quiet: bool
    ) -> None:
        del is_offline, is_quiet
        given = {"capture_terminal_logs": False, **kwargs}
        repository = given.pop("repo", str(place.base_folder))
        super().__init__(place.run_name, repository, **given, run_hash=resume.run_id, experiment=place.track_name)
        self._resume = resume

    @property
    def run_id(self) -> str:
        """Aim's hash of the run."""
        return str(self.writer.hash)

    def start(self) -> None:
        """Start the run."""
        super().start()
        for name, value in tags_of(self._resume).items():
            self.writer[name] = value

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Log rows; a point replaces one of the same name and step."""
        for row in rows:
            self.log(row.values, step=row.step)

    def finish(self, status: str = "FINISHED") -> None:
        """Close the run, with the status among its parameters: Aim has none of its own."""
        self.writer[_STATUS] = status
        super().finish()


class TrackioRun(media_adapters.TrackioMedia, TrackioTracker):  # type: ignore[misc]
    """A Trackio run.

    Args:
        place: Where the records of the run go.
        resume: The run to go on with.
        kwargs: Arguments of `trackio.init`.
        is_offline: Has no effect: the store is a folder, unless keywords say otherwise.
        is_quiet: Whether the terminal is spared Trackio's advice on its dashboard.
    """

    def __init__(
        self, place: RunPlace, resume: Resume, kwargs: Mapping[str, Any], *, is_offline: bool, is_quiet: bool
    ) -> None:
        del is_offline
        options = {"name": place.run_name, "embed": not is_quiet, **kwargs}
        super().__init__(place.track_name, **options, resume="never" if resume.run_id is None else "allow")
        self._resume = resume

    @property
    def run_id(self) -> str:
        """Trackio's id of the run."""
        return str(self.run.id)

    def store_init_configuration(self, values: dict[str, Scalar]) -> None:
        """Store the configuration, which goes with the first row."""
        self.run.config.update({**values, **tags_of(self._resume)})

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Log rows; Trackio gives them the time of their arrival."""
        for row in rows:
            self.run.log(dict(row.values), step=row.step)

    def finish(self, status: str = "FINISHED") -> None:
        """End the run; Trackio has no status."""
        del status
        super().finish()


class SwanLabRun(media_adapters.SwanLabMedia, SwanLabTracker):  # type: ignore[misc]
    """A SwanLab run.

    Args:
        place: Where the records of the run go.
        resume: The run to go on with.
        kwargs: Arguments of `swanlab.init`.
        is_offline: Whether the run goes to files.
        is_quiet: Has no effect: SwanLab's messages are few.
    """

    def __init__(
        self, place: RunPlace, resume: Resume, kwargs: Mapping[str, Any], *, is_offline: bool, is_quiet: bool
    ) -> None:
        del is_quiet
        options = {"name": place.run_name, "log_dir": str(place.run_folder / "swanlab"), **kwargs}
        if is_offline and options.get("mode") not in ("disabled", "local"):
            options["mode"] = "offline"
        # A new run gets its id here, by which a resumed one finds it also offline.
        super().__init__(place.track_name, **options, id=resume.run_id or uuid4().hex, resume="allow")
        self._resume = resume

    @property
    def run_id(self) -> str:
        """SwanLab's id of the run."""
        return str(self.run.id)

    def start(self) -> None:
        """Start the run."""
        super().start()
        self.run.config.update(tags_of(self._resume))

    def store_init_configuration(self, values: dict[str, Scalar]) -> None:
        """Store the configuration."""
        self.run.config.update(values)

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Log rows; SwanLab gives them the time of their arrival."""
        for row in rows:
            self.run.log(dict(row.values), step=row.step)

    def finish(self, status: str = "FINISHED") -> None:
        """End the run as a success, crashed, or, after a kill or a pre-emption, aborted."""
        self.run.config.update({_STATUS: status})
        if status == "FINISHED":
            self.run.finish()
        else:
            self.run.finish("crashed" if status == "FAILED" else "aborted", error=status)
