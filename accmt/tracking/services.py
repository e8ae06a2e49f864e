"""The trackers with a service behind them, which all write files where no key of the service is there."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from accmt.tracking.replay import Resume, Rewinding, Row
from accmt.tracking.run_folder import RunPlace
from accmt.tracking.spec import NEW_RUN, TrackerSpec, parameter_names

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

_TRUE = ("1", "true", "yes", "on")


class _RunSpec(TrackerSpec):
    """A tracker whose run is a class of `accmt.tracking.service_runs`: that of its own name with `Run` after it."""

    rewinding = Rewinding.KEEPS

    def is_offline(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the run goes to files instead of a service."""
        del kwargs
        return False

    def build(
        self, place: RunPlace, kwargs: Mapping[str, Any], *, is_quiet: bool, resume: Resume = NEW_RUN
    ) -> GeneralTracker:
        """As `TrackerSpec.build`."""
        kind = getattr(import_module("accmt.tracking.service_runs"), f"{type(self).__name__}Run")
        run: GeneralTracker = kind(place, resume, kwargs, is_offline=self.is_offline(kwargs), is_quiet=is_quiet)
        return run

    def deliver(self, tracker: GeneralTracker, rows: Sequence[Row]) -> Iterator[int]:
        """As `TrackerSpec.deliver`."""
        tracker.log_rows(rows)
        yield len(rows)

    def finish(self, tracker: GeneralTracker, status: str) -> None:
        """As `TrackerSpec.finish`."""
        tracker.finish(status)

    def run_id(self, tracker: GeneralTracker) -> str | None:
        """As `TrackerSpec.run_id`."""
        return str(tracker.run_id)


