"""Accelerate's trackers, with what they lack: quiet starts, true endings, names and values that their services accept.

Only imported when a run starts, for it needs Accelerate's tracker classes as bases.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from accelerate.tracking import DVCLiveTracker, MLflowTracker, TensorBoardTracker

from accmt.errors import explain
from accmt.files import taking_turns, write_text
from accmt.messages import warn
from accmt.tracking.media_adapters import DVCLiveMedia, MLFlowMedia, TensorBoardMedia
from accmt.tracking.replay import Resume, Row
from accmt.tracking.spec import NEW_RUN
from accmt.tracking.values import Scalar

TRACKING_URI_VARIABLE = "MLFLOW_TRACKING_URI"
_SQLITE = "sqlite:///"
_HURRY = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "1",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class TensorBoardRun(TensorBoardMedia, TensorBoardTracker):  # type: ignore[misc]
    """Accelerate's TensorBoard tracker, which keeps the configuration in the run's own event file."""

    def store_init_configuration(self, values: dict[str, Scalar]) -> None:
        """Write `values` where TensorBoard's HPARAMS page finds them together with the run's scalars.

        `SummaryWriter.add_hparams`, which Accelerate calls, opens a second run for them, named by the time of day, and
        writes beside them that there are no metrics, and that the run succeeded.
        """
        from torch.utils.tensorboard.summary import hparams

        _, start_of_session, _ = hparams(values, {})  # type: ignore[no-untyped-call]
        self.writer.file_writer.add_summary(start_of_session)
        self.writer.flush()

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Write rows with the times when they were logged, and hand them to the operating system."""
        for row in rows:
            for name, value in row.values.items():
                self.writer.add_scalar(name, value, global_step=row.step, walltime=row.time)
        self.writer.flush()


class DVCLiveRun(DVCLiveMedia, DVCLiveTracker):  # type: ignore[misc]
    """Accelerate's DVCLive tracker, with the run's own steps instead of a count of the calls.

    Args:
        folder: Where the files go.
        resume: The run to go on with.
        options: Arguments of `dvclive.Live`.
    """

    def __init__(self, folder: Path, resume: Resume, **options: Any) -> None:
        quiet = {"save_dvc_exp": False, "dvcyaml": None, "report": None}
        # Without `resume` DVCLive empties the folder, which is this run's own.
        super().__init__(dir=str(folder), **{**quiet, **options, "resume": True})
        self._folder = folder
        self._first_step = resume.first_step

    def start(self) -> None:
        """Take out what the resumed run withdraws, then start."""
        if self._first_step is not None:
            for path in self._folder.glob("plots/metrics/**/*.tsv"):
                _withdraw(path, self._first_step)
        super().start()

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Write rows under their own steps; the summary, which takes as long as the run was, is left to the end."""
        for row in rows:
            self.live.step = row.step
            for name, value in row.values.items():
                self.live.log_metric(name, value)


class MLFlowRun(MLFlowMedia, MLflowTracker):  # type: ignore[misc]
    """Accelerate's MLflow tracker, bound to one store and one run, whatever else the process does with MLflow.

    The process's tracking URI is set, and stays set after the run, so that `mlflow.search_runs()` reads the same store;
    `MLFLOW_TRACKING_URI`, which MLflow sets along with it, is put back at once.

    Args:
        tracking_uri: The store or server.
        is_quiet: Whether MLflow's own messages are held back.
        resume: The run to go on with.
        options: Arguments of `accelerate.tracking.MLflowTracker`.
    """

    def __init__(self, tracking_uri: str, *, is_quiet: bool, resume: Resume = NEW_RUN, **options: Any) -> None:
        super().__init__(**{"run_id": resume.run_id, **options})
        self.tracking_uri = tracking_uri
        self.tags: dict[str, str] = {**(self.tags or {}), **tags_of(resume)}
        self._resume = resume
        self._is_quiet = is_quiet
        # With its own default of 7 retries MLflow blocks for four minutes at each call to a server that is down, and
        # warns of each retry; whoever delivers the rows tries again, and warns once.
        self._environment = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        if is_quiet:
            self._environment["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"

    def start(self) -> None:
        """Set the tracking URI, then start the run; from then on `run_id` is the run's id.

        Raises:
            mlflow.exceptions.MlflowException: The store cannot be reached, or another run is active.
        """
        import mlflow

        before = os.environ.get(TRACKING_URI_VARIABLE)
        mlflow.set_tracking_uri(self.tracking_uri)
        _set_variable(TRACKING_URI_VARIABLE, before)
        self._environment = {name: value for name, value in self._environment.items() if name not in os.environ}
        os.environ.update(self._environment)
        try:
            with _hushed("mlflow" if self._is_quiet else "mlflow.store"):
                self._start_in_turn()
        except BaseException:
            self._restore_environment()
            raise
        self.run_id = self.active_run.info.run_id

    def _start_in_turn(self) -> None:
        """Start the run; runs that begin at once on one database would create its tables, and experiments, together."""
        path = Path(self.tracking_uri.removeprefix(_SQLITE))
        with taking_turns(path.parent) if self.tracking_uri.startswith(_SQLITE) else nullcontext():
            self._forget_a_run_that_is_gone()
            super().start()

    def store_init_configuration(self, values: dict[str, Scalar]) -> None:
        """Store parameters; long ones are cut, and one that changed in a continued run gets a name of its own."""
        from mlflow import MlflowClient
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        # MLflow refuses to change a parameter, and one refusal would lose the whole batch.
        stored = MlflowClient(self.tracking_uri).get_run(self.run_id).data.params
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
        """Log rows with the times when they were logged, many in one request."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric
        from mlflow.utils.validation import MAX_METRICS_PER_BATCH

        client = MlflowClient(self.tracking_uri)
        metrics = [
            Metric(name, value, round(1000 * row.time), row.step) for row in rows for name, value in row.values.items()
        ]
        for begin in range(0, len(metrics), MAX_METRICS_PER_BATCH):
            client.log_batch(self.run_id, metrics=metrics[begin : begin + MAX_METRICS_PER_BATCH], synchronous=True)

    def log(self, values: Mapping[str, float], step: int | None = None, **kwargs: Any) -> None:
        """Log to this run, also where the calling thread has no active run or another one."""
        super().log(values, step=step, run_id=self.run_id, **kwargs)

    def finish(self, status: str = "FINISHED") -> None:
        """End the run.

        Args:
            status: "FINISHED", "FAILED" or "KILLED", as MLflow shows it; "PREEMPTED", which it does not know, is KILLED
                and a tag.
        """
        import mlflow

        client, status_there = mlflow.MlflowClient(self.tracking_uri), _status_there(status)
        client.set_tag(self.run_id, "accmt.status", status)
        if self._is_active():
            mlflow.end_run(status_there)
        else:
            client.set_terminated(self.run_id, status_there)
        self._restore_environment()  # not after a failure: it will be tried again

    def attach(self) -> None:
        """Make the run the active one of the calling thread, unless that has one; MLflow's are one for each thread."""
        import mlflow

        if mlflow.active_run() is None:
            mlflow.start_run(self.run_id, log_system_metrics=False)

    def detach(self, status: str) -> None:
        """Undo `attach`, and wait no longer than a second or two for a server that may be gone."""
        import mlflow

        self._restore_environment()
        if not self._is_active():
            return
        before = {name: os.environ.get(name) for name in _HURRY}
        os.environ.update(_HURRY)
        try:
            mlflow.end_run(_status_there(status))  # takes it off the thread's stack first, whatever the server says
        finally:
            for name, value in before.items():
                _set_variable(name, value)

    def _is_active(self) -> bool:
        import mlflow

        active = mlflow.active_run()
        return active is not None and active.info.run_id == self.run_id

    def _forget_a_run_that_is_gone(self) -> None:
        """Start a new run where the one to go on with was deleted, or is not in this store."""
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        if self.run_id is None or self.run_id != self._resume.run_id:
            return
        try:
            if MlflowClient(self.tracking_uri).get_run(self.run_id).info.lifecycle_stage == "active":
                return
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        got = f"the run {self.run_id}, with which this one should go on, is not in {self.tracking_uri}, or was deleted"
        warn(explain("the tracker mlflow", got, "the run of the checkpoint", "nothing: a new run gets all rows"))
        self.run_id = None

    def _restore_environment(self) -> None:
        for name in self._environment:
            os.environ.pop(name, None)


