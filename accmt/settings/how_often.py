"""How often something happens, in the one grammar of all arguments: "epoch", "2 epochs", "0.25 epochs", "500 steps"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, NoReturn

from accmt.settings.checks import meant, raise_wrong_value

Unit = Literal["epoch", "step", "eval"]

_SPELLINGS: dict[str, Unit] = {
    **dict.fromkeys(("epoch", "epochs", "ep", "eps"), "epoch"),
    **dict.fromkeys(("step", "steps", "st", "sts"), "step"),
    **dict.fromkeys(("eval", "evals", "evaluation", "evaluations"), "eval"),
}
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
        _reject(name, text, (digits, word.lower()), units, fractions=fractions, also=also)
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


def _reject(
    name: str, text: object, parts: tuple[str, str], units: Sequence[Unit], *, fractions: bool, also: str
) -> NoReturn:
    known = [spelling for spelling, unit in _SPELLINGS.items() if unit in units]
    listed = "; ".join(", ".join(s for s in known if _SPELLINGS[s] == unit) for unit in units)
    count = meant(text, lambda number: type(number) is int and number >= 1, None)
    nearest = get_close_matches(parts[1], known, n=1) or [units[0]]
    number = _read_number(parts[0])
    suggestion = f"{number if isinstance(number, int) else 1} {nearest[0]}"
    if count is not None:
        suggestion = f"{count} {'step' if 'step' in units else units[0]}s"
    fraction = ", or a fraction of an epoch (0.25 epochs)" if fractions else ""
    expected = f"text: a number from 1 and a unit ({listed}){fraction}{also}"
    raise_wrong_value(name, text, expected, f'{name}="{suggestion}"')
