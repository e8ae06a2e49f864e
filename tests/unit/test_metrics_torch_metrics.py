"""Metrics of torchmetrics: inputs, results, directions and errors, on one process."""

from __future__ import annotations

import gc
import math
import weakref

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torchmetrics import classification, regression, retrieval, text, wrappers

from accmt.errors import MetricError
from accmt.metrics import TorchMetric, ValidationCollector
from tests.raising import raises_at
from tests.tables import each

pytestmark = pytest.mark.filterwarnings("ignore:Metric .* will save all targets")


def collect(metric, *entries):
    collector = ValidationCollector([metric])
    for entry in entries:
        collector.add({metric.name: entry}, 1)
    return collector.compute()


def pairs(*sizes, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, generator=generator), torch.randn(size, generator=generator)) for size in sizes]


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (classification.BinaryF1Score(), "binary_f1_score"),
        (classification.BinaryAUROC(), "binary_auroc"),
        (torchmetrics.Accuracy(task="multiclass", num_classes=3), "multiclass_accuracy"),
        (regression.R2Score(), "r2_score"),
        (text.BLEUScore(), "bleu_score"),
        (text.SacreBLEUScore(), "sacre_bleu_score"),
        (retrieval.RetrievalMAP(), "retrieval_map"),
    ],
)
def test_the_name_is_that_of_the_class_in_snake_case(metric, name):
    assert TorchMetric(metric).name == name
    assert TorchMetric(metric, "own").name == "own"


@pytest.mark.parametrize("order", [1, -1])
def test_how_samples_are_shared_among_batches_does_not_matter(order):
    predictions, references = torch.rand(64) * 1e4, torch.rand(64)
    alone = collect(TorchMetric(regression.MeanSquaredError()), (predictions, references))
    split = zip(predictions.split(5)[::order], references.split(5)[::order], strict=True)
    assert collect(TorchMetric(regression.MeanSquaredError()), *split) == pytest.approx(alone, rel=1e-14)


def test_half_precision_is_computed_in_double():
    predictions = torch.full((1000,), 100.0, dtype=torch.bfloat16)
    values = collect(TorchMetric(regression.MeanSquaredError()), *[(predictions, predictions - 1)] * 300)
    assert values == {"mean_squared_error": 1.0}


@pytest.mark.parametrize(
    ("metric", "entry", "expected"),
    [
        (torchmetrics.MeanMetric(), torch.tensor([1.0, 3.0]), 2.0),
        (torchmetrics.MeanMetric(), 3, 3.0),
        (torchmetrics.MeanMetric(), (torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0])), 2.0),
        (torchmetrics.MeanMetric(), {"value": 2.0, "weight": 3}, 2.0),
        (regression.MeanAbsoluteError(), ([1.0, 2.0], [1, 4]), 1.0),
        (regression.MeanAbsoluteError(), [np.array([1.0, 2.0]), np.array([1.0, 4.0])], 1.0),
        (text.BLEUScore(n_gram=1), (["a b"], [["a b", "c"]]), 1.0),
        (text.WordErrorRate(), (["a b", "c d"], ["a b", "c e"]), 0.25),
        (retrieval.RetrievalMRR(), (torch.tensor([0.1, 0.9]), torch.tensor([1, 0]), torch.tensor([0, 0])), 0.5),
    ],
    ids=["value", "number", "two", "named", "lists", "arrays", "texts", "text", "three"],
)
def test_update_gets_what_the_step_returned(metric, entry, expected):
    (value,) = collect(TorchMetric(metric), entry).values()
    assert value == pytest.approx(expected)


CLASSES = (torch.tensor([0, 1, 2, 1]), torch.tensor([0, 1, 1, 1]))


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (TorchMetric(classification.MulticlassRecall(3, average="micro"), "r"), {"r": 0.75}),
        (TorchMetric(classification.MulticlassRecall(3, average=None), "r"), {"r_0": 1.0, "r_1": 2 / 3, "r_2": 0.0}),
        (
            TorchMetric(wrappers.ClasswiseWrapper(classification.MulticlassRecall(3, average=None), prefix="of_")),
            {"of_0": 1.0, "of_1": 2 / 3, "of_2": 0.0},
        ),
        (
            TorchMetric(
                torchmetrics.MetricCollection(
                    {"r": classification.MulticlassRecall(3, average="micro"), "e": regression.MeanSquaredError()},
                    prefix="my_",
                ),
            ),
            {"my_r": 0.75, "my_e": 0.25},
        ),
    ],
    ids=["number", "vector", "dict", "collection"],
)
def test_results_are_numbers_by_name(metric, expected):
    values = collect(metric, CLASSES)
    assert values == pytest.approx(expected)
    assert all(type(value) is float for value in values.values())


def test_a_result_that_is_no_vector_is_rejected():
    with raises_at(MetricError, "metric 'matrix'"):
        collect(TorchMetric(classification.MulticlassConfusionMatrix(3), "matrix"), CLASSES)
    with raises_at(MetricError, "metric 'curve'"):
        collect(TorchMetric(classification.BinaryROC(), "curve"), (torch.tensor([0.1, 0.9]), torch.tensor([0, 1])))


def test_a_metric_is_reset_before_each_set_and_after_it():
    given = regression.SpearmanCorrCoef()
    metric = TorchMetric(given)
    given.update(torch.rand(9), torch.rand(9))
    first = collect(metric, *pairs(5, 3))
    assert collect(metric, *pairs(5, 3)) == first
    assert given.preds == []


