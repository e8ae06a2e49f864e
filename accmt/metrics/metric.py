"""Base classes for custom metrics."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch

from accmt.errors import MetricError, fail, nearest
from accmt.messages import say_once
from accmt.metrics.averages import COMPACT_AT, NUM_PARTS, exact_parts, exact_sum
from accmt.metrics.gathering import (
    CHUNK_BYTES,
    Position,
    gather_on_main_process,
    order_parts,
    put_in_order,
    to_cpu,
)
from accmt.metrics.results import metric_error, read_result, read_scalars, require_pair
from accmt.processes import each_once, num_data_processes, run_on_every_process, run_on_main_process
from accmt.registry import addon

IsBetter = Callable[[float, float], bool]

Pair = tuple[Position, Any, Any]
"""The position of a batch, its predictions and its references."""

_COMPARATORS: dict[str, IsBetter] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


class Accumulation(Protocol):
    """The data that a metric has accumulated for one validation set on this process."""

    def add(self, entry: Any, position: Position) -> None:
        """Add the output of `validation_step` for one batch.

        Args:
            entry: The value returned under the metric's name, such as `(predictions, references)`.
            position: The batch's index in the order of the data; for equal indices, the lower rank comes first. If
                samples were regrouped, for each sample the index of its batch and its position there.
        """

    def compute(self, chunk_bytes: int | None = CHUNK_BYTES) -> dict[str, float]:
        """Return the values over all samples of all processes.

        Processes: collective; every process gets the same values.

        Args:
            chunk_bytes: Bytes of each process to send at a time if predictions are gathered; None sends all at once.
        """


class Metric(ABC):
    """A quantity computed from the predictions and references of a whole validation set, each sample once.

    The module's `validation_step` returns `{"<name>": (predictions, references)}`, and `compute` sees all of them.
    All predictions are kept until then; `StreamingMetric` needs the memory of one batch.

    Args:
        name: The key under which `validation_step` returns predictions and references.
        greater_is_better: The direction; None means True unless `comparator` is set.
        comparator: The direction as one of ">", ">=", "<", "<=": a new value is better if `new <comparator> best`.
        main_metric: The entry of `compute`'s result for model selection; None means `name`.
        **unknown: Not accepted; the error names what to write.

    Attributes:
        padding: The padding value, at the end of each dimension, for tensors whose samples have different shapes in
            different batches, such as the logits of tokens; None returns a list of samples instead.

    Raises:
        MetricError: The two directions contradict each other, or the comparator is unknown.
    """

    padding: float | None = -100  # as in transformers' Trainer

    def __init__(
        self,
        name: str,
        greater_is_better: bool | None = None,  # noqa: FBT001 - the documented signature is positional
        comparator: str | None = None,
        main_metric: str | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            addon("reject_metric_keywords")(type(self).__name__, name, unknown)
        if comparator is not None and comparator not in _COMPARATORS:
            expected, do = "one of " + ", ".join(_COMPARATORS), 'comparator=">"'
            raise fail(MetricError, f"Metric({name!r}, comparator=...)", got=repr(comparator), expected=expected, do=do)
        greater = comparator is None or comparator.startswith(">")
        # Whichever counted, the worst model might be saved as the best.
        if greater_is_better is not None and comparator is not None and greater_is_better != greater:
            got = f"greater_is_better={greater_is_better} and comparator={comparator!r}"
            raise fail(MetricError, f"Metric({name!r})", got=got, expected="one direction", do="remove one of the two")
        self.name = name
        if greater_is_better is None:
            greater_is_better = greater
        self.greater_is_better = greater_is_better
        self.comparator = comparator or (">" if self.greater_is_better else "<")
        self.main_metric = main_metric or name

    @abstractmethod
    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Compute the metric over a whole validation set.

        Processes: called on the main process only.

        Args:
            predictions: The first value from `validation_step`, for all samples in the order of the data: tensors
                `[samples, ...]` on the CPU (also for arrays), a list if it returned lists, or a dict of these if it
                returned dicts.
            references: The second value, likewise.

        Returns:
            Values by name; the entry `main_metric` must be among them.
        """

    def how_to_return(self) -> str:
        """Return what to write if `validation_step` returns nothing for this metric."""
        do = f'return {{"loss": loss, "{self.name}": (predictions, references)}}'
        do += f'; or pass metrics={{"{self.name}": "max"}} (or "min") if a step or a hook reports its value'
        return f"{do}; if you passed `fit` the path of a model, labels for tokens need a custom module"

    def is_better(self, new: float, best: float) -> bool:
        """Return whether `new` beats `best` in this metric's direction; NaN never does."""
        return _COMPARATORS[self.comparator](new, best)

    @property
    def directions(self) -> Mapping[str, IsBetter]:
        """For each result entry usable for model selection, a function that checks whether a new value beats an old."""
        return {self.main_metric: self.is_better}

    @property
    def worst(self) -> float:
        """The value that every other value beats."""
        if self.greater_is_better:
            return -math.inf
        return math.inf

    def accumulate(self) -> Accumulation:
        """Return an empty accumulation for one validation set."""
        return GatheredPairs(self)


