"""Metrics computed over a whole validation set, and averages of logged values."""

from importlib import import_module
from typing import Any

from accmt.metrics.accuracy import Accuracy as Accuracy
from accmt.metrics.averages import RunningAverages as RunningAverages
from accmt.metrics.building import build_metrics as build_metrics
from accmt.metrics.collector import ValidationCollector as ValidationCollector
from accmt.metrics.metric import Metric as Metric
from accmt.metrics.metric import MetricBatch as MetricBatch
from accmt.metrics.metric import MetricParallel as MetricParallel
from accmt.metrics.metric import ReportedValue as ReportedValue
from accmt.metrics.metric import StreamingMetric as StreamingMetric

# Their types are in __init__.pyi.
_OF_ADDONS = {
    "accmt.addons.prediction_metrics": ("AUROC", "F1", "MAE", "MSE", "R2", "RMSE", "Perplexity", "Precision", "Recall"),
    "accmt.addons.text_metrics": ("CER", "ChrF", "ExactMatch", "Rouge", "SacreBLEU", "TextMetric", "WER"),
    "accmt.addons.torch_metrics": ("TorchMetric",),
}


def __getattr__(name: str) -> Any:
    for module, names in _OF_ADDONS.items():
        if name in names:
            return getattr(import_module(module), name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
