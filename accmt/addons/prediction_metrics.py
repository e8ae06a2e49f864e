"""Metrics of predictions by name, which torchmetrics computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from accmt.addons.torch_metrics import TorchMetric, load_torch_metric
from accmt.metrics.accuracy import IGNORED, align_classes, describe_shapes, has_scores, to_tensor
from accmt.metrics.results import metric_error, require_pair

_AVERAGES = ("binary", "macro", "micro", "weighted", "none")

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def read_classes(name: str, predictions: Any, references: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return flat predicted and true classes for references that are not `IGNORED`; see `align_classes`."""
    predicted, expected = align_classes(name, predictions, references)
    is_kept = expected != IGNORED
    return predicted[is_kept], expected[is_kept]


def read_scores(name: str, predictions: Any, references: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores `[samples, classes]` and classes `[samples]` for references that are not `IGNORED`."""
    predictions, references = to_tensor(name, predictions), to_tensor(name, references)
    if not has_scores(predictions, references):
        expected, do = "logits [..., classes] and class indices [...]", "return the logits as predictions"
        raise metric_error(name, describe_shapes(predictions, references), expected, do)
    is_kept = references != IGNORED
    return predictions[is_kept.to(predictions.device)], references[is_kept]


class _OfPairs(TorchMetric):
    """A metric that converts predictions and references first."""

    def prepare(self, entry: Any) -> Inputs | None:
        predictions, references = self.read_pair(*require_pair(self.name, entry))
        return ((predictions, references), {}) if references.numel() else None

    def read_pair(self, predictions: Any, references: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs for torchmetrics."""
        raise NotImplementedError


class _OfClasses(_OfPairs):
    _default_name: str
    _torch_name: str

    def __init__(self, name: str | None = None, *, num_classes: int = 2, average: str | None = None) -> None:
        name = name or self._default_name
        average = _choose_average(name, num_classes, average)
        self._num_classes = num_classes
        super().__init__(_load_of_classes(name, self._torch_name, num_classes, average), name)

    def read_pair(self, predictions: Any, references: Any) -> tuple[torch.Tensor, torch.Tensor]:
        predictions, references = to_tensor(self.name, predictions), to_tensor(self.name, references)
        if has_scores(predictions, references):
            _require_scores(self.name, predictions, self._num_classes)
        predicted, expected = read_classes(self.name, predictions, references)
        _require_classes(self.name, self._num_classes, predicted, expected)
        return predicted.long(), expected.long()


class F1(_OfClasses):
    """F1 score: the harmonic mean of precision and recall.

    Shapes:
        predictions: Class indices `[samples, ...]`, or logits `[samples, ..., classes]`, of which the largest counts.
        references: Class indices `[samples, ...]`; those of -100 are ignored.

    Args:
        name: The key under which `validation_step` returns predictions and references.
        num_classes: The number of classes.
        average: "binary" (the score of class 1), "macro", "micro", "weighted", or "none" for one value per class, named
            `<name>_<class>`; None means "binary" for two classes and "macro" for more.

    Raises:
        MetricError: The average is unknown, or there are fewer than two classes.
        MissingPackageError: torchmetrics is not installed.
    """

    _default_name = "f1"
    _torch_name = "F1Score"


class Precision(_OfClasses):
    """Precision: the fraction of predictions of a class that are correct. Shapes and arguments as for `F1`."""

    _default_name = "precision"
    _torch_name = "Precision"


class Recall(_OfClasses):
    """Recall: the fraction of a class's samples that are predicted. Shapes and arguments as for `F1`."""

    _default_name = "recall"
    _torch_name = "Recall"


class AUROC(_OfPairs):
    """Area under the receiver operating characteristic curve, computed exactly: keeps all scores on the CPU.

    Shapes:
        predictions: For two classes, any score that increases with class 1 `[samples, ...]`, or two logits
            `[samples, ..., 2]`; for more classes, logits (or log-probabilities) `[samples, ..., classes]`.
        references: Class indices `[samples, ...]`; those of -100 are ignored.

    Args:
        name: The key under which `validation_step` returns predictions and references.
        num_classes: The number of classes.
        average: As for `F1`, without "micro"; "binary" means two classes.

    Raises:
        MetricError: The average is unknown, or there are fewer than two classes.
        MissingPackageError: torchmetrics is not installed.
    """

    def __init__(self, name: str = "auroc", *, num_classes: int = 2, average: str | None = None) -> None:
        average = _choose_average(name, num_classes, average, without="micro")
        self._num_classes = num_classes
        self._is_binary = average == "binary"
        super().__init__(_load_of_classes(name, "AUROC", num_classes, average), name)

    def read_pair(self, predictions: Any, references: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # torchmetrics treats scores as logits if any score of a batch is outside 0 to 1, so the result would depend on
        # how samples are batched. Scores are therefore mapped to that range first, which keeps their order.
        scores, classes = to_tensor(self.name, predictions), to_tensor(self.name, references)
        if self._is_binary and scores.shape == classes.shape:
            is_kept = classes != IGNORED
            scores, classes = _to_double(scores[is_kept]), classes[is_kept]
        else:
            scores, classes = read_scores(self.name, scores, classes)
            _require_scores(self.name, scores, self._num_classes)
            scores = _to_double(scores)
            scores = scores[:, 1] - scores[:, 0] if self._is_binary else scores.softmax(-1)
        _require_classes(self.name, self._num_classes, classes)
        if self._is_binary:
            scores = scores.atan() / math.pi + 0.5  # from 0 to 1, in the same order
        return scores, classes.long()


class _Regression(_OfPairs):
    _default_name: str
    _path: str
    _arguments: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, name: str | None = None) -> None:
        name = name or self._default_name
        super().__init__(load_torch_metric(name, self._path, **self._arguments), name)

    def read_pair(self, predictions: Any, references: Any) -> tuple[torch.Tensor, torch.Tensor]:
        predictions, references = to_tensor(self.name, predictions), to_tensor(self.name, references)
        if predictions.shape != references.shape:
            got = describe_shapes(predictions, references)
            do = "reshape one of them, for example with predictions.squeeze(-1)"
            raise metric_error(self.name, got, "equal shapes", do)
        return predictions.reshape(-1), references.reshape(-1)


class MSE(_Regression):
    """Mean squared error over all elements of predictions and references of equal shape."""

    _default_name = "mse"
    _path = "regression.MeanSquaredError"


class RMSE(_Regression):
    """Square root of the mean squared error over all elements of predictions and references of equal shape."""

    _default_name = "rmse"
    _path = "regression.MeanSquaredError"
    _arguments = MappingProxyType({"squared": False})


class MAE(_Regression):
    """Mean absolute error over all elements of predictions and references of equal shape."""

    _default_name = "mae"
    _path = "regression.MeanAbsoluteError"


class R2(_Regression):
    """Coefficient of determination over all elements of predictions and references of equal shape."""

    _default_name = "r2"
    _path = "regression.R2Score"


class Perplexity(_OfPairs):
    """The exponential of the mean negative log-likelihood of the correct tokens.

    Shapes:
        predictions: Logits `[batch, time, vocab]`.
        references: Tokens `[batch, time]`; those of -100 are ignored. For a causal model, the step shifts both:
            `logits[:, :-1]` and `labels[:, 1:]`.

    Args:
        name: The key under which `validation_step` returns predictions and references.

    Raises:
        MissingPackageError: torchmetrics is not installed.
    """

    def __init__(self, name: str = "perplexity") -> None:
        super().__init__(load_torch_metric(name, "text.Perplexity"), name)

    def read_pair(self, predictions: Any, references: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, tokens = read_scores(self.name, predictions, references)
        return logits.unsqueeze(0), tokens.unsqueeze(0)  # [1, tokens, vocab] and [1, tokens]


def _require_scores(name: str, scores: torch.Tensor, num_classes: int) -> None:
    """Check that there is one score per class."""
    if scores.shape[-1] != num_classes:
        got = f"predictions {tuple(scores.shape)}, whose last dimension is classes, and num_classes={num_classes}"
        do = f"num_classes={scores.shape[-1]}"
        raise metric_error(name, got, "one score per class", do)


def _require_classes(name: str, num_classes: int, *classes: torch.Tensor) -> None:
    """Check the range of classes; torchmetrics does not always do this."""
    every = torch.cat([part.flatten() for part in classes])
    if not every.numel():
        return
    lowest, highest = (int(value) for value in torch.stack(every.aminmax()).tolist())
    if lowest < 0 or highest >= num_classes:
        do = f"num_classes={highest + 1}" if lowest >= 0 else f"use {IGNORED} for references to ignore"
        expected = f"classes from 0 to {num_classes - 1} (num_classes={num_classes})"
        raise metric_error(name, f"classes from {lowest} to {highest}", expected, do)


def _choose_average(name: str, num_classes: int, average: str | None, *, without: str = "") -> str:
    if num_classes < 2:
        raise metric_error(name, f"num_classes={num_classes}", "2 or more", "num_classes=2")
    choices = [choice for choice in _AVERAGES if choice != without and (num_classes == 2 or choice != "binary")]
    average = average or choices[0]
    if average not in choices:
        got = f"average={average!r} and num_classes={num_classes}"
        raise metric_error(name, got, f"one of {choices}", f"average={choices[0]!r}")
    return average


def _load_of_classes(name: str, kind: str, num_classes: int, average: str) -> Any:
    if average == "binary":
        return load_torch_metric(name, f"classification.Binary{kind}", validate_args=False)
    arguments = {"num_classes": num_classes, "average": average, "validate_args": False}
    return load_torch_metric(name, f"classification.Multiclass{kind}", **arguments)


def _to_double(scores: torch.Tensor) -> torch.Tensor:
    return scores if scores.device.type == "mps" else scores.double()
