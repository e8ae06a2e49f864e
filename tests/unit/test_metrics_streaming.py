"""Metrics of sums: exact, in the memory of one batch."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from accmt.errors import MetricError
from accmt.metrics import Accuracy, StreamingMetric, ValidationCollector
from accmt.metrics.averages import COMPACT_AT
from tests.raising import raises_at


class Distance(StreamingMetric):
    def count(self, predictions, references):
        return [(predictions - references).abs().sum(), len(references)]

    def finish(self, sums):
        return {self.name: sums[0] / sums[1], "num_samples": sums[1]}


def collect(metric, *entries):
    collector = ValidationCollector([metric])
    for entry in entries:
        collector.add({metric.name: entry}, 1)
    return collector.compute()


def test_sums_over_batches_give_the_value_of_the_whole():
    batches = [(torch.rand(size), torch.rand(size)) for size in (4, 4, 1)]
    whole = Distance("mae").compute(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    assert collect(Distance("mae"), *batches) == pytest.approx(whole)
    assert whole["num_samples"] == 9


def test_sums_are_added_in_double_precision():
    batches = [(torch.tensor([2.0**24]), torch.zeros(1)), *[(torch.ones(1), torch.zeros(1))] * 3]
    assert collect(Distance("mae"), *batches)["mae"] == (2**24 + 3) / 4


@pytest.mark.parametrize("make", [Accuracy, lambda: Distance("accuracy")], ids=["accuracy", "own"])
def test_no_batch_is_kept(make):
    collector = ValidationCollector([make()])
    seen = []
    for _ in range(3):
        predictions = torch.ones(4)
        seen.append(weakref.ref(predictions))
        collector.add({"accuracy": (predictions, torch.ones(4))}, 4)
    del predictions
    gc.collect()
    assert [reference() for reference in seen] == [None] * 3
    assert collector.compute()["accuracy"] in (0.0, 1.0)


def test_counting_does_not_wait_for_the_device():
    class Shapes(Distance):
        def count(self, predictions, references):
            return torch.stack([predictions.sum(), references.sum()])

    sums = Shapes("mae").accumulate()
    for position in range(2 * COMPACT_AT):  # a meta tensor has no value that could be read
        sums.add((torch.empty(2, device="meta"), torch.empty(2, device="meta")), position)
    assert [(counts.device.type, tuple(counts.shape)) for counts in sums._stacks] == [("meta", (COMPACT_AT, 2))] * 2


def test_counts_of_another_length_are_rejected():
    class Uneven(Distance):
        def count(self, predictions, references):
            return predictions

    with raises_at(MetricError, "metric 'own'"):
        collect(Uneven("own"), (torch.ones(2), None), (torch.ones(3), None))
