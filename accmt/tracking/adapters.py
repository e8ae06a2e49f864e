"""Accelerate's trackers, with what they lack: quiet starts, true endings, names and values that their services accept.

Only imported when a run starts, for it needs Accelerate's tracker classes as bases.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accelerate.tracking import MLflowTracker, TensorBoardTracker

from accmt.tracking.values import Scalar

TRACKING_URI_VARIABLE = "MLFLOW_TRACKING_URI"


class TensorBoardRun(TensorBoardTracker):  # type: ignore[misc]
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


class MLFlowRun(MLflowTracker):  # type: ignore[misc]
    """Accelerate's MLflow tracker, bound to one store and one run, whatever else the process does with MLflow.

    The process's tracking URI is set, and stays set after the run, so that `mlflow.search_runs()` reads the same store;
    `MLFLOW_TRACKING_URI`, which MLflow sets along with it, is put back at once.

    Args:
        tracking_uri: The store or server.
        is_quiet: Whether MLflow's own messages are held back.
        options: Arguments of `accelerate.tracking.MLflowTracker`.
    """

    def __init__(self, tracking_uri: str, *, is_quiet: bool, **options: Any) -> None:
        super().__init__(**options)
        self.tracking_uri = tracking_uri
        self._is_quiet = is_quiet
        # With its own default of 7 retries MLflow blocks for four minutes at each call to a server that is down.
        self._environment = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
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
                super().start()
        except BaseException:
            self._restore_environment()
            raise
        self.run_id = self.active_run.info.run_id

    def store_init_configuration(self, values: dict[str, Scalar]) -> None:
        """Store parameters; long ones are cut, and those that a continued run already has stay as they are."""
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        # MLflow refuses to change a parameter, and one refusal would lose the whole batch.
        stored = self.active_run.data.params
        new = {name: value for name, value in values.items() if name not in stored}
        super().store_init_configuration({name: _cut(value, MAX_PARAM_VAL_LENGTH) for name, value in new.items()})

    def log(self, values: Mapping[str, float], step: int | None = None, **kwargs: Any) -> None:
        """Log to this run, also where the calling thread has no active run or another one."""
        super().log(values, step=step, run_id=self.run_id, **kwargs)

    def finish(self, status: str = "FINISHED") -> None:
        """End the run.

        Args:
            status: "FINISHED", "FAILED" or "KILLED", as MLflow shows it.
        """
        import mlflow

        try:
            active = mlflow.active_run()
            if active is not None and active.info.run_id == self.run_id:
                mlflow.end_run(status)
            else:
                mlflow.MlflowClient(self.tracking_uri).set_terminated(self.run_id, status)
        finally:
            self._restore_environment()

    def _restore_environment(self) -> None:
        for name in self._environment:
            os.environ.pop(name, None)


def clean_mlflow_name(name: str) -> str:
    """Turn a name into one that MLflow takes for a metric or a parameter: `f1@0.5` becomes `f1_at_0.5`.

    Source: the rules in `mlflow.utils.validation`: letters, digits, `_ - . : /` and spaces, a relative path in its
    shortest form, at most 250 characters (of which nine are left for a digest).
    """
    name = name.replace("@", "_at_").replace("%", "_percent")
    name = re.sub(r"[^\w.\-: /]", "_", name)
    name = posixpath.normpath(posixpath.join("/", name)).strip("/")
    return name[:241].rstrip("/") or "_"


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
