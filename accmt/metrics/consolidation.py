"""Combines several results of an evaluation into one, such as the mean accuracy of some of the validation sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accmt.errors import MetricError, explain, nearest
from accmt.metrics.metric import IsBetter
from accmt.metrics.results import describe, find_scalar
from accmt.processes import run_on_main_process

Choice = Callable[[str], bool] | Sequence[str]
"""Which results are combined: a function of a result's name, or their names."""

Further = Callable[[dict[str, list[float]]], dict[str, float]]

_WHERE = 'Trainer(metric_options={"means": ...})'


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
        where = 'Trainer(metric_options={"further": ...})'
        raise MetricError(explain(where, f"{describe(made)} returned", "a dict of numbers by name", do))
    return numbers


def _require_new(new: Mapping[str, float], results: Mapping[str, float]) -> None:
    twice = sorted(new.keys() & results.keys())
    if twice:
        got = f"the name {twice[0]!r}, which another result already has"
        raise MetricError(explain(_WHERE, got, "each name once", "choose another name"))
