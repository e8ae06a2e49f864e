"""Metrics: what is computed over a whole validation set, and means of what is logged."""

from accmt.metrics.accuracy import Accuracy
from accmt.metrics.collector import ValidationCollector
from accmt.metrics.metric import Metric
from accmt.metrics.windows import TrainingWindow

__all__ = ["Accuracy", "Metric", "TrainingWindow", "ValidationCollector"]
