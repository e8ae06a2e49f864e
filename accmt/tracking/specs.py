"""The trackers that `log_with` accepts, before a run exists: how each is named, installed, built, ended and shown."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from accmt.errors import ArgumentError, MissingPackageError, explain
from accmt.tracking.replay import Resume, Rewinding, Row
from accmt.tracking.run_folder import DEFAULT_LOGGING_DIR, RunPlace
from accmt.tracking.services import Aim, ClearML, CometML, SwanLab, Trackio, WandB
from accmt.tracking.spec import NEW_RUN, GivenTracker, TrackerSpec, parameter_names

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

_SERVERS_TROUBLE = (408, 429, 500, 502, 503, 504)


class TensorBoard(TrackerSpec):
    """TensorBoard: event files in the run folder. Keywords are those of `torch.utils.tensorboard.SummaryWriter`.

    A resumed run writes a further event file, which withdraws the points that a killed attempt logged after the
    checkpoint.
    """

    name = "tensorboard"
    package = "tensorboard"
    rewinding = Rewinding.WITHDRAWS

    def accepted_names(self) -> frozenset[str] | None:
        """As `TrackerSpec.accepted_names`."""
        from torch.utils.tensorboard import SummaryWriter

        return parameter_names(SummaryWriter, without={"log_dir"})

    def build(
        self, place: RunPlace, kwargs: Mapping[str, Any], *, is_quiet: bool, resume: Resume = NEW_RUN
    ) -> GeneralTracker:
        """As `TrackerSpec.build`."""
        from accmt.tracking.adapters import TensorBoardRun

        del is_quiet
        folder, options = place.run_folder, {"purge_step": resume.first_step, **kwargs}
        return TensorBoardRun(run_name=folder.name, logging_dir=folder.parent, **options)

    def deliver(self, tracker: GeneralTracker, rows: Sequence[Row]) -> Iterator[int]:
        """As `TrackerSpec.deliver`; at the times when they were logged."""
        tracker.log_rows(rows)
        yield len(rows)

    def dashboard_command(self, place: RunPlace) -> list[str]:
        """As `TrackerSpec.dashboard_command`."""
        return ["tensorboard", "--logdir", str(place.base_folder)]


class MLFlow(TrackerSpec):
    """MLflow: experiment `track_name`, run `run_name`. Keywords are those of `accelerate.tracking.MLflowTracker`.

    The store is the URL in `logging_dir`; with a folder it is `<logging_dir>/mlflow.db`, with artifacts in
    `<logging_dir>/mlartifacts`. `MLFLOW_TRACKING_URI` is obeyed where `logging_dir` was left at its default.

    A resumed run goes on in the same MLflow run. MLflow cannot withdraw points, and shows two of one step both: those
    that a killed attempt logged after the checkpoint stay, new ones of the same name and step are left out (they are in
    `history.jsonl`), and the tags `accmt.attempt` and `accmt.steps_of_earlier_attempts` say so. Nor can it change a
    parameter: a changed one is stored as `<name>.attempt_<number>`. A preempted run is KILLED to MLflow; the tag
    `accmt.status` has the true word.
    """

    name = "mlflow"
    package = "mlflow"
    takes_url = True
    rewinding = Rewinding.KEEPS

    def accepted_names(self) -> frozenset[str] | None:
        """As `TrackerSpec.accepted_names`."""
        from accelerate.tracking import MLflowTracker

        return parameter_names(MLflowTracker)

    def build(
        self, place: RunPlace, kwargs: Mapping[str, Any], *, is_quiet: bool, resume: Resume = NEW_RUN
    ) -> GeneralTracker:
        """As `TrackerSpec.build`."""
        from accmt.tracking.adapters import MLFlowRun

        uri = self.tracking_uri(place)
        is_our_store = uri == self._local_uri(place)
        names = {
            # Accelerate puts the name between single quotes when it searches for the experiment.
            "experiment_name": place.track_name.replace("'", "_"),
            "run_name": place.run_name,
            "logging_dir": (place.base_folder.absolute() / "mlartifacts").as_uri() if is_our_store else None,
        }
        return MLFlowRun(uri, is_quiet=is_quiet, resume=resume, **{**names, **kwargs})

    def server(self, place: RunPlace) -> str | None:
        """As `TrackerSpec.server`."""
        uri = self.tracking_uri(place)
        return None if uri == self._local_uri(place) else uri

    def is_remote(self, place: RunPlace, kwargs: Mapping[str, Any]) -> bool:
        """As `TrackerSpec.is_remote`."""
        del kwargs
        return not self.tracking_uri(place).startswith(("sqlite:", "file:", "/", "."))

    def deliver(self, tracker: GeneralTracker, rows: Sequence[Row]) -> Iterator[int]:
        """As `TrackerSpec.deliver`; a row that is delivered twice is there once, for it has its own time."""
        tracker.log_rows(rows)
        yield len(rows)

    def is_outage(self, error: BaseException | None) -> bool:
        """As `TrackerSpec.is_outage`."""
        from mlflow.exceptions import ERROR_CODE_TO_HTTP_STATUS, RestException

        if not isinstance(error, RestException):
            return super().is_outage(error)
        return ERROR_CODE_TO_HTTP_STATUS.get(error.error_code, 500) in _SERVERS_TROUBLE

    def is_refusal(self, error: BaseException) -> bool:
        """As `TrackerSpec.is_refusal`."""
        return getattr(error, "error_code", None) in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")

    def attach(self, tracker: GeneralTracker) -> None:
        """As `TrackerSpec.attach`: `mlflow.log_figure` and the like go to the run."""
        tracker.attach()

    def detach(self, tracker: GeneralTracker, status: str) -> None:
        """As `TrackerSpec.detach`."""
        tracker.detach(status)

    def clean_name(self, name: str) -> str:
        """As `TrackerSpec.clean_name`."""
        from accmt.tracking.adapters import clean_mlflow_name

        return clean_mlflow_name(name)

    def finish(self, tracker: GeneralTracker, status: str) -> None:
        """As `TrackerSpec.finish`."""
        tracker.finish(status)

    def run_id(self, tracker: GeneralTracker) -> str | None:
        """As `TrackerSpec.run_id`."""
        return str(tracker.run_id)

    def dashboard_command(self, place: RunPlace) -> list[str]:
        """As `TrackerSpec.dashboard_command`; a server shows its own pages."""
        uri = self.tracking_uri(place)
        if uri.startswith(("http", "databricks")):
            return []
        is_ours = uri == self._local_uri(place)
        return ["mlflow", "ui", "--backend-store-uri", f"sqlite:///{place.base_folder}/mlflow.db" if is_ours else uri]

    def tracking_uri(self, place: RunPlace) -> str:
        """Return the store or server of the run."""
        is_default = place.logging_dir == DEFAULT_LOGGING_DIR
        chosen = os.environ.get("MLFLOW_TRACKING_URI") if is_default else None
        return place.url or chosen or self._local_uri(place)

    def _local_uri(self, place: RunPlace) -> str:
        return f"sqlite:///{place.base_folder.absolute() / 'mlflow.db'}"


class DVCLive(TrackerSpec):
    """DVCLive: files in `<run folder>/dvclive`. Keywords are those of `dvclive.Live`.

    No DVC experiment is saved, and no `dvc.yaml` or report written, unless keywords ask for it. A resumed run takes the
    points that a killed attempt logged after the checkpoint out of the files.
    """

    name = "dvclive"
    package = "dvclive"
    rewinding = Rewinding.WITHDRAWS

    def accepted_names(self) -> frozenset[str] | None:
        """As `TrackerSpec.accepted_names`."""
        return parameter_names(import_module("dvclive").Live, without={"dir", "resume"})

    def build(
        self, place: RunPlace, kwargs: Mapping[str, Any], *, is_quiet: bool, resume: Resume = NEW_RUN
    ) -> GeneralTracker:
        """As `TrackerSpec.build`."""
        from accmt.tracking.adapters import DVCLiveRun

        del is_quiet
        return DVCLiveRun(place.run_folder / "dvclive", resume, **kwargs)

    def clean_name(self, name: str) -> str:
        """As `TrackerSpec.clean_name`."""
        from accmt.tracking.adapters import clean_path

        return clean_path(name)

    def deliver(self, tracker: GeneralTracker, rows: Sequence[Row]) -> Iterator[int]:
        """As `TrackerSpec.deliver`."""
        tracker.log_rows(rows)
        yield len(rows)


_SPECS: tuple[type[TrackerSpec], ...] = (
    TensorBoard,
    MLFlow,
    WandB,
    CometML,
    Aim,
    ClearML,
    DVCLive,
    Trackio,
    SwanLab,
)
_BY_NAME = {spec.name: spec for spec in _SPECS}
_SUPPORTED = (
    f"{', '.join(spec.__name__ for spec in _SPECS)}, their names, any accelerate GeneralTracker, or a list of these"
)


def tracker_names() -> frozenset[str]:
    """Return the names that stand for trackers in `log_with`."""
    return frozenset(_BY_NAME)


def resolve_trackers(log_with: Any) -> list[TrackerSpec]:
    """Turn the Trainer's `log_with` into the trackers of a run.

    Args:
        log_with: None or False for none, True for TensorBoard, a tracker's class, instance or lower-case name, a class
            or instance of any accelerate `GeneralTracker`, or a list of these.

    Raises:
        ArgumentError: An entry is no tracker (the nearest name is in the message), or one is named twice.
        MissingPackageError: The tracker's package is not installed.
    """
    specs = find_specs(log_with)
    for spec in specs:
        _require_package(spec)
    return specs


def find_specs(log_with: Any) -> list[TrackerSpec]:
    """Do what `resolve_trackers` does, but for looking whether packages are installed.

    Raises:
        ArgumentError: An entry is no tracker (the nearest name is in the message), or one is named twice.
    """
    if log_with is None or log_with is False:
        return []
    entries = log_with if isinstance(log_with, list | tuple) else [TensorBoard if log_with is True else log_with]
    specs = [_find_spec(entry) for entry in entries]
    names = [spec.name for spec in specs if not isinstance(spec, GivenTracker)]
    for name in names:
        if names.count(name) > 1:
            message = f"{name!r} {names.count(name)} times"
            raise ArgumentError(explain("Trainer(log_with=...)", message, "each tracker once", f"leave one {name!r}"))
    return specs


def _find_spec(entry: Any) -> TrackerSpec:
    if isinstance(entry, str) and entry.lower() in _BY_NAME:
        return _BY_NAME[entry.lower()]()
    if isinstance(entry, TrackerSpec):
        return entry
    if isinstance(entry, type) and issubclass(entry, TrackerSpec):
        return entry()
    from accelerate.tracking import GeneralTracker

    kind = entry if isinstance(entry, type) else type(entry)
    if not issubclass(kind, GeneralTracker):
        _raise_unknown(entry)
    is_accelerates_own = isinstance(entry, type) and entry.__module__ == GeneralTracker.__module__
    return _BY_NAME[entry.name]() if is_accelerates_own and entry.name in _BY_NAME else GivenTracker(entry)


def _require_package(spec: TrackerSpec) -> None:
    if isinstance(spec, GivenTracker) or find_spec(spec.package.replace("-", "_")) is not None:
        return
    where = f"Trainer(log_with={type(spec).__name__})"
    got = f"the package {spec.package} is not installed"
    raise MissingPackageError(explain(where, got, "the tracker's package", f"pip install {spec.package}"))


def _raise_unknown(entry: Any) -> None:
    nearest = get_close_matches(str(entry).lower(), list(_BY_NAME), n=1, cutoff=0.5)
    got = f"{entry!r} ({type(entry).__name__})"
    do = f"log_with={nearest[0]!r}?" if nearest else "log_with='tensorboard', say"
    raise ArgumentError(explain("Trainer(log_with=...)", got, _SUPPORTED, do))