class GatheredPairs:
    """Keeps predictions and references on the CPU until the metric is computed over all of them."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._pairs: list[Pair] = []

    def add(self, entry: Any, position: Position) -> None:
        predictions, references = require_pair(self._metric.name, entry)
        self._pairs.append((position, to_cpu(predictions), to_cpu(references)))

    def compute(self, chunk_bytes: int | None = CHUNK_BYTES) -> dict[str, float]:
        pairs_of_processes = gather_on_main_process(self._pairs, chunk_bytes)
        self._pairs = []
        return run_on_main_process(lambda: _compute_over(self._metric, pairs_of_processes))


def _compute_over(metric: Metric, pairs_of_processes: list[list[Pair]]) -> dict[str, float]:
    predictions, references = _join_pairs(metric, pairs_of_processes)
    return read_result(metric.name, metric.main_metric, metric.compute(predictions, references))


def _join_pairs(metric: Metric, pairs_of_processes: list[list[Pair]]) -> tuple[Any, Any]:
    """Return the joined predictions and the joined references of all processes for a metric.

    They have the order of the data; if samples were regrouped and not all have one entry each, the order of batches.
    """
    pairs, order = order_parts(pairs_of_processes)
    predictions = _join(metric, [predictions for _, predictions, _ in pairs])
    references = _join(metric, [references for _, _, references in pairs])
    # Flattened tokens, for example, cannot be put into the order of samples.
    if order is not None and not (_has_samples(predictions, len(order)) and _has_samples(references, len(order))):
        order = None  # both keep the order in which they match
    return put_in_order(predictions, order), put_in_order(references, order)


def _has_samples(joined: Any, number: int) -> bool:
    if isinstance(joined, Mapping):
        return all(_has_samples(value, number) for value in joined.values())
    return len(joined) == number


def _join(metric: Metric, parts: list[Any]) -> Any:
    if all(isinstance(part, Mapping) for part in parts):
        keys = sorted(set(map(tuple, parts)), key=str)
        # Sets are compared, because a step may return its keys in any order.
        if len(set(map(frozenset, keys))) > 1:
            got = f"dicts with the keys {keys[0]} and {keys[-1]} in different batches"
            do = "return the same keys for every batch"
            raise metric_error(metric.name, got, "the same keys in all batches", do)
        return {key: _join(metric, [part[key] for part in parts]) for key in keys[0]}
    if not all(isinstance(part, torch.Tensor) for part in parts):
        items: list[Any] = []
        for part in parts:
            if isinstance(part, list | tuple):
                items += part
            else:
                items.append(part)
        return items
    parts = list(map(torch.atleast_1d, parts))  # a step that returns the value of a single sample
    shapes = sorted({tuple(part.shape[1:]) for part in parts})
    if len(shapes) == 1:
        return torch.cat(parts)
    if metric.padding is None:  # `compute` pads itself
        return list(chain.from_iterable(parts))
    is_signed = all(part.dtype.is_signed for part in parts)
    if len(set(map(len, shapes))) > 1 or not is_signed:  # the padding is -100
        got = f"samples of shapes {shapes[0]} and {shapes[-1]} in different batches, of {parts[0].dtype}"
        expected = "samples of one shape, or of equally many dimensions and a dtype that can be padded with -100"
        do = "pad them to one length, flatten them, return lists, or set padding = None in the metric's class"
        raise metric_error(metric.name, got, expected, do)
    what = f"metric {metric.name!r} gets samples of different shapes, {shapes[0]} to {shapes[-1]}"
    say_once(f"{what}: they are padded with {metric.padding:g}; set padding = None in its class to get a list instead")
    widths = list(map(max, zip(*shapes, strict=True)))
    return torch.cat([_pad(part, widths, metric.padding) for part in parts])


def _pad(part: torch.Tensor, widths: list[int], value: float) -> torch.Tensor:
    """Pad every dimension except the first at its end."""
    padding: list[int] = []
    for width, size in zip(reversed(widths), reversed(part.shape[1:]), strict=True):  # `pad` begins with the last
        padding += [0, width - size]
    return torch.nn.functional.pad(part, padding, value=value)


class ReportedValue(Metric):
    """A value reported by a validation step, `log` or a hook; it is only compared, not computed.

    `metrics={"perplexity": "min"}` creates one.
    """

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Always raises, because the value is computed elsewhere."""
        raise NotImplementedError(f"{self.name} is reported, not computed")


