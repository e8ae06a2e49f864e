import math

import numpy as np

from accmt.options.checks import as_float, number_in, read_numbers, whole
from tests.tables import each


@each(
    ("text", "number"),
    [
        ("1e-3", 0.001),
        ("1E-3", 0.001),
        ("1.5e+2", 150.0),
        (".001", 0.001),
        ("-.5", -0.5),
        ("5.", 5.0),
        (" 0.1 ", 0.1),
        ("1_000", 1000),
        ("1_000.5", 1000.5),
        ("100", 100),
        ("-3", -3),
        ("010", 10),
        ("1e5", 1e5),
    ],
)
def test_text_is_the_number_that_a_person_means(text, number):
    assert number_in(text) == number
    assert type(number_in(text)) is type(number)


@each("text", ["", "true", "none", "nan", "inf", "infinity", "1e", "1__0", "_1", "1-2", "0x10", "e5", "1.2.3"])
def test_other_text_is_no_number(text):
    assert number_in(text) is None


def test_numbers_are_read_at_any_depth_into_a_copy():
    given = {"a": ["0.9", {"b": ("1e-3", "true", None, True)}], "c": "none"}
    assert read_numbers(given) == {"a": [0.9, {"b": (0.001, "true", None, True)}], "c": "none"}
    assert given == {"a": ["0.9", {"b": ("1e-3", "true", None, True)}], "c": "none"}


def test_a_numpy_float_becomes_a_plain_one():
    assert type(read_numbers([np.float64(0.1)])[0]) is float


def test_only_floats_without_a_fraction_become_whole():
    assert type(whole(1e5)) is int
    assert whole(0.5) == 0.5
    assert whole(True) is True
    assert whole(math.inf) == math.inf


def test_an_integer_that_is_too_large_for_a_float_is_infinite():
    assert [as_float(value) for value in (3, 10**400, -(10**400), True)] == [3.0, math.inf, -math.inf, 1.0]
