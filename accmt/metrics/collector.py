"""Collects what validation steps return, over batches and processes, and computes the metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from accmt.errors import MetricError, ModuleContractError, explain, nearest
from accmt.metrics.averages import LoggedValues, Weight, combine
from accmt.metrics.gathering import CHUNK_BYTES, Position
from accmt.metrics.metric import IsBetter, Metric, ReportedValue
from accmt.metrics.results import describe, find_scalar, is_pair, metric_error
from accmt.processes import gather_from_data, run_on_main_process


class ValidationCollector:
    """The results of one validation set.

    Args:
        metrics: The metrics to compute; each starts from nothing.
        logged: Takes in what is logged while the set is evaluated; None where nothing is.
        chunk_bytes: How much of each process's predictions is sent at a time; None is all.
    """

    def __init__(
        self,
        metrics: Sequence[Metric],
        logged: LoggedValues | None = None,
        *,
        chunk_bytes: int | None = CHUNK_BYTES,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        computed = [metric for metric in metrics if not isinstance(metric, ReportedValue)]
        self._metrics = {metric.name: metric for metric in computed}
        self._accumulations = {metric.name: metric.accumulate() for metric in computed}
        self._scalars = LoggedValues() if logged is None else logged
        self._scalars.take()
        self._scalars.begin_batch()
        self._num_entries: Counter[str] = Counter()
        self._num_batches = 0

    def add(
        self,
        outputs: Mapping[str, Any],
        weight: Weight,
        position: Position | None = None,
        weights: Mapping[str, Weight] | None = None,
    ) -> None:
        """Add what `validation_step` returned for one batch.

        Args:
            outputs: Scalars by name, and under the names of metrics what these take: `(predictions, references)`.
            weight: What scalars weigh: samples in the batch, or the weight that the step returned.
            position: The index of the micro-batch, or places of its samples, by which the order of the data is
                restored; None is the next.
            weights: What scalars weigh otherwise, by name.
        """
        position = self._num_batches if position is None else position
        self._num_batches += 1
        scalars: dict[str, torch.Tensor] = {}
        for name, value in outputs.items():
            self._num_entries[name] += 1
            if name in self._accumulations:
                self._accumulations[name].add(value, position)
            elif is_pair(value):
                raise self._unknown_name(name)
            else:
                scalars[name] = _to_scalar(name, value)
        self._scalars.end_batch(weight, scalars, weights)
        self._scalars.begin_batch()

    def _unknown_name(self, name: str) -> MetricError:
        names = list(self._accumulations)
        meant = nearest(name, names)
        do = f"rename it to {meant!r}" if meant else f"metrics=[...] with a Metric named {name!r}"
        got = f"an entry {name!r} with predictions and references"
        return MetricError(explain("validation_step", got, f"a name of metrics=: {names}", do))

    def compute(self, on_error: Callable[[Metric, Exception], None] | None = None) -> dict[str, float]:
        """Return means and metrics over all samples of all processes.

        Processes: collective; metrics are computed on the main process, and every process gets the values.

        Args:
            on_error: Called with a metric that cannot be computed, and why; what it does not raise leaves NaN.
        """
        self._scalars.close()
        every = gather_from_data((self._scalars.take(), set(self._num_entries)))
        self._require_entries(set().union(*(names for _, names in every)))
        results = combine(totals for totals, _ in every)
        for name, accumulation in self._accumulations.items():
            try:
                values = accumulation.compute(self._chunk_bytes)
            except Exception as error:
                if on_error is None:
                    raise
                on_error(self._metrics[name], error)
                values = dict.fromkeys(self._metrics[name].directions, math.nan)
            twice = sorted(set(values) & set(results))
            if twice:
                got = f"the result {twice[0]!r}, which already exists"
                do = "rename the entry of validation_step, or what the metric returns"
                raise metric_error(name, got, "each name once", do)
            results |= values
        return results

    def _require_entries(self, returned: set[str]) -> None:
        for name in self._accumulations:
            if name not in returned:
                got = f"no predictions; validation_step returned {sorted(returned)}"
                do = f'return {{"loss": loss, "{name}": (predictions, references)}}'
                do += f'; metrics={{"{name}": "max"}}, or "min", where a step or a hook reports its value'
                do += "; where `fit` got a model by its path, labels of tokens need a module of your own"
                raise metric_error(name, got, f"validation_step to return an entry {name!r}", do)


def _to_scalar(name: str, value: Any) -> torch.Tensor:
    scalar = find_scalar(value)
    if scalar is None:
        expected, do = "a number or a tensor of one element", "return its mean()"
        raise ModuleContractError(explain(f"the value {name!r}", describe(value), expected, do))
    return scalar


# ---- Combines several results of an evaluation into one, such as the mean accuracy of some of the validation sets.


Choice = Callable[[str], bool] | Sequence[str]
"""Which results are combined: a function of a result's name, or their names."""

