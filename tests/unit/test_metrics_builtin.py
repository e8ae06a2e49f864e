"""The built-in metrics, beside those of scikit-learn."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics

from accmt.errors import MetricError
from accmt.metrics import AUROC, F1, MAE, MSE, R2, RMSE, Perplexity, Precision, Recall, ValidationCollector
from tests.raising import raises_at

CLASSES = 4
COUNT = 23


def collect(metric, predictions, references, batch_size=4):
    collector = ValidationCollector([metric])
    for start in range(0, len(references), batch_size):
        stop = start + batch_size
        collector.add({metric.name: (predictions[start:stop], references[start:stop])}, 1)
    return collector.compute()


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(3)


OF_CLASSES = {
    F1: sklearn_metrics.f1_score,
    Precision: sklearn_metrics.precision_score,
    Recall: sklearn_metrics.recall_score,
}


@pytest.mark.parametrize("kind", OF_CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("average", ["macro", "micro", "weighted", "none", None])
@pytest.mark.parametrize("as_logits", [True, False])
def test_scores_of_classes_are_those_of_scikit_learn(kind, average, as_logits, rng):
    logits, labels = torch.randn(COUNT, CLASSES, generator=rng), torch.randint(CLASSES, (COUNT,), generator=rng)
    values = collect(
        kind(num_classes=CLASSES, average=average), logits if as_logits else logits.argmax(-1).tolist(), labels
    )
    settings = None if average == "none" else average or "macro"
    expected = OF_CLASSES[kind](labels, logits.argmax(-1), average=settings, labels=range(CLASSES), zero_division=0)
    name = kind().name
    names = [f"{name}_{index}" for index in range(CLASSES)] if settings is None else [name]
    assert values == pytest.approx(dict(zip(names, np.atleast_1d(expected), strict=True)))


@pytest.mark.parametrize("kind", OF_CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("average", [None, "binary", "macro"])
def test_of_two_classes_the_second_one_is_meant_unless_said_otherwise(kind, average, rng):
    predictions, labels = torch.randint(2, (2, COUNT), generator=rng)
    expected = OF_CLASSES[kind](labels, predictions, average=average or "binary")
    assert collect(kind(average=average), predictions, labels) == {kind().name: pytest.approx(expected)}


def test_tokens_are_classified_one_by_one_without_those_skipped(rng):
    logits, labels = torch.randn(8, 6, CLASSES, generator=rng), torch.randint(CLASSES, (8, 6), generator=rng)
    labels[:4] = -100  # a whole batch
    labels[5, 2:] = -100
    kept = labels != -100
    expected = sklearn_metrics.f1_score(labels[kept], logits.argmax(-1)[kept], average="macro")
    assert collect(F1(num_classes=CLASSES), logits, labels) == {"f1": pytest.approx(expected)}


def test_nothing_but_references_left_out_is_said_so():
    with raises_at(MetricError, "metric 'f1'"):
        collect(F1(), torch.zeros(3), torch.full((3,), -100))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e6])
@pytest.mark.parametrize("average", [None, "macro"])
def test_the_area_under_the_curve_of_logits_does_not_depend_on_the_batches(scale, average, rng):
    logits, labels = torch.randn(COUNT, CLASSES, generator=rng) * scale, torch.arange(COUNT) % CLASSES
    scores = logits.double().softmax(-1)
    expected = sklearn_metrics.roc_auc_score(labels, scores, multi_class="ovr", average="macro")
    for batch_size in (1, 4, COUNT):
        values = collect(AUROC(num_classes=CLASSES, average=average), logits, labels, batch_size)
        assert values == {"auroc": pytest.approx(expected, abs=1e-6)}


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
@pytest.mark.parametrize("form", ["scores", "logits", "probabilities"])
def test_of_two_classes_any_rising_score_will_do(scale, form, rng):
    scores, labels = torch.randn(COUNT, generator=rng) * scale, torch.arange(COUNT) % 2
    other = torch.randn(COUNT, generator=rng) * scale  # only the difference of two logits says something
    forms = {
        "scores": scores,
        "logits": torch.stack([other, other + scores], -1),
        "probabilities": scores.double().div(scale).sigmoid(),
    }
    expected = sklearn_metrics.roc_auc_score(labels, scores)
    for batch_size in (1, 4, COUNT):
        assert collect(AUROC(), forms[form], labels, batch_size) == {"auroc": pytest.approx(expected, abs=1e-6)}


def test_scores_without_bounds_keep_their_order():
    scores = torch.tensor([-torch.inf, -1e6, 0.0, 1e6, torch.inf])
    assert collect(AUROC(), scores, torch.tensor([0, 0, 1, 1, -100])) == {"auroc": 1.0}


OF_NUMBERS = {
    MSE: sklearn_metrics.mean_squared_error,
    RMSE: sklearn_metrics.root_mean_squared_error,
    MAE: sklearn_metrics.mean_absolute_error,
    R2: sklearn_metrics.r2_score,
}


@pytest.mark.parametrize("kind", OF_NUMBERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("shape", [(COUNT,), (COUNT, 3)])
def test_errors_are_those_of_scikit_learn(kind, shape, rng):
    predictions, references = torch.randn(2, *shape, generator=rng)
    expected = OF_NUMBERS[kind](references.double().numpy().ravel(), predictions.double().numpy().ravel())
    assert collect(kind(), predictions, references) == {kind().name: pytest.approx(expected, rel=1e-9)}


def test_perplexity_is_the_exponential_of_the_cross_entropy(rng):
    logits, tokens = torch.randn(8, 5, 11, generator=rng) * 9, torch.randint(11, (8, 5), generator=rng)
    tokens[:4] = -100
    tokens[6, :3] = -100
    loss = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), tokens.flatten())
    assert collect(Perplexity(), logits, tokens) == {"perplexity": pytest.approx(float(loss.exp()), rel=1e-9)}


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda: F1(num_classes=1), "num_classes=1"),
        (lambda: F1(average="best"), "average='best'"),
        (lambda: F1(num_classes=3, average="binary"), "average='binary' and num_classes=3"),
        (lambda: AUROC(num_classes=3, average="micro"), "average='micro' and num_classes=3"),
    ],
)
def test_arguments_that_cannot_be_are_rejected(make, got):
    with raises_at(MetricError, "metric '", got):
        make()


@pytest.mark.parametrize(
    ("metric", "predictions", "references", "got", "do"),
    [
        (F1(), torch.rand(4, 3), torch.ones(4), "num_classes=2", "num_classes=3"),
        (F1(), torch.rand(4), torch.ones(4), "(4,)", "(logits > 0).long()"),
        (F1(num_classes=3), torch.tensor([3]), torch.tensor([1]), "classes from 1 to 3", "num_classes=4"),
        (F1(num_classes=3), torch.tensor([0]), torch.tensor([-1]), "classes from -1 to 0", "-100"),
        (AUROC(), torch.rand(2), torch.tensor([0, 2]), "classes from 0 to 2", "num_classes=3"),
        (AUROC(num_classes=3), torch.rand(4, 2), torch.ones(4), "num_classes=3", "num_classes=2"),
        (AUROC(num_classes=3), torch.rand(4), torch.ones(4), "(4,)", "return the logits"),
        (MSE(), torch.rand(4, 1), torch.ones(4), "predictions (4, 1), references (4,)", "squeeze"),
        (Perplexity(), torch.rand(4), torch.ones(4), "(4,)", "return the logits"),
        (MSE(), ["a"], ["b"], "['a'] (list)", "'mse'"),
    ],
)
def test_predictions_that_do_not_fit_are_rejected(metric, predictions, references, got, do):
    with raises_at(MetricError, f"metric '{metric.name}'", got, do=do):
        collect(metric, predictions, references)


WITHOUT = """
import sys
sys.modules["torchmetrics"] = None
from accmt.errors import MissingPackageError
from accmt.metrics import F1, Accuracy, ValidationCollector, build_metrics
collector = ValidationCollector(build_metrics("accuracy"))
collector.add({"accuracy": ([1, 0], [1, 1])}, 2)
print(collector.compute())
try:
    build_metrics(["f1"])
except MissingPackageError as error:
    print(error)
"""


def test_without_torchmetrics_accuracy_works_and_the_others_name_the_package():
    run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.startswith("{'accuracy': 0.5}\nmetric 'f1'\n")
    assert "got: torchmetrics is not installed" in run.stdout
