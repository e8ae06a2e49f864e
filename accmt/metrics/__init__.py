"""Metrics: what is computed over a whole validation set, and means of what is logged."""

from accmt.metrics.building import BUILTIN, build_metrics
from accmt.metrics.builtin import AUROC, F1, MAE, MSE, R2, RMSE, Accuracy, Perplexity, Precision, Recall
from accmt.metrics.collector import ValidationCollector
from accmt.metrics.metric import Metric
from accmt.metrics.outputs import OutputCollector, gather_on_cpu
from accmt.metrics.parallel import MetricBatch, MetricParallel
from accmt.metrics.running_averages import RunningAverages
from accmt.metrics.streaming import StreamingMetric
from accmt.metrics.torch_metrics import TorchMetric

__all__ = [
    "OutputCollector",
    "gather_on_cpu",
    "AUROC",
    "BUILTIN",
    "F1",
    "MAE",
    "MSE",
    "R2",
    "RMSE",
    "Accuracy",
    "Metric",
    "MetricBatch",
    "MetricParallel",
    "Perplexity",
    "Precision",
    "Recall",
    "StreamingMetric",
    "TorchMetric",
    "RunningAverages",
    "ValidationCollector",
    "build_metrics",
]
