"""The trackers that `log_with` accepts, before a run exists: how each is named, installed, built, ended and shown."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from accmt.errors import ArgumentError, MissingPackageError, explain
from accmt.tracking.run_folder import DEFAULT_LOGGING_DIR, RunPlace

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


class TrackerSpec:
    """One kind of tracker; the class itself, an instance with arguments, or its name may be given as `log_with`.

    Args:
        init_kwargs: Arguments of the tracker's start, as in `MLFlow(tags={"team": "news"})`.
    """

    name: str
    package: ClassVar[str]
    takes_url: ClassVar[bool] = False

    def __init__(self, **init_kwargs: Any) -> None:
        self.init_kwargs = init_kwargs

    def accepted_names(self) -> frozenset[str] | None:
        """Return the keywords that the tracker's start takes; None where it takes any."""
        raise NotImplementedError

    def build(self, place: RunPlace, kwargs: Mapping[str, Any], *, is_quiet: bool) -> GeneralTracker:
        """Make the tracker of one run; its `start` is left to the caller."""
        raise NotImplementedError

    def clean_name(self, name: str) -> str:
        """Return the name under which the tracker keeps a metric or a parameter."""
        return name

    def finish(self, tracker: GeneralTracker, status: str) -> None:
        """End the run with `status`, where the tracker knows one."""
        del status
        tracker.finish()

    def run_id(self, tracker: GeneralTracker) -> str | None:
        """Return the id by which the tracker's service knows the run, if it has one."""
        del tracker
        return None

    def dashboard_command(self, place: RunPlace) -> list[str]:
        """Return the command that shows the runs in a browser; empty where there is nothing to start."""
        del place
        return []


class TensorBoard(TrackerSpec):
    """TensorBoard: event files in the run folder. Keywords are those of `torch.utils.tensorboard.SummaryWriter`."""

    name = "tensorboard"
    package = "tensorboard"

    def accepted_names(self) -> frozenset[str] | None:
        """As `TrackerSpec.accepted_names`."""
        from torch.utils.tensorboard import SummaryWriter

        return _parameter_names(SummaryWriter, without={"log_dir"})

    def build(self, place: RunPlace, kwargs: Mapping[str, Any], *, is_quiet: bool) -> GeneralTracker:
        """As `TrackerSpec.build`."""
        from accmt.tracking.adapters import TensorBoardRun

        del is_quiet
        return TensorBoardRun(run_name=place.run_folder.name, logging_dir=place.run_folder.parent, **kwargs)

    def dashboard_command(self, place: RunPlace) -> list[str]:
        """As `TrackerSpec.dashboard_command`."""
        return ["tensorboard", "--logdir", str(place.base_folder)]


class MLFlow(TrackerSpec):
    """MLflow: experiment `track_name`, run `run_name`. Keywords are those of `accelerate.tracking.MLflowTracker`.

    The store is the URL in `logging_dir`; with a folder it is `<logging_dir>/mlflow.db`, with artifacts in
    `<logging_dir>/mlartifacts`. `MLFLOW_TRACKING_URI` is obeyed where `logging_dir` was left at its default.
    """

    name = "mlflow"
    package = "mlflow"
    takes_url = True

    def accepted_names(self) -> frozenset[str] | None:
        """As `TrackerSpec.accepted_names`."""
        from accelerate.tracking import MLflowTracker

        return _parameter_names(MLflowTracker)

    def build(self, place: RunPlace, kwargs: Mapping[str, Any], *, is_quiet: bool) -> GeneralTracker:
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
        return MLFlowRun(uri, is_quiet=is_quiet, **{**names, **kwargs})

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
        return [] if uri.startswith(("http", "databricks")) else ["mlflow", "ui", "--backend-store-uri", uri]

    def tracking_uri(self, place: RunPlace) -> str:
        """Return the store or server of the run."""
        is_default = place.logging_dir == DEFAULT_LOGGING_DIR
        chosen = os.environ.get("MLFLOW_TRACKING_URI") if is_default else None
        return place.url or chosen or self._local_uri(place)

    def _local_uri(self, place: RunPlace) -> str:
        return f"sqlite:///{place.base_folder.absolute() / 'mlflow.db'}"


