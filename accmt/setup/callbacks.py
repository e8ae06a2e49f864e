"""The callbacks of accmt's own that a run has, besides the user's."""

from __future__ import annotations

from typing import Any

from accmt.callbacks import Callback
from accmt.callbacks.ending import EndSummary
from accmt.callbacks.evaluation_report import EvaluationReport
from accmt.callbacks.graphs import Graphs
from accmt.callbacks.monitor import build_monitor
from accmt.callbacks.progress import ProgressBar, is_notebook
from accmt.callbacks.summary import ModelSummary
from accmt.loop.evaluation import EvaluationResults
from accmt.loop.row_logger import RowLogger
from accmt.options import Settings
from accmt.processes import is_main_process
from accmt.recovery.model_saver import ModelSaver
from accmt.registry import addon
from accmt.tracking import Tracking


def make_builtin_callbacks(settings: Settings, tracking: Tracking, saver: ModelSaver) -> list[Callback]:
    """Return accmt's own callbacks, in the order in which those of equal `order` act."""
    running, logging = settings.running, settings.tracking
    loss_name = logging.train_loss_metric_name
    enable_bar = running.verbose if running.enable_progress_bar is None else running.enable_progress_bar
    view: Any = None
    if enable_bar and is_notebook():
        view = addon("notebook_curve")(loss_name, logging.val_loss_metric_name)
    bar = ProgressBar(
        enable=None if running.enable_progress_bar is None and enable_bar else enable_bar,
        loss_name=loss_name,
        stream=None if view is None else view.terminal,
    )
    first, last = build_monitor(logging.monitored, loss_name, is_main_process=is_main_process())
    profiled_first: list[Callback] = []
    profiled_last: list[Callback] = []
    if running.profiler is not None:
        profiled_first, profiled_last = addon("profiler")(running.profiler, is_main_process=is_main_process())
    summaries = [ModelSummary(int(running.enable_model_summary))] if running.enable_model_summary else []
    rows = RowLogger(tracking, bar, logging.monitored)
    ending: list[Callback] = [EndSummary(loss_name)] if running.verbose and not running.fast_dev_run else []
    graphs = [Graphs()] if running.compile_buckets is not None else []
    return [
        *graphs,
        *profiled_first,
        *first,
        *summaries,
        bar,
        *([view] if view else []),
        EvaluationReport(loss_name),
        EvaluationResults(),
        rows,
        saver,
        *ending,
        *last,
        *profiled_last,
    ]
