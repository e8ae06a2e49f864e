"""Draws classes more evenly than the data have them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch

from accmt.data.samplers import TensorSampler
from accmt.errors import ArgumentError, DataError, explain


class TemperatureSampler(TensorSampler):
    """Draws each class c with a probability in proportion to (n_c / N) ** (1 / temperature), its samples evenly.

    Temperature 1 draws classes as often as the data have them, a high one draws all equally often. Samples are drawn
    with replacement, as `Trainer(sampler=TemperatureSampler(labels, 3.0))` from (seed, epoch).

    Source: Arivazhagan et al. 2019, "Massively Multilingual Neural Machine Translation in the Wild", section 4.

    Args:
        labels: The class of each sample, in the order of the dataset: a list, tensor, array or column; numbers or
            strings.
        temperature: A number above 0; below 1, frequent classes get more frequent. `math.inf` draws all equally often.
        num_samples: Samples of an epoch; None is as many as there are labels.

    Raises:
        ArgumentError: The temperature or the number is invalid.
        DataError: There are no labels, or a sample has several.
    """

    def __init__(self, labels: Iterable[Any], temperature: float = 1.0, num_samples: int | None = None) -> None:
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not temperature > 0:
            raise self._wrong(
                "temperature", temperature, "a number above 0", "temperature=1.0 for the classes as they are"
            )
        if num_samples is not None and (type(num_samples) is not int or num_samples < 1):
            raise self._wrong("num_samples", num_samples, "a whole number from 1", "leave num_samples out for all")
        classes = _count_from_zero(labels)
        self.num_labels = len(classes)
        self._num_samples = num_samples or self.num_labels
        self._counts = classes.bincount()
        self._starts = self._counts.cumsum(0) - self._counts
        self._by_class = classes.argsort(stable=True)
        # As a softmax: powers of small parts would vanish at a low temperature.
        self.probabilities = (self._counts.double().log() / temperature).softmax(0)

    def __len__(self) -> int:
        return self._num_samples

    def draw(self) -> torch.Tensor:
        """Draw the indices of an epoch `[num_samples]` from torch's generator."""
        drawn = torch.multinomial(self.probabilities, self._num_samples, replacement=True)
        places = torch.rand(self._num_samples, dtype=torch.float64) * self._counts[drawn]
        return self._by_class[self._starts[drawn] + places.long()]

    def check_length(self, length: int) -> None:
        """Check that there is one label for each of `length` samples.

        Raises:
            DataError: There are more, or fewer.
        """
        if length != self.num_labels:
            got, expected = f"{self.num_labels} labels", f"one for each of the {length} samples"
            do = 'use those of the training data: TemperatureSampler(train["label"], ...)'
            raise DataError(explain("TemperatureSampler", got, expected, do))

    def _wrong(self, name: str, value: Any, expected: str, do: str) -> ArgumentError:
        return ArgumentError(explain(f"TemperatureSampler({name}=...)", f"{value!r}", expected, do))


def check_labels(sampler: Any, dataset: Any) -> None:
    """Check that a sampler's labels, if it has any, are as many as the samples of a dataset."""
    if isinstance(sampler, TemperatureSampler):
        sampler.check_length(len(dataset))


def _count_from_zero(labels: Iterable[Any]) -> torch.Tensor:
    """Return the classes of labels as numbers from 0, in the order in which they first occur."""
    values = labels.tolist() if hasattr(labels, "tolist") else [_plain(label) for label in labels]
    numbers: dict[Any, int] = {}
    wrong = next((value for value in values if isinstance(value, tuple) or not isinstance(value, Hashable)), None)
    if wrong is not None:  # a tuple is a sample: equal ones would be classes of their own
        got, do = f"a label that is a {type(wrong).__name__}", "turn each into one number or string"
        raise DataError(explain("TemperatureSampler(labels=...)", got, "one class for each sample", do))
    classes = [numbers.setdefault(value, len(numbers)) for value in values]
    if not classes:
        do = "check the column and the filter of the data"
        raise DataError(explain("TemperatureSampler(labels=...)", "no labels", "one for each sample", do))
    return torch.tensor(classes)


def _plain(label: Any) -> Any:
    """Return a tensor or array of one number as that number: tensors are never equal as dict keys."""
    return label.item() if getattr(label, "ndim", None) == 0 else label
