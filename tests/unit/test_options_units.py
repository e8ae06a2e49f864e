from datetime import timedelta

import pytest

from accmt.errors import ArgumentError
from accmt.options.units import Every, read_every
from tests.raising import raises_at

UNITS = ("epoch", "step", "eval")


@pytest.mark.parametrize(
    ("text", "number", "unit"),
    [
        ("2 epochs", 2, "epoch"),
        ("eval", 1, "eval"),
        ("3 evaluations", 3, "eval"),
        ("50 steps", 50, "step"),
        ("  7   STEPS ", 7, "step"),
        ("Epoch", 1, "epoch"),
        ("st", 1, "step"),
        ("007 step", 7, "step"),
        ("0.25 epochs", 0.25, "epoch"),
        (".5ep", 0.5, "epoch"),
        ("2.0 epochs", 2, "epoch"),
    ],
)
def test_a_number_and_a_unit_in_any_case_and_spacing_are_read(text, number, unit):
    assert read_every("checkpoint_every", text, UNITS, fractions=True) == Every(number, unit)


@pytest.mark.parametrize(
    "wrong", ["2 foos", "0.5 steps", "000steps", "3 epoch s", "", "-1 step", "2.5 epochs", "1,000 steps", 5, 0, None]
)
def test_what_cannot_be_read_is_refused_with_all_units(wrong):
    with raises_at(ArgumentError, "Trainer(checkpoint_every=...)") as raised:
        read_every("checkpoint_every", wrong, UNITS, fractions=True)
    assert 'a number from 1 and a unit, such as "2 epochs" or "500 steps" or "3 evals"' in str(raised.value)


TIMES = ("epoch", "step", "second", "auto")


@pytest.mark.parametrize(
    ("text", "seconds"), [("10 Minutes", 600), ("90 sec", 90), ("5 mins", 300), ("1HR 30MIN", 5400), ("2 hrs", 7200)]
)
def test_times_are_read_in_any_case_and_with_usual_abbreviations(text: str, seconds: int) -> None:
    assert read_every("checkpoint_every", text, TIMES) == Every(seconds, "second")


@pytest.mark.parametrize("wrong", ["1.5 hours", "0 minutes", timedelta(minutes=20), "2 auto"])
def test_other_times_are_refused_with_an_example(wrong: object) -> None:
    with raises_at(ArgumentError, "Trainer(checkpoint_every=...)"):
        read_every("checkpoint_every", wrong, TIMES)


def test_the_key_of_an_options_dict_is_written_as_one() -> None:
    with raises_at(ArgumentError, 'Trainer(checkpoint_options={"keep_every": ...})'):
        read_every("checkpoint_options.keep_every", "0.5 epochs", ("epoch", "step"), plain="step")
