"""Accuracy: its values, and what predictions may look like."""

from __future__ import annotations

import pytest
import torch

from accmt import Accuracy
from accmt.errors import MetricError
from tests.raising import raises_at


@pytest.mark.parametrize(
    ("predictions", "references", "expected"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3], 1.0),
        ([0, 1, 2], [0, 0, 0], 1 / 3),
        ([0], [1], 0.0),
        ([[0, 1], [1, 1]], [[0, 0], [1, 1]], 0.75),
        ([True, False], [True, True], 0.5),
    ],
)
@pytest.mark.parametrize("kind", [torch.tensor, list])
def test_accuracy_is_the_share_of_equal_entries(predictions, references, expected, kind):
    assert Accuracy().compute(kind(predictions), kind(references)) == {"accuracy": expected}


def test_accuracy_of_many_samples_is_counted_in_double_precision():
    references = torch.zeros(2**24 + 3, dtype=torch.int8)
    predictions = references.clone()
    predictions[0] = 1
    assert Accuracy().compute(predictions, references)["accuracy"] == (2**24 + 2) / (2**24 + 3)


def test_logits_count_by_their_largest():
    logits = torch.tensor([[0.1, 0.9, 0.0], [5.0, 1.0, 2.0]])
    assert Accuracy().compute(logits, torch.tensor([1, 2])) == {"accuracy": 0.5}
    assert Accuracy().compute(logits.unsqueeze(0), torch.tensor([[1, 0]])) == {"accuracy": 1.0}


def test_references_of_minus_100_are_skipped():
    assert Accuracy().compute(torch.tensor([1, 2, 3]), torch.tensor([1, -100, 0])) == {"accuracy": 0.5}
    with raises_at(MetricError, "metric 'accuracy'"):
        Accuracy().compute(torch.tensor([1]), torch.tensor([-100]))


@pytest.mark.parametrize(("predictions", "references"), [((4, 3), (2,)), ((4,), (3,)), ((4, 3, 2), (4,))])
def test_shapes_that_do_not_fit_are_rejected(predictions, references):
    with raises_at(MetricError, "metric 'accuracy'"):
        Accuracy().compute(torch.randn(predictions), torch.zeros(references))


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_one_score_for_each_sample_is_rejected_as_its_threshold_cannot_be_known(shape):
    with raises_at(MetricError, "metric 'accuracy'"):
        Accuracy().compute(torch.full(shape, 0.7), torch.ones(3))


def test_classes_may_be_floats_that_are_whole():
    assert Accuracy().compute(torch.tensor([1.0, -1.0]), torch.tensor([1.0, 1.0])) == {"accuracy": 0.5}