class _Service(_RunSpec):
    """A tracker with accounts: it needs a key, and has a mode of its own in which it only writes files."""

    key_advice: ClassVar[str]

    def has_key(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the service's key is known; nobody is asked for it."""
        raise NotImplementedError

    def is_offline_wanted(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the user told the tracker to leave its service alone."""
        raise NotImplementedError

    def is_offline(self, kwargs: Mapping[str, Any]) -> bool:
        """As `_RunSpec.is_offline`."""
        return self.is_offline_wanted(kwargs) or not self.has_key(kwargs)

    def is_remote(self, place: RunPlace, kwargs: Mapping[str, Any]) -> bool:
        """As `TrackerSpec.is_remote`."""
        del place
        return not self.is_offline(kwargs)

    def missing_key(self, kwargs: Mapping[str, Any]) -> str | None:
        """As `TrackerSpec.missing_key`."""
        return None if self.is_offline_wanted(kwargs) or self.has_key(kwargs) else self.key_advice


class WandB(_Service):
    """Weights & Biases: project `track_name`, run `run_name`. Keywords are those of `wandb.init`.

    Points stand over `global_step`, so that rows of any order are taken. Without a key (`WANDB_API_KEY`, `wandb login`)
    the run is an offline one in `<run folder>/wandb`, as with `WANDB_MODE=offline`. A resumed run has the same id, and
    offline a further folder; points that a killed attempt logged after the checkpoint stay, and new ones of the same
    name and step are left out.
    """

    name = "wandb"
    package = "wandb"
    key_advice = "set WANDB_API_KEY, or run `wandb login`"

    def accepted_names(self) -> frozenset[str] | None:
        """As `TrackerSpec.accepted_names`."""
        return parameter_names(import_module("wandb").init, without={"id", "resume", "dir", "project"})

    def is_offline_wanted(self, kwargs: Mapping[str, Any]) -> bool:
        """As `_Service.is_offline_wanted`."""
        return (kwargs.get("mode") or os.environ.get("WANDB_MODE")) in ("offline", "disabled", "dryrun")

    def has_key(self, kwargs: Mapping[str, Any]) -> bool:
        """As `_Service.has_key`."""
        del kwargs
        return bool(import_module("wandb").login(prompt=False, verify=False))

    def upload_command(self, place: RunPlace) -> str:
        """As `TrackerSpec.upload_command`."""
        return f"wandb sync {place.run_folder}/wandb/offline-run-*"

    def settles_in_s(self, tracker: GeneralTracker) -> float:
        """As `TrackerSpec.settles_in_s`; the adapter has wandb's process write its file every second."""
        del tracker
        return 2.0

    def is_outage(self, error: BaseException | None) -> bool:
        """As `TrackerSpec.is_outage`."""
        return isinstance(error, import_module("wandb").errors.CommError) or super().is_outage(error)


class CometML(_Service):
    """Comet: project `track_name`, experiment `run_name`. Keywords are those of `comet_ml.start`.

    Without a key (`COMET_API_KEY`, `comet login`) the experiment is an offline one, whose archive in
    `<run folder>/comet` is made when the run ends: after a kill the next attempt, or `accmt sync`, delivers what that
    archive would have had. A resumed run has the same experiment key, and offline a further archive.
    """

    name = "comet_ml"
    package = "comet-ml"
    key_advice = "set COMET_API_KEY, or run `comet login`"

    def accepted_names(self) -> frozenset[str] | None:
        """As `TrackerSpec.accepted_names`."""
        return parameter_names(import_module("comet_ml").start, without={"experiment_key", "mode", "project"})

    def is_offline_wanted(self, kwargs: Mapping[str, Any]) -> bool:
        """As `_Service.is_offline_wanted`."""
        return kwargs.get("online") is False or os.environ.get("COMET_START_ONLINE", "").lower() in ("0", "false")

    def has_key(self, kwargs: Mapping[str, Any]) -> bool:
        """As `_Service.has_key`."""
        return bool(kwargs.get("api_key") or import_module("comet_ml.config").get_config()["comet.api_key"])

    def upload_command(self, place: RunPlace) -> str:
        """As `TrackerSpec.upload_command`."""
        return f"comet upload {place.run_folder}/comet/*.zip"

    def settles_in_s(self, tracker: GeneralTracker) -> float:
        """As `TrackerSpec.settles_in_s`; with a service each batch of rows is flushed."""
        return math.inf if tracker.is_offline else 0.0


class ClearML(_Service):
    """ClearML: project `track_name`, task `run_name`. Keywords are those of `clearml.Task.init`.

    Nothing is patched (`auto_connect_frameworks`, `auto_connect_arg_parser`), unless keywords ask for it. Without a key
    (`CLEARML_API_ACCESS_KEY`, `clearml-init`) the task is an offline session in ClearML's cache folder
    (`CLEARML_CACHE_DIR`, by default `~/.clearml/cache`), as with `CLEARML_OFFLINE_MODE=1`. A resumed run goes on with
    the same task; offline, where ClearML cannot, it is a new session that gets all rows. Reports come from a thread of
    the run, unless `report_use_subprocess` in `clearml.conf` asks for a process, and the repository is looked at when
    the run starts.
    """

    name = "clearml"
    package = "clearml"
    key_advice = "set CLEARML_API_ACCESS_KEY and CLEARML_API_SECRET_KEY, or run `clearml-init`"

    def accepted_names(self) -> frozenset[str] | None:
        """As `TrackerSpec.accepted_names`."""
        taken = {"project_name", "task_name", "continue_last_task", "reuse_last_task_id"}
        return parameter_names(import_module("clearml").Task.init, without=taken)

    def is_offline_wanted(self, kwargs: Mapping[str, Any]) -> bool:
        """As `_Service.is_offline_wanted`."""
        del kwargs
        return os.environ.get("CLEARML_OFFLINE_MODE", "").lower() in _TRUE

    def has_key(self, kwargs: Mapping[str, Any]) -> bool:
        """As `_Service.has_key`."""
        del kwargs
        keys = import_module("clearml.backend_api.session.defs")
        of_file = import_module("clearml.config").config_obj.get("api.credentials.access_key", None)
        return bool(keys.ENV_ACCESS_KEY.get() or keys.ENV_AUTH_TOKEN.get() or of_file)

    def upload_command(self, place: RunPlace) -> str:
        """As `TrackerSpec.upload_command`."""
        del place
        return "clearml-task --import-offline-session <the zip that the end of the run names>"

    def settles_in_s(self, tracker: GeneralTracker) -> float:
        """As `TrackerSpec.settles_in_s`; ClearML's thread sends every five seconds."""
        del tracker
        return 10.0


class Aim(_RunSpec):
    """Aim: experiment `track_name`, run `run_name`, in `<logging_dir>/.aim`. Keywords are those of `aim.Run`.

    A resumed run goes on in the same Aim run, and its points replace those that a killed attempt logged after the
    checkpoint. What the terminal shows is not captured, unless `capture_terminal_logs=True` asks for it.
    """

    name = "aim"
    package = "aim"
    # Aim keeps one point for each step: the last.
    rewinding = Rewinding.WITHDRAWS

    def accepted_names(self) -> frozenset[str] | None:
        """As `TrackerSpec.accepted_names`."""
        return parameter_names(import_module("aim").Run, without={"run_hash", "experiment", "read_only"})

    def dashboard_command(self, place: RunPlace) -> list[str]:
        """As `TrackerSpec.dashboard_command`."""
        return ["aim", "up", "--repo", str(place.base_folder)]


class Trackio(_RunSpec):
    """Trackio: project `track_name`, run `run_name`, in Trackio's own store. Keywords are those of `trackio.init`.

    The store is the folder `TRACKIO_DIR`, by default `trackio` in the Hugging Face cache; `space_id` or `server_url`
    send the run elsewhere. A resumed run goes on in the same Trackio run; points that a killed attempt logged after the
    checkpoint stay, and new ones of the same name and step are left out. Trackio knows no status.
    """

    name = "trackio"
    package = "trackio"

    def accepted_names(self) -> frozenset[str] | None:
        """As `TrackerSpec.accepted_names`."""
        return parameter_names(import_module("trackio").init, without={"project", "resume", "config"})

    def is_remote(self, place: RunPlace, kwargs: Mapping[str, Any]) -> bool:
        """As `TrackerSpec.is_remote`."""
        del place
        elsewhere = ("space_id", "server_url")
        return any(kwargs.get(name) or os.environ.get(f"TRACKIO_{name.upper()}") for name in elsewhere)

    def settles_in_s(self, tracker: GeneralTracker) -> float:
        """As `TrackerSpec.settles_in_s`; Trackio's thread writes every half second."""
        del tracker
        return 2.0

    def dashboard_command(self, place: RunPlace) -> list[str]:
        """As `TrackerSpec.dashboard_command`."""
        return ["trackio", "show", "--project", place.track_name]


class SwanLab(_Service):
    """SwanLab: project `track_name`, run `run_name`. Keywords are those of `swanlab.init`.

    Without a key (`SWANLAB_API_KEY`, `swanlab login`) the run is an offline one in `<run folder>/swanlab`, which
    SwanLab writes when the run ends: after a kill the next attempt, or `accmt sync`, delivers what that file would have
    had. A resumed run has the same id, and offline a further folder.
    """

    name = "swanlab"
    package = "swanlab"
    key_advice = "set SWANLAB_API_KEY, or run `swanlab login`"

    def accepted_names(self) -> frozenset[str] | None:
        """As `TrackerSpec.accepted_names`."""
        taken = {"project", "id", "resume", "log_dir", "kwargs"}
        return frozenset(inspect.signature(import_module("swanlab").init).parameters) - taken

    def is_offline_wanted(self, kwargs: Mapping[str, Any]) -> bool:
        """As `_Service.is_offline_wanted`."""
        mode = kwargs.get("mode") or import_module("swanlab").Settings().mode
        return mode in ("offline", "local", "disabled")

    def has_key(self, kwargs: Mapping[str, Any]) -> bool:
        """As `_Service.has_key`."""
        del kwargs
        return bool(import_module("swanlab").Settings().api_key)

    def upload_command(self, place: RunPlace) -> str:
        """As `TrackerSpec.upload_command`."""
        return f"swanlab sync {place.run_folder}/swanlab/run-*"

    def settles_in_s(self, tracker: GeneralTracker) -> float:
        """As `TrackerSpec.settles_in_s`."""
        del tracker
        return math.inf
