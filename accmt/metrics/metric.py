"""The class that users derive their metrics from."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from accmt.errors import MetricError, explain
from accmt.metrics.gathering import CHUNK_BYTES, GatheredPairs, Position

IsBetter = Callable[[float, float], bool]

_COMPARATORS: dict[str, IsBetter] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


class Accumulation(Protocol):
    """What a metric has accumulated of one validation set, on this process."""

    def add(self, entry: Any, position: Position) -> None:
        """Take in what `validation_step` returned for one batch.

        Args:
            entry: What it returned under the metric's name, such as `(predictions, references)`.
            position: The batch's index in the order of the data; of equal ones, the lower rank comes first. Where
                samples were regrouped, for each the index of its batch and its place in that.
        """

    def compute(self, chunk_bytes: int | None = CHUNK_BYTES) -> dict[str, float]:
        """Return the values over all samples of all processes.

        Processes: collective; every process gets the same values.

        Args:
            chunk_bytes: How much of each process is sent at a time, where anything has to be gathered; None is all.
        """


class Metric(ABC):
    """A quantity computed from the predictions and references of a whole validation set, each sample once.

    The module's `validation_step` returns `{"<name>": (predictions, references)}`, and `compute` sees all of them.
    All predictions are kept until then; `StreamingMetric` needs the memory of one batch.

    Args:
        name: The key under which `validation_step` returns predictions and references.
        greater_is_better: The direction; None means True, unless `comparator` says otherwise.
        comparator: The direction as one of ">", ">=", "<", "<=": a new value is better if `new <comparator> best`.
        main_metric: The entry of `compute`'s result that models are selected by; None is `name`.

    Attributes:
        padding: What fills up tensors whose samples have different shapes in different batches, such as the logits of
            tokens, at the end of each dimension; None makes them a list of samples.

    Raises:
        MetricError: Both directions are given and contradict each other, or the comparator is unknown.
    """

    padding: float | None = -100  # as transformers' Trainer has it

    def __init__(
        self,
        name: str,
        greater_is_better: bool | None = None,  # noqa: FBT001 - the documented signature is positional
        comparator: str | None = None,
        main_metric: str | None = None,
    ) -> None:
        if comparator is not None and comparator not in _COMPARATORS:
            expected, do = "one of " + ", ".join(_COMPARATORS), 'comparator=">"'
            raise MetricError(explain(f"Metric({name!r}, comparator=...)", repr(comparator), expected, do))
        greater = comparator is None or comparator.startswith(">")
        if greater_is_better is not None and comparator is not None and greater_is_better != greater:
            got = f"greater_is_better={greater_is_better} and comparator={comparator!r}"
            raise MetricError(explain(f"Metric({name!r})", got, "one direction", "drop one of the two"))
        self.name = name
        self.greater_is_better = greater if greater_is_better is None else greater_is_better
        self.comparator = comparator or (">" if self.greater_is_better else "<")
        self.main_metric = main_metric or name

    @abstractmethod
    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Compute the metric over a whole validation set.

        Processes: called on the main process only.

        Args:
            predictions: What `validation_step` returned first, all samples together in the order of the data: tensors
                `[samples, ...]` on the CPU (of arrays too), a list where it returned lists, a dict of these where it
                returned dicts.
            references: What it returned second, likewise.

        Returns:
            Values by name; the entry `main_metric` must be among them.
        """

    def is_better(self, new: float, best: float) -> bool:
        """Return whether `new` beats `best` in this metric's direction; NaN never does."""
        return _COMPARATORS[self.comparator](new, best)

    @property
    def directions(self) -> Mapping[str, IsBetter]:
        """For each entry of the result that models can be selected by, whether a new value beats an old one."""
        return {self.main_metric: self.is_better}

    @property
    def worst(self) -> float:
        """The value that every other one beats."""
        return -math.inf if self.greater_is_better else math.inf

    def accumulate(self) -> Accumulation:
        """Return an empty accumulation, which takes in a validation set batch by batch."""
        return GatheredPairs(self)


class ReportedValue(Metric):
    """A value that a validation step, `log` or a hook reports; it is compared only, not computed.

    `metrics={"perplexity": "min"}` makes one.
    """

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Raise: the value is computed elsewhere."""
        raise NotImplementedError(f"{self.name} is reported, not computed")
