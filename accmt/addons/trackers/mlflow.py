"""MLflow."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from accmt.addons.run_folders import taking_turns
from accmt.addons.trackers.common import STATUS, clean_path
from accmt.addons.trackers.delivery_state import Resume, Row
from accmt.addons.trackers.spec import RunStart, TrackerRun, TrackerSpec
from accmt.errors import explain
from accmt.messages import warn, warn_once
from accmt.tracking.history import DEFAULT_LOGGING_DIR, RunPlace
from accmt.tracking.values import Media, Scalar

_TRACKING_URI_VARIABLE = "MLFLOW_TRACKING_URI"
_SQLITE = "sqlite:///"
_TEMPORARY_HTTP_STATUS = (408, 429, 500, 502, 503, 504)
_IMPATIENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "1",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class MLFlow(TrackerSpec):
    """MLflow: experiment `track_name`, run `run_name`. Keywords are those of `accelerate.tracking.MLflowTracker`.

    The store is the URL in `logging_dir`; with a folder it is `<logging_dir>/mlflow.db`, with artifacts in
    `<logging_dir>/mlartifacts`. `MLFLOW_TRACKING_URI` is used if you leave `logging_dir` at its default.

    A resumed run continues the same MLflow run. MLflow cannot delete points, and would show two for the same step:
    points that a killed attempt logged after the checkpoint are kept, and new ones of the same name and step are
    skipped (they are in `history.jsonl`). The tag `accmt.attempt` marks such
    runs. MLflow cannot change a parameter either: a changed one is stored as `<name>.attempt_<number>`. A preempted
    run is KILLED in MLflow; the tag `accmt.status` has the exact status.
    """

    name = "mlflow"
    package = "mlflow"
    kwargs_of = "accelerate.tracking:MLflowTracker"
    takes_url = True

    def build(self, start: RunStart) -> TrackerRun:
        place, uri = start.place, self.tracking_uri(start.place)
        is_our_store = uri == _local_uri(place)
        options = {
            # Accelerate puts the name between single quotes when it searches for the experiment.
            "experiment_name": place.track_name.replace("'", "_"),
            "run_name": place.run_name,
            "logging_dir": (place.base_folder.absolute() / "mlartifacts").as_uri() if is_our_store else None,
        }
        return MLFlowRun(uri, is_quiet=start.is_quiet, resume=start.resume, **{**options, **start.kwargs})

    def server(self, place: RunPlace) -> str | None:
        uri = self.tracking_uri(place)
        return None if uri == _local_uri(place) else uri

    def is_remote(self, place: RunPlace, kwargs: Mapping[str, Any]) -> bool:
        return not self.tracking_uri(place).startswith(("sqlite:", "file:", "/", "."))

    def is_outage(self, error: BaseException | None) -> bool:
        from mlflow.exceptions import ERROR_CODE_TO_HTTP_STATUS, RestException

        if not isinstance(error, RestException):
            return super().is_outage(error)
        return ERROR_CODE_TO_HTTP_STATUS.get(error.error_code, 500) in _TEMPORARY_HTTP_STATUS

    def is_refusal(self, error: BaseException) -> bool:
        from mlflow.exceptions import MlflowException

        refusals = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
        return isinstance(error, MlflowException) and error.error_code in refusals

    def attach(self, tracker: TrackerRun) -> None:
        tracker.attach()

    def detach(self, tracker: TrackerRun, status: str) -> None:
        tracker.detach(status)

    def clean_name(self, name: str) -> str:
        return clean_mlflow_name(name)

    def dashboard_command(self, place: RunPlace) -> list[str]:
        """See `TrackerSpec.dashboard_command`; a server has its own web pages."""
        uri = self.tracking_uri(place)
        if uri.startswith(("http", "databricks")):
            return []
        is_ours = uri == _local_uri(place)
        return ["mlflow", "ui", "--backend-store-uri", _sqlite_uri(place.base_folder) if is_ours else uri]

    def tracking_uri(self, place: RunPlace) -> str:
        """Return the store or server of the run."""
        is_default = place.logging_dir == DEFAULT_LOGGING_DIR
        chosen = os.environ.get(_TRACKING_URI_VARIABLE) if is_default else None
        return place.url or chosen or _local_uri(place)


class MLFlowRun(TrackerRun):
    """Accelerate's MLflow tracker, bound to one store and one run, whatever else the process does with MLflow.

    The process's tracking URI stays set after the run, so that `mlflow.search_runs()` reads the same store;
    `MLFLOW_TRACKING_URI`, which MLflow also sets, is restored immediately.
    """

    base = "accelerate.tracking:MLflowTracker"

    def __init__(self, tracking_uri: str, *, is_quiet: bool, resume: Resume | None = None, **options: Any) -> None:
        self._resume = resume or Resume()
        super().__init__(**{"run_id": self._resume.run_id, **options})
        self.tracking_uri = tracking_uri
        self.tags: dict[str, str] = {**(self.tags or {}), **self._resume.tags}
        self._is_quiet = is_quiet
        # With its default of 7 retries, MLflow blocks for four minutes at each call to an unreachable server, and
        # warns about each retry. The delivery thread retries itself, and warns once.
        self._environment = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        if is_quiet:
            self._environment["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"

    def start(self) -> None:
        """Set the tracking URI, then start the run and set `run_id`.

        Raises:
            mlflow.exceptions.MlflowException: The store cannot be reached, or another run is active.
        """
        import mlflow

        before = os.environ.get(_TRACKING_URI_VARIABLE)
        mlflow.set_tracking_uri(self.tracking_uri)
        _set_variable(_TRACKING_URI_VARIABLE, before)
        self._environment = {name: value for name, value in self._environment.items() if name not in os.environ}
        os.environ.update(self._environment)
        logger = logging.getLogger("mlflow" if self._is_quiet else "mlflow.store")
        level = logger.level
        logger.setLevel(logging.WARNING)
        try:
            self._start_in_turn()
        except BaseException:
            self._restore_environment()
            raise
        finally:
            logger.setLevel(level)
        self.run_id = self.active_run.info.run_id

    def _start_in_turn(self) -> None:
        """Start the run; runs that start together on one database would both create its tables and experiments."""
        path = Path(self.tracking_uri.removeprefix(_SQLITE))
        with taking_turns(path.parent) if self.tracking_uri.startswith(_SQLITE) else nullcontext():
            self._forget_a_missing_run()
            super().start()

    def store_init_configuration(self, values: dict[str, Scalar]) -> None:
        """Store parameters; long values are truncated, and one that changed in a resumed run gets a separate name."""
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        # MLflow does not allow changing a parameter, and one rejection would lose the whole batch.
        stored = self._client().get_run(self.run_id).data.params
        cut = {name: _cut(value, MAX_PARAM_VAL_LENGTH) for name, value in values.items()}
        new = {name: value for name, value in cut.items() if name not in stored}
        suffix = f".attempt_{self._resume.attempt}"
        changed = {
            name + suffix: value
            for name, value in cut.items()
            if stored.get(name, str(value)) != str(value) and name + suffix not in stored
        }
        super().store_init_configuration(new | changed)

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Log rows, many per request; a row that is delivered twice appears once, because it has the same timestamp."""
        from mlflow.entities import Metric
        from mlflow.utils.validation import MAX_METRICS_PER_BATCH

        client = self._client()
        metrics = [
            Metric(name, value, round(1000 * row.time), row.step) for row in rows for name, value in row.values.items()
        ]
        for begin in range(0, len(metrics), MAX_METRICS_PER_BATCH):
            client.log_batch(self.run_id, metrics=metrics[begin : begin + MAX_METRICS_PER_BATCH], synchronous=True)

    def log(self, values: Mapping[str, float], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers to this run, even if the calling thread has another active run or none."""
        import mlflow

        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        if len(numbers) < len(values):
            others = ", ".join(sorted(values.keys() - numbers.keys()))
            warn_once(f"MLflow accepts only numbers; skipping {others}", about=f"MLflow: {others}")
        mlflow.log_metrics(numbers, step=step, run_id=self.run_id, **kwargs)

    def add_images(self, media: Media) -> None:
        """Log images so that MLflow shows them over steps; an image that is delivered twice appears once."""
        client, milliseconds = self._client(), round(1000 * media.time)
        there = [file.path for file in client.list_artifacts(self.run_id, "images")]
        for name, image in media.images().items():
            key = re.sub(r"[^a-zA-Z0-9_\-./ ]", "_", name)
            # The start of the name of the file that MLflow writes last; a random part follows.
            written = f"images/{key.replace('/', '~')}+step+{media.step}+timestamp+{milliseconds}+"
            if not any(path.startswith(written) and path.endswith(".webp") for path in there):
                client.log_image(self.run_id, image, key=key, step=media.step, timestamp=milliseconds, synchronous=True)

    def add_table(self, media: Media) -> None:
        """Log a table at `tables/<name>/<step>.json`."""
        client, folder = self._client(), f"tables/{media.folder.parent.name}"
        path = f"{folder}/{media.folder.name}.json"
        if path in [file.path for file in client.list_artifacts(self.run_id, folder)]:
            return  # MLflow would append the rows again
        columns, rows = media.table()
        client.log_table(self.run_id, {title: [row[i] for row in rows] for i, title in enumerate(columns)}, path)

    def add_artifact(self, media: Media) -> None:
        """Log a file, or a folder of files under its name."""
        if media.path.is_dir():
            self._client().log_artifacts(self.run_id, str(media.path), media.name)
        else:
            self._client().log_artifact(self.run_id, str(media.path))

    def finish(self, status: str = "FINISHED") -> None:
        """End the run; MLflow has no status "PREEMPTED", so it becomes KILLED with a tag."""
        import mlflow

        client = self._client()
        client.set_tag(self.run_id, STATUS, status)
        if self._is_active():
            mlflow.end_run(_mlflow_status(status))
        else:
            client.set_terminated(self.run_id, _mlflow_status(status))
        self._restore_environment()  # not after a failure: it will be tried again

    def attach(self) -> None:
        """Make the run active in the calling thread, unless it has one; active runs are per thread."""
        import mlflow

        if mlflow.active_run() is None:
            mlflow.start_run(self.run_id, log_system_metrics=False)

    def detach(self, status: str) -> None:
        """Undo `attach`, and wait at most a second or two for a server that may be unreachable."""
        import mlflow

        self._restore_environment()
        if not self._is_active():
            return
        before = {name: os.environ.get(name) for name in _IMPATIENT}
        os.environ.update(_IMPATIENT)
        try:
            # Removes it from the thread's stack first, whatever the server returns.
            mlflow.end_run(_mlflow_status(status))
        finally:
            for name, value in before.items():
                _set_variable(name, value)

    def _client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.tracking_uri)

    def _is_active(self) -> bool:
        import mlflow

        active = mlflow.active_run()
        return active is not None and active.info.run_id == self.run_id

    def _forget_a_missing_run(self) -> None:
        """Start a new run if the one to resume was deleted or is not in this store."""
        from mlflow.exceptions import MlflowException

        if self.run_id is None or self.run_id != self._resume.run_id:
            return
        try:
            if self._client().get_run(self.run_id).info.lifecycle_stage == "active":
                return
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        got = f"no run {self.run_id}: it was deleted, or is not in {self.tracking_uri}"
        do = "no action needed: accmt starts a new run and logs all rows to it"
        warn(explain("the tracker mlflow", got, "the MLflow run recorded in the checkpoint", do))
        self.run_id = None

    def _restore_environment(self) -> None:
        for name in self._environment:
            os.environ.pop(name, None)


def clean_mlflow_name(name: str) -> str:
    """Convert a name to a valid MLflow name for a metric or a parameter: `f1@0.5` becomes `f1_at_0.5`.

    Source: the rules in `mlflow.utils.validation`: letters, digits, `_ - . : /` and spaces, a normalized relative path,
    at most 250 characters (nine of which are reserved for a digest).
    """
    name = name.replace("@", "_at_").replace("%", "_percent")
    return clean_path(re.sub(r"[^\w.\-: /]", "_", name))[:241].rstrip("/") or "_"


def _local_uri(place: RunPlace) -> str:
    return _sqlite_uri(place.base_folder.absolute())


def _sqlite_uri(folder: Path) -> str:
    path = str(folder / "mlflow.db")
    if not set(path).isdisjoint("%?"):  # as in the folders of Jenkins and Ray
        from sqlalchemy import make_url

        if make_url(f"{_SQLITE}%25").database == "%":  # SQLAlchemy 2.1 decodes the path, 2.0 takes it as it is
            path = path.replace("%", "%25").replace("?", "%3F")
    return f"{_SQLITE}{path}"


def _mlflow_status(status: str) -> str:
    return "KILLED" if status == "PREEMPTED" else status


def _cut(value: Scalar, limit: int) -> Scalar:
    return value[: limit - 1] + "…" if isinstance(value, str) and len(value) > limit else value


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