# ---- Metrics computed per process or per batch, and reduced to one value


Part = tuple[float, int]
"""The value of a part, and its number of samples."""


def _mean(values: Sequence[float], samples: Sequence[int]) -> float:
    if not any(samples):
        return np.nan
    # The value of a part without samples may be NaN, and 0 * NaN is NaN.
    weighted = [value * number for value, number in zip(values, samples, strict=True) if number]
    return exact_sum(weighted) / sum(samples)


_REDUCTIONS: dict[str, Callable[[Sequence[float], Sequence[int]], float]] = {
    "mean": _mean,
    "sum": lambda values, _: exact_sum(values),
    "max": lambda values, _: float(np.max(values)),  # numpy's: NaN if a value is, wherever it is
    "min": lambda values, _: float(np.min(values)),
}


class MetricParallel(Metric):
    """A metric that each process computes over its own samples; the values are then reduced to one.

    No predictions are sent, and the processes share the work. The result equals that of the whole set only if the
    metric is a mean (sum, maximum, minimum) over samples. This is not the case for F1, precision, AUROC, correlations
    and perplexity: the mean over parts differs, and depends on the number of processes. Use `Metric` for them.

    `compute` gets the samples of one process, on the CPU and in the order of the data; a process without samples does
    not call it.

    Args:
        name: As in `Metric`.
        greater_is_better: As in `Metric`.
        comparator: As in `Metric`.
        main_metric: As in `Metric`.
        reduction: How the values are reduced: "mean" (weighted by the number of samples, which is the length of the
            predictions), "sum", "max" or "min".

    Raises:
        MetricError: The reduction is unknown, or as for `Metric`.
    """

    def __init__(
        self,
        name: str,
        greater_is_better: bool | None = None,  # noqa: FBT001 - the documented signature is positional
        comparator: str | None = None,
        main_metric: str | None = None,
        *,
        reduction: str = "mean",
        **unknown: Any,
    ) -> None:
        super().__init__(name, greater_is_better, comparator, main_metric, **unknown)
        if reduction not in _REDUCTIONS:  # at once, not after the first epoch
            where, expected = f"{type(self).__name__}({name!r}, reduction=...)", f"one of {', '.join(_REDUCTIONS)}"
            do = f"reduction={nearest(reduction, _REDUCTIONS, cutoff=0)!r}"
            raise fail(MetricError, where, got=repr(reduction), expected=expected, do=do)
        self.reduction = reduction

    def accumulate(self) -> Accumulation:
        self._warn("processes", has_parts=num_data_processes() > 1)
        return _ProcessValues(self)

    def _warn(self, parts: str, *, has_parts: bool) -> None:
        if has_parts and self.reduction == "mean":  # which is not the F1 of all samples, for example
            say_once(
                f"the metric {self.name!r} is averaged over {parts}: this is correct for means over samples, but not "
                "for metrics such as F1; derive those from Metric, which computes them over all samples"
            )


