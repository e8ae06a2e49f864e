"""Metrics computed over a whole validation set, and averages of logged values."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from accmt.metrics.averages import RunningAverages as RunningAverages
from accmt.metrics.building import build_metrics as build_metrics
from accmt.metrics.builtin import AUROC as AUROC
from accmt.metrics.builtin import F1 as F1
from accmt.metrics.builtin import MAE as MAE
from accmt.metrics.builtin import MSE as MSE
from accmt.metrics.builtin import R2 as R2
from accmt.metrics.builtin import RMSE as RMSE
from accmt.metrics.builtin import Accuracy as Accuracy
from accmt.metrics.builtin import Perplexity as Perplexity
from accmt.metrics.builtin import Precision as Precision
from accmt.metrics.builtin import Recall as Recall
from accmt.metrics.collector import ValidationCollector as ValidationCollector
from accmt.metrics.metric import Metric as Metric
from accmt.metrics.metric import MetricBatch as MetricBatch
from accmt.metrics.metric import MetricParallel as MetricParallel
from accmt.metrics.metric import ReportedValue as ReportedValue
from accmt.metrics.metric import StreamingMetric as StreamingMetric
from accmt.metrics.torch_metrics import TorchMetric as TorchMetric

if TYPE_CHECKING:
    from accmt.addons.text_metrics import CER as CER
    from accmt.addons.text_metrics import WER as WER
    from accmt.addons.text_metrics import ChrF as ChrF
    from accmt.addons.text_metrics import ExactMatch as ExactMatch
    from accmt.addons.text_metrics import Rouge as Rouge
    from accmt.addons.text_metrics import SacreBLEU as SacreBLEU
    from accmt.addons.text_metrics import TextMetric as TextMetric

_TEXT_METRICS = ("CER", "ChrF", "ExactMatch", "Rouge", "SacreBLEU", "TextMetric", "WER")


def __getattr__(name: str) -> Any:
    if name not in _TEXT_METRICS:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module("accmt.addons.text_metrics"), name)
