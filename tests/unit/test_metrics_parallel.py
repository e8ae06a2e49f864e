"""Metrics of parts: what becomes of their values, what is kept, and the messages."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from accmt.errors import MetricError, ModuleContractError
from accmt.metrics import MetricBatch, MetricParallel, ValidationCollector
from accmt.metrics.averages import COMPACT_AT
from accmt.metrics.metric import _count_samples
from tests.raising import raises_at
from tests.toys import Numbers, Scripted, make_trainer


class Sizes(MetricBatch):
    """Tells of each batch its mean and how many samples it has."""

    calls = 0

    def compute(self, predictions, references):
        self.calls += 1
        return {self.name: predictions.mean(), "samples": len(predictions)}


class SizesOfProcess(MetricParallel):
    compute = Sizes.compute
    calls = 0


def collect(metric, *entries):
    collector = ValidationCollector([metric])
    for entry in entries:
        collector.add({metric.name: entry}, 1)
    return collector.compute()


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64), None


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("mean", {"own": 4.0, "samples": 2.5}),
        ("sum", {"own": 7.0, "samples": 4}),
        ("max", {"own": 5.0, "samples": 3}),
        ("min", {"own": 2.0, "samples": 1}),
    ],
)
def test_values_of_batches_are_reduced_as_declared(reduction, expected):
    mean = (5.0 * 3 + 2.0) / 4 if reduction == "mean" else expected["own"]
    metric = Sizes("own", reduction=reduction)
    assert collect(metric, numbers(4, 5, 6), numbers(2)) == {**expected, "own": mean}
    assert metric.calls == 2


def test_a_process_computes_once_over_all_its_samples_in_order():
    class InOrder(MetricParallel):
        def compute(self, predictions, references):
            assert not predictions.requires_grad
            return {self.name: float(predictions @ references)}

    batches = [(torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([1.0, 1.0])), (torch.ones(1), torch.ones(1))]
    assert collect(InOrder("own"), *batches) == {"own": 4.0}
    metric = SizesOfProcess("own")
    assert collect(metric, numbers(4, 5, 6), numbers(1)) == {"own": 4.0, "samples": 4}
    assert metric.calls == 1


def test_values_are_weighed_exactly_over_many_batches():
    count = 2 * COMPACT_AT + 3
    batches = [numbers(*[float(index)] * (index % 5 + 1)) for index in range(count)]
    total = sum(index * (index % 5 + 1) for index in range(count))
    expected = total / sum(index % 5 + 1 for index in range(count))
    assert collect(Sizes("own"), *batches)["own"] == pytest.approx(expected, rel=1e-14)


def test_entries_that_only_some_batches_have_are_reduced_over_these():
    class Classes(MetricBatch):
        def compute(self, predictions, references):
            return {self.name: 1.0, **{f"class_{int(value)}": 2.0 * value for value in predictions}}

    assert collect(Classes("own"), numbers(0, 1), numbers(1)) == {"own": 1.0, "class_0": 0.0, "class_1": 2.0}


def test_a_batch_without_samples_does_not_count():
    assert collect(Sizes("own"), numbers(), numbers(3.0))["own"] == 3.0
    assert math.isnan(collect(Sizes("own"), numbers())["own"])


@pytest.mark.parametrize(
    ("predictions", "count"),
    [
        (torch.zeros(3, 2), 3),
        (np.zeros((4, 1)), 4),
        (["a", "b"], 2),
        ({"start": torch.zeros(5), "end": torch.zeros(5)}, 5),
        (torch.tensor(1.0), 1),
        ("a text", 1),
        ({}, 0),
    ],
    ids=["tensor", "array", "list", "dict", "a number", "text", "nothing"],
)
def test_samples_are_counted_in_every_kind_of_predictions(predictions, count):
    assert _count_samples(predictions) == count


@pytest.mark.parametrize("kind", [Sizes, SizesOfProcess])
def test_what_is_wrong_is_said(kind):
    with raises_at(MetricError, "('own', reduction=...)", "'avrage'"):
        kind("own", reduction="avrage")
    with raises_at(ModuleContractError, "validation_step"):
        collect(kind("own"), torch.zeros(3))
    with raises_at(MetricError, "metric 'own'"):
        collect(kind("own", main_metric="other"), numbers(1))


class MetricBatchOfErrors(MetricBatch):
    def compute(self, predictions, references):
        return {self.name: (predictions - references).abs().mean()}


def test_models_are_saved_by_them():
    class Judged(Scripted):
        def validation_step(self, batch):
            return {"loss": batch.mean(), "error": (batch, 0 * batch), "own": (batch, batch)}

    metrics = [MetricBatchOfErrors("error", greater_is_better=False), SizesOfProcess("own")]
    trainer = make_trainer(metrics=metrics, model_saving=["best_error", "best_own"])
    trainer.fit(Judged(), Numbers(4), Numbers([1, 2, 6]))  # in batches of 2 and 1
    assert trainer.state.metrics == {"val_loss": 3.0, "error": 3.0, "own": 3.0, "samples": 3.0}
    assert trainer.state.best == {"best_error": 3.0, "best_own": 3.0}
