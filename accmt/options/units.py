"""Numbers with a unit, as people write them: "2 epochs" and "500 steps", "1h30m", "5GB"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, Literal, NoReturn

from accmt.options.checks import raise_wrong_value, require_int

Unit = Literal["epoch", "step", "eval"]

_SPELLINGS: dict[str, Unit] = {
    **dict.fromkeys(("epoch", "epochs", "ep", "eps"), "epoch"),
    **dict.fromkeys(("step", "steps", "st", "sts"), "step"),
    **dict.fromkeys(("eval", "evals", "evaluation", "evaluations"), "eval"),
}
_EXAMPLES: dict[Unit, str] = {"epoch": "2 epochs", "step": "500 steps", "eval": "3 evals"}
_MEANT = {"batch": "step", "batches": "step", "update": "step", "updates": "step", "iterations": "step"}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]*\.?[0-9]*)\s*([a-z]+)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Every:
    """A distance between two times.

    Attributes:
        number: How many units: an int from 1, or a float up to 1.0 for a fraction of an epoch.
        unit: "epoch" is a pass over the training data, "step" an optimizer step, "eval" an evaluation.
    """

    number: int | float
    unit: Unit


def read_every(name: str, text: Any, units: Sequence[Unit], *, fractions: bool = False, also: str = "") -> Every:
    """Read a number and a unit in any case and spacing; without a number it is 1.

    Args:
        name: The Trainer's argument.
        text: Such as "epoch", "2 epochs", "1eval", "50 STEPS" or "30ep".
        units: Those that the argument knows.
        fractions: Whether a fraction of an epoch may stand there.
        also: What else the argument may be, for the message.

    Raises:
        ArgumentError: `text` is no text of that form, the number is 0, or the unit is unknown; the message lists them.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text) if isinstance(text, str) else None
    digits, word = match.groups() if match else ("", "")
    unit = _SPELLINGS.get(word.lower())
    number = _read_number(digits)
    is_fraction = isinstance(number, float)
    if unit not in units or unit is None or number is None or (is_fraction and not (fractions and unit == "epoch")):
        _reject(name, text, units, fractions=fractions, also=also)
    return Every(number, unit)


def _read_number(digits: str) -> int | float | None:
    """Return an int from 1, a fraction below 1, or None for any other number."""
    try:
        number = float(digits or 1)
    except ValueError:
        return None
    if number >= 1:
        return int(number) if number == int(number) else None
    return number if number > 0 else None


def _reject(name: str, text: object, units: Sequence[Unit], *, fractions: bool, also: str) -> NoReturn:
    suggestion = _suggest(text, units, fractions=fractions)
    fraction = ", or a fraction of an epoch (0.25 epochs)" if fractions else ""
    examples = " or ".join(f'"{_EXAMPLES[unit]}"' for unit in units)
    expected = f"a string of a number from 1 and a unit, such as {examples}{fraction}{also}"
    raise_wrong_value(name, text, expected, f'{name}="{suggestion}"')


def _suggest(value: object, units: Sequence[Unit], *, fractions: bool) -> str:
    """Return what was probably meant: the number that stands there, with the unit whose name is nearest."""
    text = str(value).lower().replace(",", "").replace("_", "")
    found = re.search(r"\d+(\.\d+)?(e\d+)?", text)
    number = _read_number(str(float(found[0]))) if found else None
    words = [_MEANT.get(word, word) for word in re.findall(r"[a-z]+", text)]
    named = [_SPELLINGS[near] for word in words for near in get_close_matches(word, _SPELLINGS, n=1, cutoff=0.7)]
    is_fraction = isinstance(number, float) and fractions
    default: Unit = "epoch" if is_fraction or "step" not in units or not found else "step"
    unit = next((unit for unit in named if unit in units), default if default in units else units[0])
    if number is None or (isinstance(number, float) and not (is_fraction and unit == "epoch")):
        number = 1
    return f"{number} {unit}" + ("s" if number != 1 else "")


_WRITTEN = (
    re.compile(r"(\d+):(\d\d?):(\d\d?):(\d\d?)"),
    re.compile(r"(?:(\d+)d)? ?(?:(\d+)h)? ?(?:(\d+)m)? ?(?:(\d+)s)?"),
)


def read_max_time(value: Any) -> float | None:
    """Return the seconds of `Trainer(max_time=...)`; None is no limit.

    Args:
        value: "DD:HH:MM:SS" or "1h30m", a timedelta, a dict of its arguments, or None.

    Raises:
        ArgumentError: Something else, or no time at all.
    """
    if value is None:
        return None
    seconds = _read(value)
    if seconds is None or seconds <= 0:
        expected = '"DD:HH:MM:SS" or "1h30m", a timedelta, or a dict of its arguments, above 0'
        raise_wrong_value("max_time", value, expected, 'max_time="1h"')
    return seconds


def _read(value: Any) -> float | None:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        try:
            return timedelta(**value).total_seconds()
        except TypeError:
            return None
    forms = [form.fullmatch(value) for form in _WRITTEN] if isinstance(value, str) else []
    written = next((form for form in forms if form), None)
    if written is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in written.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])B\s*", re.IGNORECASE)


def read_size(name: str, value: int | str) -> int:
    """Return a size in bytes.

    Args:
        name: The Trainer's argument.
        value: Bytes from 1, or text such as "5GB": a number with KB, MB, GB or TB, each 1,000 of the one before.

    Raises:
        ArgumentError: It is something else.
    """
    if not isinstance(value, str):
        require_int(name, value, at_least=1)
        return value
    found = _SIZE.fullmatch(value)
    if found is None:
        raise_wrong_value(name, value, "bytes, or a number with KB, MB, GB or TB", f'{name}="5GB"')
    return int(float(found[1]) * 1000 ** ("KMGT".index(found[2].upper()) + 1))