def clean_mlflow_name(name: str) -> str:
    """Turn a name into one that MLflow takes for a metric or a parameter: `f1@0.5` becomes `f1_at_0.5`.

    Source: the rules in `mlflow.utils.validation`: letters, digits, `_ - . : /` and spaces, a relative path in its
    shortest form, at most 250 characters (of which nine are left for a digest).
    """
    name = name.replace("@", "_at_").replace("%", "_percent")
    return clean_path(re.sub(r"[^\w.\-: /]", "_", name))[:241].rstrip("/") or "_"


def clean_path(name: str) -> str:
    """Turn a name into a relative path in its shortest form, which leads out of no folder."""
    return posixpath.normpath(posixpath.join("/", name)).strip("/") or "_"


def _withdraw(path: Path, first_step: int) -> None:
    """Take the points from `first_step` on out of one of DVCLive's tables, which have the step in front."""
    header, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    write_text(path, "".join([header, *(line for line in lines if int(line.split("\t")[0]) < first_step)]))


def tags_of(resume: Resume) -> dict[str, str]:
    """Return what a resumed run says of itself in trackers that keep the points of earlier attempts."""
    if resume.attempt == 1:
        return {}
    tags = {"accmt.attempt": str(resume.attempt)}
    if resume.kept_steps is not None:
        tags["accmt.steps_of_earlier_attempts"] = "{}-{}".format(*resume.kept_steps)
    return tags


def _status_there(status: str) -> str:
    return "KILLED" if status == "PREEMPTED" else status


def _cut(value: Scalar, limit: int) -> Scalar:
    return value[: limit - 1] + "…" if isinstance(value, str) and len(value) > limit else value


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextmanager
def _hushed(logger_name: str) -> Iterator[None]:
    logger = logging.getLogger(logger_name)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
