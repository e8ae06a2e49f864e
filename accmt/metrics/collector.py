"""Collects the outputs of validation steps over batches and processes, and computes the metrics."""

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
        metrics: The metrics to compute; each is reset.
        logged: Receives values logged during the evaluation; None if there are none.
        added: Metrics that are computed if the step returns their inputs, and replace averages of the same name.
        chunk_bytes: Bytes of each process's predictions to send at a time; None sends all at once.
    """

    def __init__(
        self,
        metrics: Sequence[Metric],
        logged: LoggedValues | None = None,
        *,
        added: Sequence[Metric] = (),
        chunk_bytes: int | None = CHUNK_BYTES,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._added = {metric.name for metric in added}
        computed = [metric for metric in (*metrics, *added) if not isinstance(metric, ReportedValue)]
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
        """Add the output of `validation_step` for one batch.

        Args:
            outputs: Scalars by name, and the inputs of metrics by metric name: `(predictions, references)`.
            weight: The weight of scalars: samples in the batch, or the weight that the step returned.
            position: The index of the micro-batch, or the positions of its samples, to restore the order of the data;
                None means the next index.
            weights: Different weights of scalars, by name.
        """
        position = self._num_batches if position is None else position
        self._num_batches += 1
        scalars: dict[str, torch.Tensor] = {}
        for name, value in outputs.items():
            self._num_entries[name] += 1
            if name in self._accumulations:
                self._accumulations[name].add(value, position)
            elif is_pair(value):
                names = list(self._accumulations)
                meant = nearest(name, names)
                do = f"rename it to {meant!r}" if meant else f"metrics=[...] with a Metric named {name!r}"
                got = f"predictions and references under {name!r}"
                raise MetricError(explain("validation_step", got, f"the name of a metric: {names}", do))
            else:
                scalar = find_scalar(value)
                if scalar is None:
                    expected, do = "a number or a tensor of one element", "return its mean()"
                    raise ModuleContractError(explain(f"the value {name!r}", describe(value), expected, do))
                scalars[name] = scalar
        self._scalars.end_batch(weight, scalars, weights)
        self._scalars.begin_batch()

    def compute(self, on_error: Callable[[Metric, Exception], None] | None = None) -> dict[str, float]:
        """Return averages and metrics over all samples of all processes.

        Processes: collective; metrics are computed on the main process, and every process gets the values.

        Args:
            on_error: Called with a metric that cannot be computed and the error; unless it raises, the value is NaN.
        """
        self._scalars.close()
        every = gather_from_data((self._scalars.take(), set(self._num_entries)))
        returned: set[str] = set().union(*(names for _, names in every))
        missing = self._accumulations.keys() - returned
        for name in missing & self._added:
            del self._accumulations[name]
        for name in (name for name in self._accumulations if name in missing):
            got = f"no predictions; validation_step returned {sorted(returned)}"
            do = self._metrics[name].how_to_return()
            raise metric_error(name, got, f"validation_step to return an entry {name!r}", do)
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
            if twice and name not in self._added:
                got = f"the result {twice[0]!r}, which already exists"
                do = "rename the entry of validation_step or the result of the metric"
                raise metric_error(name, got, "unique names", do)
            results |= values
        return results


# ---- Averages of several results, such as the mean accuracy over validation sets


Choice = Callable[[str], bool] | Sequence[str]
"""The results to combine: a function of a result's name, or a list of names."""

Further = Callable[[dict[str, list[float]]], dict[str, float]]

_WHERE = 'Trainer(metric_options={"averages": ...})'


def find_members(choices: Mapping[str, Choice], names: Sequence[str]) -> dict[str, list[str]]:
    """Return the members of each average; none if a listed result is missing."""

    def choose(choice: Choice) -> list[str]:
        if callable(choice):
            return [name for name in names if choice(name)]
        return list(choice) if set(choice) <= set(names) else []

    return {new: choose(choice) for new, choice in choices.items()}


def require_members(choices: Mapping[str, Choice], names: Sequence[str]) -> None:
    """Check that an evaluation has the results to average."""
    for new, members in find_members(choices, names).items():
        if members:
            continue
        choice = choices[new]
        missing = "" if callable(choice) else next((name for name in choice if name not in names), "")
        meant = nearest(missing, names, cutoff=0)
        got = f"{missing!r} in {new!r}, which is not a result" if missing else f"{new!r}, which selects no results"
        do = f"did you mean {meant!r}?" if missing and meant else f"{{{new!r}: lambda name: True}} selects all"
        raise MetricError(explain(_WHERE, got, f"names of results: {list(names)}", do))


def consolidate(
    choices: Mapping[str, Choice], further: Further | None, results: Mapping[str, float]
) -> dict[str, float]:
    """Return the mean of each choice that is not empty, and the derived results.

    Processes: collective; `further` is called on the main process, and every process gets its results.

    Args:
        choices: The results to combine, by the name of the new result.
        further: Computes derived results from the values of each choice, by name.
        results: The results of an evaluation.
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
    """Return the direction of each average, if it is known."""
    found = {}
    for new, members in find_members(choices, list(directions)).items():
        rising = {name: _is_rising(directions[name]) for name in members}
        if {True, False} <= set(rising.values()):
            up, down = ([name for name in members if rising[name] is way] for way in (True, False))
            got = f"{new!r} over {up}, where higher is better, and {down}, where lower is better"
            raise MetricError(
                explain(_WHERE, got, "results that all improve in the same direction", "average them separately")
            )
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
        do = 'for example, return {"lowest_accuracy": min(values["mean_accuracy"])}'
        where = 'Trainer(metric_options={"derived": ...})'
        raise MetricError(explain(where, f"the result {describe(made)}", "a dict of numbers by name", do))
    return numbers


def _require_new(new: Mapping[str, float], results: Mapping[str, float]) -> None:
    twice = sorted(new.keys() & results.keys())
    if twice:
        got = f"the name {twice[0]!r}, which another result already has"
        raise MetricError(explain(_WHERE, got, "unique names", "choose another name"))
