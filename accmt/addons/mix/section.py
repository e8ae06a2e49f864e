"""The `data` section of the hyper-parameters: the shares in which data sets are mixed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from accmt.errors import describe_value
from accmt.options.checks import KeyFault
from accmt.options.yaml_reader import suggest

STOPS = ("first", "last", "repeat")
UNITS = ("samples", "tokens")
_NAMES = ("mix", "stop", "unit")
_REST = "rest"
_EXAMPLE = "mix: {news: 0.5, code: {weight: 0.3, epochs: 2}, chat: rest}"
_WEIGHT = "a number of at least 0, `rest`, or a mapping from steps to numbers that starts at step 0"
_MARKS = ("__", "@", "/")

Weights = dict[str, Fraction]


@dataclass(frozen=True)
class MixSection:
    """How data sets are mixed.

    Attributes:
        stages: The steps at which weights change, the first of them 0, each with the weight of every source.
        epochs: The number of passes after which a source is exhausted; only of those that have such a limit.
        stop: What ends an epoch: the first source that was read completely, the last one, or only the end of the run.
        unit: What the weights are shares of.
    """

    stages: tuple[tuple[int, Weights], ...]
    epochs: Mapping[str, int]
    stop: str
    unit: str

    @property
    def names(self) -> list[str]:
        """The names of the sources."""
        return list(self.stages[0][1])


def read_data_section(value: Any) -> tuple[MixSection | None, list[KeyFault]]:
    """Return the section and its errors."""
    if not isinstance(value, Mapping) or not isinstance(value.get("mix"), Mapping) or not value["mix"]:
        got = describe_value(value["mix"]) if isinstance(value, Mapping) and "mix" in value else describe_value(value)
        return None, [
            KeyFault(("data",), got, "a mapping with `mix`: each source with its weight", f"write `{_EXAMPLE}`")
        ]
    faults = [
        KeyFault(("data", str(name)), f"{name} = {describe_value(entry)}", f"one of {', '.join(_NAMES)}",
              suggest(str(name), _NAMES, f"remove `{name}`"))
        for name, entry in value.items()
        if name not in _NAMES
    ]  # fmt: skip
    for name, choices in (("stop", STOPS), ("unit", UNITS)):
        if value.get(name, choices[0]) not in choices:
            do = suggest(str(value[name]), choices, f"write `{name}: {choices[0]}`")
            faults.append(KeyFault(("data", name), describe_value(value[name]), f"one of {', '.join(choices)}", do))
    weights: dict[str, Any] = {}
    epochs: dict[str, int] = {}
    for name, entry in value["mix"].items():
        faults += _read_source(name, entry, weights, epochs)
    if not faults:
        faults += _faults_of_sums(weights)
    if faults:
        return None, faults
    stages = tuple((step, _weights_at(step, weights)) for step in _steps(weights))
    stop = value.get("stop", "repeat" if len(stages) > 1 else "first")
    if len(stages) > 1 and stop != "repeat":
        expected = "`repeat`, because weights change at steps: the whole run is one epoch"
        return None, [
            KeyFault(("data", "stop"), describe_value(stop), expected, "write `stop: repeat`, and set max_steps")
        ]
    return MixSection(stages, epochs, stop, value.get("unit", "samples")), []


def _read_source(name: Any, entry: Any, weights: dict[str, Any], epochs: dict[str, int]) -> Iterator[KeyFault]:
    """Read one source into `weights` and `epochs`, and yield its errors."""
    place = ("data", "mix", str(name))
    if not isinstance(name, str) or not name or any(mark in name for mark in _MARKS):
        expected = "a name without '__', '@' and '/', which separate it from the names of values"
        yield KeyFault(place, describe_value(name), expected, "rename it")
        return
    is_source = isinstance(entry, Mapping) and any(isinstance(key, str) and not key.isdigit() for key in entry)
    values = entry if is_source else {"weight": entry}
    for key in values:
        if key not in ("weight", "epochs"):
            do = suggest(str(key), ("weight", "epochs"), f"remove `{key}`")
            yield KeyFault((*place, str(key)), describe_value(values[key]), "`weight`, and `epochs` if needed", do)
    if "epochs" in values:
        if type(values["epochs"]) is int and values["epochs"] >= 1:
            epochs[name] = values["epochs"]
        else:
            expected = "the largest number of passes, a whole number from 1"
            yield KeyFault((*place, "epochs"), describe_value(values["epochs"]), expected, "write `epochs: 2`")
    # `rest`, or fractions by the step from which they apply; None if it is invalid.
    weight = values.get("weight")
    if isinstance(weight, Mapping):
        steps = {int(step): _read_number(fraction) for step, fraction in weight.items() if str(step).isdigit()}
        is_valid = len(steps) == len(weight) and 0 in steps and None not in steps.values()
        weight = dict(sorted(steps.items())) if is_valid else None
    elif weight != _REST:
        fraction = _read_number(weight)
        weight = None if fraction is None else {0: fraction}
    if weight is None:
        got = describe_value(values["weight"]) if "weight" in values else "no `weight`"
        yield KeyFault(place, got, _WEIGHT, "write for example `0.5`, or `{0: 0.5, 1000: 0.2}`")
    else:
        weights[name] = weight


def _read_number(value: Any) -> Fraction | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    return Fraction(str(value)) if is_number else None  # of the digits that were written, not of the binary number


def _faults_of_sums(weights: Mapping[str, Any]) -> Iterator[KeyFault]:
    place, rests = ("data", "mix"), [name for name, weight in weights.items() if weight == _REST]
    if len(rests) > 1:
        yield KeyFault(
            place, f"`rest` for {' and '.join(rests)}", "`rest` for one source", "write a number for the others"
        )
        return
    for step in _steps(weights):
        when = f" from step {step}" if step else ""
        at = _weights_at(step, weights)
        if rests and at[rests[0]] <= 0:
            others = float(1 - at[rests[0]])
            name, weight = max(((name, at[name]) for name in weights if name != rests[0]), key=lambda one: one[1])
            do = "reduce them; or write a number in place of `rest`: weights are relative to their sum"
            if weight > 1:
                do = f"write `{name}: {float(weight) / 100:g}` for {float(weight):g} %, or a number in place of `rest`"
            yield KeyFault(place, f"weights that sum to {others:g}{when}, and `rest`", "a sum below 1", do)
        elif not any(at.values()):
            do = f"write a number above 0 for {' or '.join(f'`{name}`' for name in weights)}"
            yield KeyFault(place, f"weights that sum to 0{when}", "at least one weight above 0", do)


def _steps(weights: Mapping[str, Any]) -> list[int]:
    return sorted({0}.union(*(weight for weight in weights.values() if weight != _REST)))


def _weights_at(step: int, weights: Mapping[str, Any]) -> Weights:
    found = {
        name: Fraction(0) if weight == _REST else weight[max(begin for begin in weight if begin <= step)]
        for name, weight in weights.items()
    }
    left = Fraction(1) - sum(found.values())
    return {name: left if weights[name] == _REST else weight for name, weight in found.items()}