class MetricBatch(MetricParallel):
    """A metric that is computed for each batch; the values are then reduced to one.

    Only the values are kept. The result equals that of the whole set only if the metric is a mean (sum, maximum,
    minimum) over samples; see `MetricParallel`, which also documents the arguments.

    `compute` gets the output of `validation_step` unchanged, on its device.
    """

    def accumulate(self) -> Accumulation:
        self._warn("batches", has_parts=True)
        return _BatchValues(self)


class _ProcessValues(GatheredPairs):
    """Keeps the samples of this process on the CPU until its value is computed."""

    _metric: MetricParallel

    def compute(self, chunk_bytes: int | None = None) -> dict[str, float]:
        return _reduce_processes(self._metric, self._compute_here)

    def _compute_here(self) -> dict[str, Part]:
        pairs, self._pairs = self._pairs, []
        if not pairs:
            return {}
        metric = self._metric
        predictions, references = _join_pairs(metric, [pairs])
        values = read_result(metric.name, metric.main_metric, metric.compute(predictions, references))
        num_samples = _count_samples(predictions)
        return {name: (value, num_samples) for name, value in values.items()}


class _BatchValues:
    """Keeps the values of the last few batches, and reduces them from time to time."""

    def __init__(self, metric: MetricBatch) -> None:
        self._metric = metric
        self._values: list[tuple[dict[str, torch.Tensor], int]] = []
        self._reduced: dict[str, Part] = {}

    def add(self, entry: Any, position: Position) -> None:
        metric = self._metric
        predictions, references = require_pair(metric.name, entry)
        values = read_scalars(metric.name, metric.main_metric, metric.compute(predictions, references))
        copies = {name: value.clone() for name, value in values.items()}  # some are views of all scores
        self._values.append((copies, _count_samples(predictions)))
        if len(self._values) >= COMPACT_AT:
            self._compact()

    def compute(self, chunk_bytes: int | None = None) -> dict[str, float]:
        return _reduce_processes(self._metric, self._take)

    def _take(self) -> dict[str, Part]:
        self._compact()
        reduced, self._reduced = self._reduced, {}
        return reduced

    def _compact(self) -> None:
        parts = [self._reduced]
        for batch, samples in self._values:
            parts.append({name: (float(value), samples) for name, value in batch.items()})
        self._reduced = _reduce(self._metric, parts)
        self._values = []


def _reduce_processes(metric: MetricParallel, take: Callable[[], dict[str, Part]]) -> dict[str, float]:
    """Reduce the values that `take` returns on each process. Processes: collective."""
    reduced = _reduce(metric, each_once(run_on_every_process(take)))
    return {name: value for name, (value, _) in reduced.items()}


def _reduce(metric: MetricParallel, parts: Sequence[Mapping[str, Part]]) -> dict[str, Part]:
    """Reduce the values of parts; each entry over the parts that have it."""
    parts_by_name: dict[str, list[Part]] = {}
    for values in parts:
        for name, part in values.items():
            parts_by_name.setdefault(name, []).append(part)
    reduced: dict[str, Part] = {}
    for name, parts_of_name in parts_by_name.items():
        results, samples = zip(*parts_of_name, strict=True)
        reduced[name] = _REDUCTIONS[metric.reduction](results, samples), sum(samples)
    return reduced


