"""Numbers with a unit: "2 epochs", "500 steps", "1h30m", "5GB"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from accmt.errors import ArgumentError, describe_value, fail, nearest
from accmt.options.checks import raise_wrong_value, read_numbers, whole, write_argument, write_place

Unit = Literal["epoch", "step", "eval", "second", "auto"]

_SPELLINGS: dict[str, Unit] = {
    **dict.fromkeys(("epoch", "epochs", "ep", "eps"), "epoch"),
    **dict.fromkeys(("step", "steps", "st", "sts"), "step"),
    **dict.fromkeys(("eval", "evals", "evaluation", "evaluations"), "eval"),
    "auto": "auto",
}
_EXAMPLES: dict[Unit, str] = {
    "epoch": "2 epochs",
    "step": "500 steps",
    "eval": "3 evals",
    "second": "10 minutes",
    "auto": "auto",
}
_MEANT = {"batch": "step", "batches": "step", "update": "step", "updates": "step", "iterations": "step"}
_WHOLE_AND_WORD = re.compile(r"(?<![\d.,])([1-9]\d*)\s*([a-z]+)")
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]*\.?[0-9]*)\s*([a-z]+)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Every:
    """An interval.

    Attributes:
        number: Number of units: an int from 1, or a float up to 1.0 for a fraction of an epoch.
        unit: "epoch" is a pass over the training data, "step" an optimizer step, "eval" an evaluation, "second" a time;
            "auto" is a time that the run measures, whose number means nothing.
    """

    number: int | float
    unit: Unit


def read_every(
    name: str,
    value: Any,
    units: Sequence[Unit],
    *,
    plain: Unit | None = None,
    fractions: bool = False,
    also: str = "",
) -> Every:
    """Read an interval: a number and a unit in any case and spacing; without a number it is 1.

    Args:
        name: The Trainer's argument.
        value: Such as "epoch", "2 epochs", "1eval", "50 STEPS" or "30ep"; or a number, if `plain` or `fractions`.
        units: The units that the argument accepts.
        plain: The unit of a whole number without one; None rejects such a number.
        fractions: Whether a float is accepted as a fraction of an epoch.
        also: Other valid values, for the message.

    Raises:
        ArgumentError: Something else, a number of 0, or an unknown unit; the message lists the valid forms.
    """
    # True is an int too, but an interval of True is a mistake.
    if plain is not None and type(value) is int and value >= 1:
        return Every(value, plain)
    # 1.0 is an epoch, while 1 is a step: other trainers make the same difference.
    if fractions and isinstance(value, float) and 0 < value <= 1:
        return Every(value, "epoch")
    text = value if isinstance(value, str) else ""
    seconds = _read(text) if "second" in units else None
    if seconds:
        return Every(seconds, "second")
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is not None:
        digits, word = match.groups()
        unit, number = _SPELLINGS.get(word.lower()), _read_number(digits)
        is_whole = isinstance(number, int) or (fractions and unit == "epoch")
        # "2 auto" would say nothing: the run measures this interval.
        is_counted = unit == "auto" and digits != ""
        # "0 steps" would be due always, or never.
        if unit in units and unit is not None and number and is_whole and not is_counted:
            return Every(number, unit)
    forms = []
    if plain:
        forms.append(f"a whole number of {plain}s from 1")
    if fractions:
        forms.append("a float fraction of an epoch up to 1.0")
    examples = " or ".join(f'"{_EXAMPLES[unit]}"' for unit in units)
    forms.append(f"a number from 1 and a unit, such as {examples}")
    do = write_argument(name, _suggest(value, units, plain))
    raise fail(ArgumentError, write_place(name), got=describe_value(value), expected=", or ".join(forms) + also, do=do)


def _read_number(digits: str) -> int | float | None:
    """Return an int from 1, a float between 0 and 1, or None for any other number."""
    try:
        number = float(digits or 1)
    except ValueError:
        return None
    if number < 1:
        return number if number > 0 else None
    # "2.5 epochs" would end between two steps.
    return int(number) if number == int(number) else None


def _suggest(value: object, units: Sequence[Unit], plain: Unit | None) -> str:
    """Return the number in a value with the closest unit, or an example of an interval."""
    number = whole(read_numbers(value))
    # 1 is left out: it is what True and 1.0 are taken for.
    if plain is not None and isinstance(number, int) and number > 1:
        return str(number)
    match = _WHOLE_AND_WORD.search(str(value).lower())
    if match is not None:
        word = nearest(match[2], [*_SPELLINGS, *_MEANT], cutoff=0.7) or ""
        unit = _SPELLINGS.get(_MEANT.get(word, word))
        if unit in units and unit != "auto":
            return f'"{match[1]} {unit}{"s" if match[1] != "1" else ""}"'
    return f'"{_EXAMPLES[units[0]]}"'


_WRITTEN = (
    re.compile(r"(\d+):(\d\d?):(\d\d?):(\d\d?)"),
    re.compile(
        r"(?:(\d+) ?(?:d|days?))? ?(?:(\d+) ?(?:h|hrs?|hours?))? ?"
        r"(?:(\d+) ?(?:m|mins?|minutes?))? ?(?:(\d+) ?(?:s|secs?|seconds?))?",
        re.IGNORECASE,
    ),
)


def read_max_time(value: Any) -> float | None:
    """Return the seconds of `Trainer(max_time=...)`; None is no limit.

    Args:
        value: "DD:HH:MM:SS", "1h30m" or "10 minutes", a timedelta, a dict of its arguments, or None.

    Raises:
        ArgumentError: Something else, or not above 0.
    """
    if value is None:
        return None
    seconds = _read(value)
    # A run of no time would end before its first step, without an error.
    if seconds is None or seconds <= 0:
        expected = '"DD:HH:MM:SS", "1h30m" or "10 minutes", a timedelta, or a dict of its arguments, above 0'
        raise_wrong_value("max_time", value, expected, 'max_time="1h"')
    return seconds


def _read(value: Any) -> float | None:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        try:
            return timedelta(**value).total_seconds()
        # A key that timedelta does not have, such as "hour".
        except TypeError:
            return None
    if not isinstance(value, str):
        return None
    written = _WRITTEN[0].fullmatch(value) or _WRITTEN[1].fullmatch(value)
    if written is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in written.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])B\s*", re.IGNORECASE)


def read_size(name: str, value: int | str) -> int:
    """Return a size in bytes.

    Args:
        name: The Trainer's argument.
        value: Bytes from 1, or a string such as "5GB": a number with KB, MB, GB or TB, in powers of 1,000.

    Raises:
        ArgumentError: It is something else.
    """
    if type(value) is int and value >= 1:
        return value
    size = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if size is None:
        expected = "a whole number of at least 1, in bytes, or a number with KB, MB, GB or TB"
        raise_wrong_value(name, value, expected, write_argument(name, '"5GB"'))
    return int(float(size[1]) * 1000 ** ("KMGT".index(size[2].upper()) + 1))
