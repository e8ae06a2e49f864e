"""Samples classes more evenly than they are in the data."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch

from accmt.data.samplers import TensorSampler
from accmt.errors import ArgumentError, DataError, fail


class TemperatureSampler(TensorSampler):
    """Draws each class c with probability proportional to (n_c / N) ** (1 / temperature), and its samples uniformly.

    Temperature 1 keeps the class frequencies of the data; a high temperature makes them equal. Samples are drawn with
    replacement; with `Trainer(sampler=TemperatureSampler(labels, 3.0))`, the draw depends on (seed, epoch).

    Source: Arivazhagan et al. 2019, "Massively Multilingual Neural Machine Translation in the Wild", section 4.

    Args:
        labels: The class of each sample, in the order of the dataset: a list, tensor, array or column; numbers or
            strings.
        temperature: A number above 0; below 1, frequent classes become more frequent. `math.inf` draws all equally.
        num_samples: Samples per epoch; None means as many as there are labels.

    Raises:
        ArgumentError: The temperature or the number is invalid.
        DataError: There are no labels, or a sample has several.
    """

    def __init__(self, labels: Iterable[Any], temperature: float = 1.0, num_samples: int | None = None) -> None:
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not temperature > 0:
            raise self._wrong(
                "temperature", temperature, "a number above 0", "temperature=1.0 to keep the class frequencies"
            )
        if num_samples is not None and (type(num_samples) is not int or num_samples < 1):
            raise self._wrong(
                "num_samples",
                num_samples,
                "a whole number of at least 1",
                "omit num_samples to draw as many as there are labels",
            )
        # Tensors are never equal as dict keys.
        items = labels.tolist() if hasattr(labels, "tolist") else labels
        values = [label.item() if getattr(label, "ndim", None) == 0 else label for label in items]
        wrong = next((value for value in values if isinstance(value, tuple) or not isinstance(value, Hashable)), None)
        if wrong is not None:  # tuples are samples: equal ones would become separate classes
            got, do = f"a label of type {type(wrong).__name__}", "convert each label to one number or string"
            raise fail(DataError, "TemperatureSampler(labels=...)", got=got, expected="one class per sample", do=do)
        if not values:
            do = "check the data's column and filters"
            raise fail(
                DataError, "TemperatureSampler(labels=...)", got="no labels", expected="one label per sample", do=do
            )
        numbers: dict[Any, int] = {}  # of classes, in order of first occurrence
        classes = torch.tensor([numbers.setdefault(value, len(numbers)) for value in values])
        self.num_labels = len(classes)
        self._num_samples = num_samples or self.num_labels
        self._counts = classes.bincount()
        self._starts = self._counts.cumsum(0) - self._counts
        self._by_class = classes.argsort(stable=True)
        # As a softmax: powers of small probabilities would underflow at a low temperature.
        self.probabilities = (self._counts.double().log() / temperature).softmax(0)

    def __len__(self) -> int:
        return self._num_samples

    def draw(self) -> torch.Tensor:
        """Draw the indices of an epoch `[num_samples]` from torch's generator."""
        drawn = torch.multinomial(self.probabilities, self._num_samples, replacement=True)
        places = torch.rand(self._num_samples, dtype=torch.float64) * self._counts[drawn]
        return self._by_class[self._starts[drawn] + places.long()]

    def check_length(self, length: int) -> None:
        """Check that there are `length` labels."""
        if length != self.num_labels:
            got, expected = f"{self.num_labels} labels", f"{length} labels, one per sample"
            do = 'pass the labels of the training data: TemperatureSampler(train["label"], ...)'
            raise fail(DataError, "TemperatureSampler", got=got, expected=expected, do=do)

    def _wrong(self, name: str, value: Any, expected: str, do: str) -> ArgumentError:
        return fail(ArgumentError, f"TemperatureSampler({name}=...)", got=f"{value!r}", expected=expected, do=do)
