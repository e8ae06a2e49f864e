"""Accuracy: its values, and what is said about logits."""

from __future__ import annotations

import pytest
import torch

from accmt import Accuracy
from accmt.errors import MetricError


@pytest.mark.feature("D23")
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


@pytest.mark.feature("D23")
def test_accuracy_of_many_samples_is_counted_in_double_precision():
    references = torch.zeros(2**24 + 3, dtype=torch.int8)
    predictions = references.clone()
    predictions[0] = 1
    assert Accuracy().compute(predictions, references)["accuracy"] == (2**24 + 2) / (2**24 + 3)


@pytest.mark.feature("D23")
def test_logits_instead_of_class_indices_are_refused():
    with pytest.raises(MetricError, match=r"predictions \(4, 3\), references \(4,\)\n.*\n  do: .*argmax\(-1\)"):
        Accuracy().compute(torch.randn(4, 3), torch.zeros(4))


def test_accuracy_may_have_another_name():
    metric = Accuracy("top1")
    assert metric.compute(torch.ones(1), torch.ones(1)) == {"top1": 1.0}
    assert (metric.name, metric.main_metric, metric.greater_is_better) == ("top1", "top1", True)