def test_members_of_a_used_collection_do_not_share_their_samples():
    collection = torchmetrics.MetricCollection([regression.SpearmanCorrCoef(), regression.KendallRankCorrCoef()])
    collection.update(torch.rand(4), torch.rand(4))
    collection.compute()
    alone = collect(TorchMetric(regression.KendallRankCorrCoef()), *pairs(6))
    assert collect(TorchMetric(collection), *pairs(6))["KendallRankCorrCoef"] == alone["kendall_rank_corr_coef"]


@pytest.mark.parametrize("metric", [regression.MeanSquaredError(), classification.BinaryStatScores()])
def test_a_metric_of_sums_keeps_no_batch(metric):
    collector = ValidationCollector([TorchMetric(metric, "own")])
    seen = []
    for _ in range(3):
        predictions, references = torch.ones(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
        seen += [weakref.ref(predictions), weakref.ref(references)]
        collector.add({"own": (predictions, references)}, 4)
    del predictions, references
    gc.collect()
    assert [reference() for reference in seen] == [None] * 6


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("kind", [regression.SpearmanCorrCoef, regression.MeanSquaredError, regression.PearsonCorrCoef])
def test_steps_may_run_in_either_mode_now_and_then(mode, kind):
    metric = TorchMetric(kind())
    expected = collect(metric, *pairs(4, 3))
    collector = ValidationCollector([metric])
    for entry in pairs(4, 3):
        with mode():
            collector.add({metric.name: tuple(value * 1 for value in entry)}, 1)
    assert collector.compute() == expected


@pytest.mark.parametrize(
    ("metric", "new", "best", "is_better"),
    [
        (regression.MeanSquaredError(), 1.0, 2.0, True),
        (regression.MeanSquaredError(), 2.0, 1.0, False),
        (classification.BinaryAccuracy(), 2.0, 1.0, True),
        (classification.BinaryAccuracy(), 1.0, 1.0, False),
        (classification.BinaryAccuracy(), math.nan, 1.0, False),
        (regression.MeanSquaredError(), math.nan, 1.0, False),
    ],
)
def test_the_direction_is_the_metric_s_own(metric, new, best, is_better):
    adapted = TorchMetric(metric)
    assert adapted.is_better(new, best) is is_better
    assert adapted.directions[adapted.name](new, best) is is_better
    assert adapted.greater_is_better is metric.higher_is_better


def test_a_direction_that_nobody_knows_is_asked_for():
    metric = TorchMetric(torchmetrics.MeanMetric(), "length")
    with raises_at(MetricError, "metric 'length'"):
        metric.is_better(1.0, 2.0)


def test_each_of_a_collection_has_its_direction():
    metric = TorchMetric(
        torchmetrics.MetricCollection([classification.BinaryAccuracy(), regression.MeanSquaredError()])
    )
    assert {name: better(2.0, 1.0) for name, better in metric.directions.items()} == {
        "BinaryAccuracy": True,
        "MeanSquaredError": False,
    }


def test_an_entry_of_the_result_may_be_what_models_are_selected_by():
    metric = TorchMetric(classification.MulticlassRecall(3, average=None), "recall", main_metric="recall_1")
    assert list(metric.directions) == ["recall_1"]
    assert metric.is_better(0.9, 0.5)
    assert collect(metric, CLASSES)["recall_1"] == pytest.approx(2 / 3)
    wrong = TorchMetric(classification.MulticlassRecall(3, average=None), "recall", main_metric="recall_7")
    with raises_at(MetricError, "metric 'recall'"):
        collect(wrong, CLASSES)


@each(
    ("metric", "entry"),
    [
        (regression.MeanSquaredError(), (torch.ones(2), torch.ones(3))),
        (regression.MeanSquaredError(), torch.ones(2)),
        (classification.MulticlassF1Score(3), (torch.rand(2, 4), torch.tensor([1, 0]))),
        (regression.R2Score(), (torch.ones(1), torch.ones(1))),
    ],
)
def test_what_a_metric_does_not_take_is_explained(metric, entry):
    with raises_at(MetricError, "metric 'own'"):
        collect(TorchMetric(metric, "own"), entry)


@pytest.mark.parametrize("value", [None, 3, regression.MeanSquaredError])
def test_only_metrics_are_adapted(value):
    with raises_at(MetricError, "TorchMetric(...)"):
        TorchMetric(value)


class Judge(torchmetrics.Metric):
    """A metric with a network of its own."""

    def __init__(self):
        super().__init__()
        self.network = nn.Linear(2, 1)
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, preds, target):
        self.total += (self.network(preds) - target).sum()

    def compute(self):
        return self.total


def test_a_metric_with_a_network_keeps_its_precision():
    judge = Judge()
    (value,) = collect(TorchMetric(judge), (torch.ones(3, 2), torch.zeros(3, 1))).values()
    assert value == pytest.approx(3 * judge.network(torch.ones(2)).item(), rel=1e-6)
    assert judge.network.weight.dtype == judge.total.dtype == torch.float32


def test_running_out_of_memory_stays_what_it_is():
    class Greedy(Judge):
        def update(self, preds, target):
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        collect(TorchMetric(Greedy()), (torch.ones(1), torch.ones(1)))


def test_compute_needs_no_collector():
    assert TorchMetric(regression.MeanSquaredError(), "mse").compute(torch.ones(2), torch.zeros(2)) == {"mse": 1.0}