class GivenTracker(TrackerSpec):
    """A user's own Accelerate tracker: an instance, or a class.

    A class is called with those of `run_name`, `track_name`, `project_name`, `experiment_name` and `logging_dir` (the
    run folder) that its constructor names, and with the Trainer's further keywords that it takes.
    """

    def __init__(self, given: GeneralTracker | type[GeneralTracker]) -> None:
        super().__init__()
        self._given = given
        own_name = getattr(given, "name", None)
        self.name = own_name if isinstance(own_name, str) else getattr(given, "__name__", type(given).__name__)

    def accepted_names(self) -> frozenset[str] | None:
        """As `TrackerSpec.accepted_names`; an instance takes none any more."""
        return _parameter_names(self._given) if isinstance(self._given, type) else frozenset()

    def build(self, place: RunPlace, kwargs: Mapping[str, Any], *, is_quiet: bool) -> GeneralTracker:
        """As `TrackerSpec.build`."""
        del is_quiet
        if not isinstance(self._given, type):
            return self._given
        project = dict.fromkeys(("track_name", "project_name", "experiment_name"), place.track_name)
        offered = {**project, "run_name": place.run_name, "logging_dir": str(place.run_folder)}
        named = inspect.signature(self._given).parameters
        return self._given(**{**{name: value for name, value in offered.items() if name in named}, **kwargs})


class _NotSupportedYet(TrackerSpec):
    def __init__(self, **init_kwargs: Any) -> None:
        del init_kwargs
        where = f"Trainer(log_with={type(self).__name__})"
        raise NotImplementedError(explain(where, "a tracker that is not supported yet", _SUPPORTED, "log_with=MLFlow"))


class WandB(_NotSupportedYet):
    """Weights & Biases; not supported yet: making one raises NotImplementedError."""

    name = "wandb"


class CometML(_NotSupportedYet):
    """Comet; not supported yet: making one raises NotImplementedError."""

    name = "comet_ml"


class Aim(_NotSupportedYet):
    """Aim; not supported yet: making one raises NotImplementedError."""

    name = "aim"


class ClearML(_NotSupportedYet):
    """ClearML; not supported yet: making one raises NotImplementedError."""

    name = "clearml"


class DVCLive(_NotSupportedYet):
    """DVCLive; not supported yet: making one raises NotImplementedError."""

    name = "dvclive"


_SPECS: tuple[type[TrackerSpec], ...] = (TensorBoard, MLFlow, WandB, CometML, Aim, ClearML, DVCLive)
_BY_NAME = {spec.name: spec for spec in _SPECS}
_SUPPORTED = "TensorBoard, MLFlow, their names, any accelerate GeneralTracker, or a list of these"


def resolve_trackers(log_with: Any) -> list[TrackerSpec]:
    """Turn the Trainer's `log_with` into the trackers of a run.

    Args:
        log_with: None or False for none, True for TensorBoard, a tracker's class, instance or lower-case name, a class
            or instance of any accelerate `GeneralTracker`, or a list of these.

    Raises:
        ArgumentError: An entry is no tracker (the nearest name is in the message), or one is named twice.
        MissingPackageError: The tracker's package is not installed.
        NotImplementedError: The tracker is not supported yet.
    """
    if log_with is None or log_with is False:
        return []
    entries = log_with if isinstance(log_with, list | tuple) else [TensorBoard if log_with is True else log_with]
    specs = [_find_spec(entry) for entry in entries]
    for spec in specs:
        _require_package(spec)
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
    if isinstance(spec, GivenTracker) or find_spec(spec.package) is not None:
        return
    where = f"Trainer(log_with={type(spec).__name__})"
    got = f"the package {spec.package} is not installed"
    raise MissingPackageError(explain(where, got, "the tracker's package", f"pip install {spec.package}"))


def _raise_unknown(entry: Any) -> None:
    nearest = get_close_matches(str(entry).lower(), list(_BY_NAME), n=1, cutoff=0.0)
    got = f"{entry!r} ({type(entry).__name__})"
    raise ArgumentError(explain("Trainer(log_with=...)", got, _SUPPORTED, f"log_with={nearest[0]!r}?"))


def _parameter_names(function: Any, without: frozenset[str] | set[str] = frozenset()) -> frozenset[str] | None:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters) - without
