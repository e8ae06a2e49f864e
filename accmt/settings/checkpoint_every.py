"""How often a checkpoint is written, in the words of `checkpoint_every`: "epoch", "2 epochs", "50 steps", "3 evals"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, NoReturn, get_args

from accmt.settings.checks import meant, raise_wrong_value

Unit = Literal["epoch", "step", "eval"]

_SPELLINGS: dict[str, Unit] = {
    **dict.fromkeys(("epoch", "epochs", "ep", "eps"), "epoch"),
    **dict.fromkeys(("step", "steps", "st", "sts"), "step"),
    **dict.fromkeys(("eval", "evals", "evaluation", "evaluations"), "eval"),
}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]*)\s*([a-z]+)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Every:
    """A distance between two checkpoints.

    Attributes:
        number: How many units, from 1.
        unit: "epoch" is a pass over the training data, "step" an update, "eval" an evaluation.
    """

    number: int
    unit: Unit


def parse_checkpoint_every(text: str) -> Every:
    """Read a number and a unit in any case and spacing; without a number it is 1.

    Args:
        text: Such as "epoch", "2 epochs", "1eval", "50 STEPS" or "30ep".

    Raises:
        ArgumentError: `text` is no text of that form, the number is 0, or the unit is unknown; the message lists them.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text) if isinstance(text, str) else None
    number, word = match.groups() if match else ("", "")
    unit = _SPELLINGS.get(word.lower())
    if unit is None or (number and int(number) == 0):
        _refuse(text, number, word.lower())
    return Every(int(number or 1), unit)


def _refuse(text: object, number: str, word: str) -> NoReturn:
    units = "; ".join(
        ", ".join(spelling for spelling, of in _SPELLINGS.items() if of == unit) for unit in get_args(Unit)
    )
    steps = meant(text, lambda count: type(count) is int and count >= 1, None)
    nearest = get_close_matches(word, _SPELLINGS, n=1) or ["epoch"]
    suggestion = f"{int(number or 0) or 1} {nearest[0]}" if steps is None else f"{steps} steps"
    expected = f"text: a number from 1 and a unit ({units})"
    raise_wrong_value("checkpoint_every", text, expected, f'checkpoint_every="{suggestion}"')
