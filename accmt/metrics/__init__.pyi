"""The names of this package for type checkers: those of add-ons are loaded at their first use."""

from accmt.addons.prediction_metrics import AUROC as AUROC
from accmt.addons.prediction_metrics import F1 as F1
from accmt.addons.prediction_metrics import MAE as MAE
from accmt.addons.prediction_metrics import MSE as MSE
from accmt.addons.prediction_metrics import R2 as R2
from accmt.addons.prediction_metrics import RMSE as RMSE
from accmt.addons.prediction_metrics import Perplexity as Perplexity
from accmt.addons.prediction_metrics import Precision as Precision
from accmt.addons.prediction_metrics import Recall as Recall
from accmt.addons.text_metrics import CER as CER
from accmt.addons.text_metrics import WER as WER
from accmt.addons.text_metrics import ChrF as ChrF
from accmt.addons.text_metrics import ExactMatch as ExactMatch
from accmt.addons.text_metrics import Rouge as Rouge
from accmt.addons.text_metrics import SacreBLEU as SacreBLEU
from accmt.addons.text_metrics import TextMetric as TextMetric
from accmt.addons.torch_metrics import TorchMetric as TorchMetric
from accmt.metrics.accuracy import Accuracy as Accuracy
from accmt.metrics.averages import RunningAverages as RunningAverages
from accmt.metrics.building import build_metrics as build_metrics
from accmt.metrics.collector import ValidationCollector as ValidationCollector
from accmt.metrics.metric import Metric as Metric
from accmt.metrics.metric import MetricBatch as MetricBatch
from accmt.metrics.metric import MetricParallel as MetricParallel
from accmt.metrics.metric import ReportedValue as ReportedValue
from accmt.metrics.metric import StreamingMetric as StreamingMetric
