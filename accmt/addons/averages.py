"""Averages of several results, such as the mean accuracy over validation sets, and results derived from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accmt.errors import MetricError, fail, nearest
from accmt.metrics.metric import IsBetter
from accmt.metrics.results import describe, find_scalar
from accmt.processes import run_on_main_process

Choice = Callable[[str], bool] | Sequence[str]
"""The results to combine: a function of a result's name, or a list of names."""

_WHERE = 'Trainer(metric_options={"averages": ...})'


class Averages:
    """Means of results, and results derived from the values of each mean.

    Args:
        choices: The results to combine, by the name of the new result.
        derive: Computes derived results from the values of each choice, by name; None derives none.
    """

    def __init__(
        self,
        choices: Mapping[str, Choice],
        derive: Callable[[dict[str, list[float]]], dict[str, float]] | None = None,
    ) -> None:
        self._choices = choices
        self._derive = derive

    def find_members(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Return the members of each average; none if a listed result is missing."""
        return {new: _choose(choice, names) for new, choice in self._choices.items()}

    def require_members(self, names: Sequence[str]) -> None:
        """Check that an evaluation has the results to average."""
        for new, members in self.find_members(names).items():
            if members:
                continue
            choice = self._choices[new]
            missing = "" if callable(choice) else next((name for name in choice if name not in names), "")
            meant = nearest(missing, names, cutoff=0)
            got = f"{missing!r} in {new!r}, which is not a result" if missing else f"{new!r}, which selects no results"
            do = f"did you mean {meant!r}?" if missing and meant else f"{{{new!r}: lambda name: True}} selects all"
            raise fail(MetricError, _WHERE, got=got, expected=f"names of results: {list(names)}", do=do)

    def compute(self, results: Mapping[str, float]) -> dict[str, float]:
        """Return the mean of each choice that is not empty, and the derived results.

        Processes: collective; `derive` is called on the main process, and every process gets its results.

        Args:
            results: The results of an evaluation.
        """
        members = self.find_members(list(results))
        values = {new: [results[name] for name in names] for new, names in members.items() if names}
        averages = {new: sum(averaged) / len(averaged) for new, averaged in values.items()}
        derive = self._derive
        if derive is not None and values:
            derived = run_on_main_process(lambda: _read_derived(derive(values)))
            _require_new(derived, averages)
            averages |= derived
        _require_new(averages, results)
        return averages

    def find_directions(self, directions: Mapping[str, IsBetter]) -> dict[str, IsBetter]:
        """Return the direction of each average, if it is known."""
        known = {}
        for new, members in self.find_members(list(directions)).items():
            rising = {name: _is_rising(directions[name]) for name in members}
            if {True, False} <= set(rising.values()):
                up, down = ([name for name in members if rising[name] is way] for way in (True, False))
                got = f"{new!r} over {up}, where higher is better, and {down}, where lower is better"
                expected = "results that all improve in the same direction"
                raise fail(MetricError, _WHERE, got=got, expected=expected, do="average them separately")
            if members and None not in rising.values():
                known[new] = directions[members[0]]
        return known


def _choose(choice: Choice, names: Sequence[str]) -> list[str]:
    if callable(choice):
        return [name for name in names if choice(name)]
    return list(choice) if set(choice) <= set(names) else []


def _is_rising(is_better: IsBetter) -> bool | None:
    try:
        return is_better(1.0, 0.0)
    except MetricError:  # its direction is unknown
        return None


def _read_derived(made: Any) -> dict[str, float]:
    scalars = {name: find_scalar(value) for name, value in made.items()} if isinstance(made, Mapping) else {"": None}
    numbers = {str(name): float(scalar) for name, scalar in scalars.items() if scalar is not None}
    if len(numbers) != len(scalars):
        do = 'for example, return {"lowest_accuracy": min(values["mean_accuracy"])}'
        where = 'Trainer(metric_options={"derived": ...})'
        raise fail(MetricError, where, got=f"the result {describe(made)}", expected="a dict of numbers by name", do=do)
    return numbers


def _require_new(new: Mapping[str, float], results: Mapping[str, float]) -> None:
    twice = sorted(new.keys() & results.keys())
    if twice:
        got = f"the name {twice[0]!r}, which another result already has"
        raise fail(MetricError, _WHERE, got=got, expected="unique names", do="choose another name")
