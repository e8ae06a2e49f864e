"""What `metrics=` may be given, and what is said about the rest."""

from __future__ import annotations

import pytest
import torchmetrics
from torchmetrics import regression

from accmt.errors import MetricError
from accmt.metrics import F1, Accuracy, Metric, build_metrics
from accmt.saving.selection import METRIC_NAMES
from tests.raising import raises_at


class Own(Metric):
    def compute(self, predictions, references):
        return {self.name: 1.0}


ACCURACY = Accuracy()


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, []),
        ([], []),
        ({}, []),
        (ACCURACY, ["accuracy"]),
        ([ACCURACY, Own("own")], ["accuracy", "own"]),
        ((ACCURACY,), ["accuracy"]),
        ("accuracy", ["accuracy"]),
        (["accuracy", "f1", F1("macro_f1", num_classes=3)], ["accuracy", "f1", "macro_f1"]),
        (regression.MeanSquaredError(), ["mean_squared_error"]),
        ([regression.R2Score(), ACCURACY], ["r2_score", "accuracy"]),
        ({"error": regression.MeanSquaredError(), "top1": "accuracy", "own": Own("own")}, ["error", "top1", "own"]),
        (torchmetrics.MetricCollection([regression.MeanSquaredError()]), ["metric_collection"]),
        ({"errors": torchmetrics.MetricCollection([regression.MeanSquaredError()])}, ["errors"]),
    ],
)
def test_metrics_may_be_given_in_many_ways(value, names):
    assert [metric.name for metric in build_metrics(value)] == names


MORE = {"rouge": ["rouge1", "rouge2"]}


@pytest.mark.parametrize("name", METRIC_NAMES)
def test_every_built_in_metric_has_its_name(name):
    (metric,) = build_metrics(name)
    assert (metric.name, metric.main_metric, list(metric.directions)) == (name, name, [name, *MORE.get(name, ())])
    (renamed,) = build_metrics({"other": name})
    assert (renamed.name, next(iter(renamed.directions))) == ("other", "other")


@pytest.mark.parametrize(
    ("value", "got", "do"),
    [
        ("acuracy", "'acuracy'", "metrics=['accuracy']"),
        ("F1", "'F1'", "metrics=['f1']"),
        ("kappa", "'kappa'", "class MyMetric(Metric)"),
        (Accuracy, "the class Accuracy", "metrics=[Accuracy()]"),
        ([ACCURACY, Accuracy()], "the names ['accuracy', 'accuracy']", ""),
        ([Own("a", main_metric="x"), Own("b", main_metric="x")], "the names ['x', 'x']", ""),
        ([3], "3 (int)", ""),
        (lambda p, r: 0.0, "function", ""),
        ({"other": ACCURACY}, "the name 'other' for a Accuracy named 'accuracy'", ""),
        ({3: ACCURACY}, "the name 3 (int)", ""),
    ],
)
def test_what_is_no_metric_is_rejected(value, got, do):
    with raises_at(MetricError, "Trainer(metrics=...)", got, do=do):
        build_metrics(value)