Further = Callable[[dict[str, list[float]]], dict[str, float]]

_WHERE = 'Trainer(metric_options={"averages": ...})'


def find_members(choices: Mapping[str, Choice], names: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of the results that each consolidated one is made of; nothing where a listed one is missing."""

    def choose(choice: Choice) -> list[str]:
        if callable(choice):
            return [name for name in names if choice(name)]
        return list(choice) if set(choice) <= set(names) else []

    return {new: choose(choice) for new, choice in choices.items()}


def require_members(choices: Mapping[str, Choice], names: Sequence[str]) -> None:
    """Check that an evaluation has what is to be consolidated."""
    for new, members in find_members(choices, names).items():
        if members:
            continue
        choice = choices[new]
        missing = "" if callable(choice) else next((name for name in choice if name not in names), "")
        meant = nearest(missing, names, cutoff=0)
        got = f"{new!r} of {missing!r}, which is no result" if missing else f"{new!r}, which selects no result"
        do = f"did you mean {meant!r}?" if missing and meant else f"{{{new!r}: lambda name: True}} selects all"
        raise MetricError(explain(_WHERE, got, f"results among {list(names)}", do))


def consolidate(
    choices: Mapping[str, Choice], further: Further | None, results: Mapping[str, float]
) -> dict[str, float]:
    """Return the mean of each choice that is not empty, and what a function makes of the values of all choices.

    Processes: collective; `further` is called on the main process, and every process gets its results.

    Args:
        choices: Which results are combined, by the name of the new one.
        further: Gets the values of each choice by its name, and returns further results.
        results: Those of an evaluation.
    """
    members = find_members(choices, list(results))
    values = {new: [results[name] for name in names] for new, names in members.items() if names}
    new_results = {new: sum(of_one) / len(of_one) for new, of_one in values.items()}
    if further is not None and values:
        made = run_on_main_process(lambda: _read_further(further(values)))
        _require_new(made, new_results)
        new_results |= made
    _require_new(new_results, results)
    return new_results


def directions_of(choices: Mapping[str, Choice], directions: Mapping[str, IsBetter]) -> dict[str, IsBetter]:
    """Return the direction of each consolidated result, where it is known."""
    found = {}
    for new, members in find_members(choices, list(directions)).items():
        rising = {name: _is_rising(directions[name]) for name in members}
        if {True, False} <= set(rising.values()):
            up, down = ([name for name in members if rising[name] is way] for way in (True, False))
            got = f"{new!r} of {up}, where greater is better, and of {down}, where less is"
            raise MetricError(explain(_WHERE, got, "results of one direction", "consolidate them separately"))
        if members and None not in rising.values():
            found[new] = directions[members[0]]
    return found


def _is_rising(is_better: IsBetter) -> bool | None:
    try:
        return is_better(1.0, 0.0)
    except MetricError:  # its direction is unknown
        return None


def _read_further(made: Any) -> dict[str, float]:
    scalars = {name: find_scalar(value) for name, value in made.items()} if isinstance(made, Mapping) else {"": None}
    numbers = {str(name): float(scalar) for name, scalar in scalars.items() if scalar is not None}
    if len(numbers) != len(scalars):
        do = 'return {"lowest_accuracy": min(values["mean_accuracy"])}, say'
        where = 'Trainer(metric_options={"derived": ...})'
        raise MetricError(explain(where, f"{describe(made)} returned", "a dict of numbers by name", do))
    return numbers


def _require_new(new: Mapping[str, float], results: Mapping[str, float]) -> None:
    twice = sorted(new.keys() & results.keys())
    if twice:
        got = f"the name {twice[0]!r}, which another result already has"
        raise MetricError(explain(_WHERE, got, "each name once", "choose another name"))
