import json
import math

import pytest

from accmt.files import dumps, loads, read_json_lines


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_strict_json_and_come_back(value):
    text = dumps({"best": [value, {"deep": (value,)}]})
    json.loads(text, parse_constant=refuse_constant)
    first, deep = loads(text)["best"]
    assert (first, deep["deep"][0]) == pytest.approx((value, value), nan_ok=True)


def test_ordinary_values_come_back_equal():
    value = {"text": "Straße\n\u2028", "numbers": [1, 2.5, -0.0, 10**30], "none": None, "yes": True, "empty": {}}
    assert loads(dumps(value)) == value


@pytest.mark.parametrize("torn", [b'{"step": 2, "te', '{"note": "ä'.encode()[:-1], b"\x00\x00"])
def test_line_cut_short_by_a_crash_is_skipped(tmp_path, torn):
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn)
    assert list(read_json_lines(path)) == [{"step": 1}]


@pytest.mark.parametrize("line", ['{"step"', "\xff", "\0" * 4096, "1" * 5000, "[" * 100_000])
def test_a_damaged_line_before_the_last_is_none_and_keeps_its_place(tmp_path, line):
    path = tmp_path / "history.jsonl"
    path.write_bytes(f'{line}\n{{"step": 2}}\n'.encode("latin-1"))
    assert list(read_json_lines(path)) == [None, {"step": 2}]
