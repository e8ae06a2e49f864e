import pytest

from accmt.errors import ArgumentError
from accmt.settings.how_often import Every, read_every

UNITS = ("epoch", "step", "eval")


@pytest.mark.feature("A12")
@pytest.mark.parametrize(
    ("text", "number", "unit"),
    [
        ("2 epochs", 2, "epoch"),
        ("eval", 1, "eval"),
        ("1eval", 1, "eval"),
        ("3 evaluations", 3, "eval"),
        ("50 steps", 50, "step"),
        ("30ep", 30, "epoch"),
        ("  7   STEPS ", 7, "step"),
        ("Epoch", 1, "epoch"),
        ("2Eps", 2, "epoch"),
        ("st", 1, "step"),
        ("4sts", 4, "step"),
        ("evals", 1, "eval"),
        ("evaluation", 1, "eval"),
        ("007 step", 7, "step"),
        ("0.25 epochs", 0.25, "epoch"),
        (".5ep", 0.5, "epoch"),
        ("2.0 epochs", 2, "epoch"),
    ],
)
def test_a_number_and_a_unit_in_any_case_and_spacing_are_read(text, number, unit):
    assert read_every("checkpoint_every", text, UNITS, fractions=True) == Every(number, unit)


@pytest.mark.parametrize(
    ("wrong", "do"),
    [
        ("2 foos", "2 epoch"),
        ("0.5 steps", "1 steps"),
        ("0 epochs", "1 epochs"),
        ("000steps", "1 steps"),
        ("3 epoch s", "1 epoch"),
        ("5 stesp", "5 step"),
        ("10", "10 steps"),
        ("", "1 epoch"),
        ("-2 epochs", "1 epoch"),
        ("2.5 epochs", "1 epochs"),
        ("²steps", "1 epoch"),
        (5, "5 steps"),
        (500.0, "500 steps"),
        (0, "1 epoch"),
        (True, "1 epoch"),
        (None, "1 epoch"),
    ],
)
def test_what_cannot_be_read_is_refused_with_all_units_and_a_line_to_write(wrong, do):
    with pytest.raises(ArgumentError, match=rf'(?s)checkpoint_every.*checkpoint_every="({do})"') as raised:
        read_every("checkpoint_every", wrong, UNITS, fractions=True)
    units = "epoch, epochs, ep, eps; step, steps, st, sts; eval, evals, evaluation, evaluations"
    assert f"a number from 1 and a unit ({units})" in str(raised.value)
