"""Results of a validation set: means weighted by samples, metrics over all samples at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from accmt import Accuracy, Metric
from accmt.errors import MetricError, ModuleContractError
from accmt.metrics import ValidationCollector
from accmt.metrics.averages import LoggedValues
from tests.raising import raises_at
from tests.tables import each


class Seen(Metric):
    """Keeps what it was given, and returns what it is made to."""

    def __init__(self, name="seen", result=None, **arguments):
        super().__init__(name, **arguments)
        self.result = {self.main_metric: 0.0} if result is None else result

    def compute(self, predictions, references):
        self.predictions, self.references = predictions, references
        return self.result


def collect(metrics, *batches):
    collector = ValidationCollector(metrics)
    for outputs, weight in batches:
        collector.add(outputs, weight)
    return collector.compute()


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), torch.tensor(2), torch.tensor([2.0]), torch.tensor(True) + 1])
def test_scalars_of_any_kind_are_averaged(value):
    assert collect([], ({"own": value}, 1.0), ({"own": 4.0}, 1.0)) == {"own": 3.0}


def test_an_entry_of_some_batches_only_is_averaged_over_those():
    assert collect([], ({"a": 1.0, "b": 1.0}, 2), ({"a": 4.0}, 1)) == {"a": 2.0, "b": 1.0}


@pytest.mark.parametrize("values", [(math.inf, 1.0), (math.inf, -math.inf), (math.nan, 1.0), (1e308, 1e308)])
def test_values_beyond_all_bounds_are_averaged_as_floats_are(values):
    mean = collect([], *(({"a": value}, 1.0) for value in values))["a"]
    expected = sum(values) / 2
    assert mean == expected or (math.isnan(mean) and math.isnan(expected))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([[1, 2], [3]], [1, 2, 3]),
        ([(1, 2), (3,)], [1, 2, 3]),
        ([["a"], ["b", "c"]], ["a", "b", "c"]),
        (["a", "b"], ["a", "b"]),
        ([torch.tensor([1, 2]), torch.tensor(3)], [1, 2, 3]),
        ([np.array([1, 2]), np.array([3])], [1, 2, 3]),
        ([torch.ones(1, 2), torch.zeros(1, 2)], [[1.0, 1.0], [0.0, 0.0]]),
        ([[], [1]], [1]),
    ],
    ids=str,
)
def test_predictions_may_be_tensors_arrays_or_lists(parts, expected):
    metric = Seen()
    collect([metric], *(({"seen": (part, [0])}, 1) for part in parts))
    joined = metric.predictions
    assert (joined.tolist() if isinstance(joined, torch.Tensor) else joined) == expected


def test_the_padding_of_a_metric_may_be_another_or_none():
    metric = Seen()
    metric.padding = 0
    collect([metric], *(({"seen": (torch.ones(1, width), [0])}, 1) for width in (1, 2)))
    assert metric.predictions.tolist() == [[1, 0], [1, 1]]
    metric.padding = None
    collect([metric], *(({"seen": (torch.ones(1, width), [0])}, 1) for width in (1, 2)))
    assert [sample.tolist() for sample in metric.predictions] == [[1], [1, 1]]


@pytest.mark.parametrize(
    "parts", [[torch.ones(2, 3), torch.ones(2, 5, 1)], [torch.ones(2, 3).bool(), torch.ones(2, 5).bool()]]
)
def test_samples_of_shapes_that_no_padding_fits_are_explained(parts):
    batches = [({"seen": (part, torch.ones(2))}, 1) for part in parts]
    with raises_at(MetricError, "metric 'seen'"):
        collect([Seen()], *batches)


def test_several_metrics_stand_beside_the_means():
    outputs = {"val_loss": 1.0, "accuracy": (torch.tensor([1, 0]), torch.tensor([1, 1])), "seen": ([1], [1])}
    results = collect([Accuracy(), Seen(result={"seen": torch.tensor(7), "more": np.float64(0.5)})], (outputs, 2))
    assert results == {"val_loss": 1.0, "accuracy": 0.5, "seen": 7.0, "more": 0.5}
    assert {type(value) for value in results.values()} == {float}


def test_a_metric_without_predictions_is_said_so():
    with raises_at(MetricError, "metric 'accuracy'"):
        collect([Accuracy()], ({"val_loss": 1.0}, 1))


def test_a_misspelt_name_of_a_metric_is_named_with_the_nearest():
    with raises_at(MetricError, "validation_step"):
        collect([Accuracy()], ({"acuracy": ([1], [1])}, 1))
    with raises_at(MetricError, "validation_step"):
        collect([], ({"accuracy": ([1], [1])}, 1))


@pytest.mark.parametrize("value", [1.0, torch.ones(3), (1, 2, 3), None])
def test_a_metric_s_entry_has_to_be_a_pair(value):
    with raises_at(ModuleContractError, "validation_step"):
        collect([Accuracy()], ({"accuracy": value}, 1))


@each("value", [torch.ones(2), "high", None, [1]])
def test_an_entry_that_is_no_scalar_is_rejected(value):
    with raises_at(ModuleContractError, "the value 'own'"):
        collect([], ({"own": value}, 1))


@each("result", [{"other": 1.0}, {}, 0.5, [("seen", 1.0)], {"seen": "high"}, {"seen": torch.ones(2)}, {"seen": None}])
def test_a_result_without_a_number_for_the_main_metric_is_rejected(result):
    with raises_at(MetricError, "metric 'seen'"):
        collect([Seen(result=result)], ({"seen": ([1], [1])}, 1))


def test_a_result_with_the_name_of_another_value_is_rejected():
    metric = Seen(result={"seen": 1.0, "val_loss": 0.0})
    with raises_at(MetricError, "metric 'seen'"):
        collect([metric], ({"val_loss": 1.0, "seen": ([1], [1])}, 1))
    with raises_at(MetricError, "metric 'second'"):
        collect(
            [Seen("first", result={"first": 1.0, "both": 1.0}), Seen("second", result={"second": 1.0, "both": 1.0})],
            ({"first": ([1], [1]), "second": ([1], [1])}, 1),
        )


def test_an_added_metric_replaces_averages_and_may_have_no_input():
    added = [Seen("rows", result={"rows": 1.0, "val_loss": 0.5}), Seen("absent")]
    collector = ValidationCollector([Seen()], added=added)
    collector.add({"val_loss": 2.0, "acc": 0.25, "seen": ([1], [1]), "rows": ([1], [1])}, 1)
    assert collector.compute() == {"val_loss": 0.5, "acc": 0.25, "seen": 0.0, "rows": 1.0}


def test_the_order_is_that_of_positions_where_they_are_given():
    metric = Seen()
    collector = ValidationCollector([metric])
    for position in (2, 0, 1):
        collector.add({"seen": (torch.tensor([position]), [position])}, 1, position)
    collector.compute()
    assert metric.predictions.tolist() == metric.references == [0, 1, 2]


def test_what_a_set_logged_whose_evaluation_failed_is_in_no_later_one():
    logged = LoggedValues()
    failed = ValidationCollector([], logged)
    logged.add("odd", 5.0)
    failed.add({"loss": 1.0}, 1)
    logged.add("odd", 7.0)  # in the batch that failed
    later = ValidationCollector([], logged)
    later.add({"loss": 3.0}, 1)
    assert later.compute() == {"loss": 3.0}
