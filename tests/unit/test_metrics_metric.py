"""The class that users derive metrics from: its direction, said in one of two ways."""

from __future__ import annotations

import math

import pytest

from accmt import Metric
from accmt.errors import MetricError
from tests.raising import raises_at


class Own(Metric):
    def compute(self, predictions, references):
        return {self.main_metric: 1.0}


@pytest.mark.parametrize(
    ("arguments", "greater", "comparator", "worst"),
    [
        ({}, True, ">", -math.inf),
        ({"greater_is_better": True}, True, ">", -math.inf),
        ({"greater_is_better": False}, False, "<", math.inf),
        ({"comparator": ">"}, True, ">", -math.inf),
        ({"comparator": ">="}, True, ">=", -math.inf),
        ({"comparator": "<"}, False, "<", math.inf),
        ({"comparator": "<="}, False, "<=", math.inf),
        ({"greater_is_better": False, "comparator": "<="}, False, "<=", math.inf),
        ({"greater_is_better": True, "comparator": ">="}, True, ">=", -math.inf),
    ],
)
def test_the_direction_may_be_said_in_two_ways(arguments, greater, comparator, worst):
    metric = Own("own", **arguments)
    assert (metric.greater_is_better, metric.comparator, metric.worst) == (greater, comparator, worst)
    assert all(metric.is_better(value, metric.worst) for value in (-1e30, 0.0, 1e30))


@pytest.mark.parametrize(
    ("comparator", "rises", "stays", "falls"),
    [(">", True, False, False), (">=", True, True, False), ("<", False, False, True), ("<=", False, True, True)],
)
def test_a_new_value_is_compared_as_the_comparator_says(comparator, rises, stays, falls):
    metric = Own("own", comparator=comparator)
    assert [metric.is_better(new, 0.0) for new in (0.1, 0.0, -0.1)] == [rises, stays, falls]


@pytest.mark.parametrize("comparator", [">", ">=", "<", "<="])
@pytest.mark.parametrize("best", [0.0, math.inf, -math.inf, math.nan])
def test_nan_is_never_better(comparator, best):
    assert Own("own", comparator=comparator).is_better(math.nan, best) is False


@pytest.mark.parametrize(("greater", "comparator"), [(True, "<"), (True, "<="), (False, ">"), (False, ">=")])
def test_two_directions_that_differ_are_rejected(greater, comparator):
    with raises_at(MetricError, "Metric('own')"):
        Own("own", greater_is_better=greater, comparator=comparator)


@pytest.mark.parametrize("comparator", ["==", "", "max", "=>"])
def test_an_unknown_comparator_is_rejected(comparator):
    with raises_at(MetricError, "Metric('own', comparator=...)"):
        Own("own", comparator=comparator)