def _count_samples(predictions: Any) -> int:
    match predictions:
        case Mapping():
            return _count_samples(next(iter(predictions.values()), ()))
        case torch.Tensor() | np.ndarray():
            return len(predictions) if predictions.ndim else 1
        case list() | tuple():
            return len(predictions)
        case _:
            return 1


# ---- Metrics computed from sums, which need the memory of one batch


class StreamingMetric(Metric):
    """A metric computed from sums over samples, so that no predictions are kept or gathered.

    Examples:
        A mean absolute error, from sums over the batches:

            class Distance(StreamingMetric):
                def count(self, predictions, references):
                    distances = (predictions - references).abs()
                    return torch.stack([distances.sum(), torch.ones_like(distances).sum()])

                def finish(self, sums):
                    return {self.name: sums[0] / sums[1]}
    """

    @abstractmethod
    def count(self, predictions: Any, references: Any) -> torch.Tensor | Sequence[float]:
        """Return the contribution of one batch.

        Args:
            predictions: The first value from `validation_step`, unchanged, on its device.
            references: The second value, likewise.

        Returns:
            Numbers to sum, equally many for every batch.
        """

    @abstractmethod
    def finish(self, sums: list[float]) -> dict[str, float]:
        """Return the metric's values from the sums over all batches of all processes.

        Processes: called on the main process only.

        Args:
            sums: The sums of the numbers from `count`, in its order.
        """

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Compute the metric over all predictions and references."""
        return self.finish(torch.as_tensor(self.count(predictions, references)).reshape(-1).tolist())

    def accumulate(self) -> Accumulation:
        return _Sums(self)


class _Sums:
    """Keeps the counts of the last few batches, and sums them from time to time, which costs more."""

    def __init__(self, metric: StreamingMetric) -> None:
        self._metric = metric
        self._counted: list[torch.Tensor] = []
        self._stacks: list[torch.Tensor] = []  # [batches, sums]

    def add(self, entry: Any, position: Position) -> None:
        predictions, references = require_pair(self._metric.name, entry)
        counted = torch.as_tensor(self._metric.count(predictions, references))
        if self._counted and counted.shape != self._counted[0].shape:  # other numbers would be added up
            got = f"count returned {counted.numel()} numbers, but {self._counted[0].numel()} for an earlier batch"
            raise metric_error(self._metric.name, got, "equally many for every batch", "return a tensor of one shape")
        self._counted.append(counted.detach())  # a graph would keep the whole batch
        if len(self._counted) >= COMPACT_AT:
            self._add_up()

    def _add_up(self) -> None:
        """Stack the waiting counts. Only whole numbers are summed here: the bits of other sums depend on the order."""
        device = self._counted[0].device
        if device.type == "mps":  # which has no double precision
            device = torch.device("cpu")
        counts = torch.stack([counted.to(device, torch.float64) for counted in self._counted]).flatten(1)
        if not self._counted[0].is_floating_point():  # whole numbers, of which each sum is exact
            counts, self._stacks = torch.cat([*self._stacks, counts]).sum(0, keepdim=True), []
        self._stacks.append(counts)
        self._counted = []

    def compute(self, chunk_bytes: int | None = None) -> dict[str, float]:
        addends_of_processes = each_once(run_on_every_process(self._take))
        return run_on_main_process(lambda: self._finish(addends_of_processes))

    def _take(self) -> list[list[float]]:
        if self._counted:
            self._add_up()
        if not self._stacks:
            return []
        addends: list[list[float]] = torch.cat(self._stacks).T.tolist()
        self._stacks = []
        if addends and len(addends[0]) > NUM_PARTS:
            addends = list(map(exact_parts, addends))
        return addends

    def _finish(self, addends_of_processes: list[list[list[float]]]) -> dict[str, float]:
        columns = zip(*filter(None, addends_of_processes), strict=True)  # a process without a batch has none
        totals = [exact_sum(chain(*column)) for column in columns]
        return read_result(self._metric.name, self._metric.main_metric, self._metric.finish(totals))
