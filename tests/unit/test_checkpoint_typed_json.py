"""Typed JSON: every value comes back with its type and its bits, everything else is refused by name."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict, defaultdict, deque, namedtuple
from enum import Enum
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from accmt.checkpoint.state_dicts import TensorReference, WrappedTensor, decode, encode
from accmt.errors import CheckpointCorruptError, CheckpointError
from tests.raising import raises_at
from tests.tables import each

VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**53,
    2**53 + 1,
    -(2**64),
    3**20_000,
    0.1,
    -0.0,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    "",
    "é\u2028\ud800\x00",
    "$tuple",
    [],
    (),
    {},
    (1,),
    [(), [None], {"a": ()}],
    {"a": {"b": {"c": (1, 2.5, "x")}}},
    {0: "a", -7: "b", "0": "c"},
    {"$tuple": [1]},
    {"$float": "inf", "plain": 1},
    {"a": {"$dict": {3: (4,)}}},
    TensorReference("model.weight"),
    [torch.Size([2, 3]), torch.bfloat16],
    WrappedTensor("torchao:Int8", {"codes": TensorReference("a")}, [True, torch.Size([2])], (2,), (1,), torch.float32),
    {"lr": 1e-3, "betas": (0.9, 0.999), "fused": None, "state": {0: {"step": 3}}},
]


def same(left: object, right: object) -> bool:
    """Return whether two values are equal, of the same types all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right) if isinstance(left, float) else left == right


@each("value", VALUES)
def test_a_value_comes_back_with_its_type(value):
    assert same(decode(encode(value)), value)


def test_random_floats_and_ints_come_back_bit_for_bit():
    rng = random.Random(0)
    floats = np.frombuffer(rng.randbytes(8 * 2000), dtype=np.float64)
    values = [float(number) for number in floats if math.isfinite(number)]
    values += [rng.getrandbits(rng.randrange(1, 300)) for _ in range(500)]
    assert same(decode(encode(values)), values)


def test_the_text_is_json_that_any_reader_takes():
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = encode({"a": math.inf, "b": math.nan, "c": 2**60, "d": (1,)})
    read = json.loads(text, parse_constant=refuse)
    assert read == {"a": {"$float": "inf"}, "b": {"$float": "nan"}, "c": {"$int": hex(2**60)}, "d": {"$tuple": [1]}}


class Stage(Enum):
    LATE = 1


@each("value", [OrderedDict(b=1, a=2), defaultdict(list, a=[1]), Stage.LATE])
def test_further_kinds_come_back(value):
    decoded = decode(encode({"a": [value]}))["a"][0]
    assert (decoded, type(decoded)) == (value, type(value))


def test_a_default_that_cannot_be_found_again_is_refused():
    with raises_at(CheckpointError, "the default of state"):
        encode(defaultdict(lambda: 0))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Path("x"), "pathlib"),
        (Fraction(1, 3), "fractions.Fraction"),
        (torch.zeros(1), "torch.Tensor"),
        (len, "builtin_function_or_method"),
        (type("Numbers", (list,), {})(), "Numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_another_type_is_refused_with_the_path_to_it(value, kind):
    with raises_at(CheckpointError, "others.callbacks[1].best", kind, do="state_dict"):
        encode({"callbacks": [None, {"best": value}]}, "others")


Pair = namedtuple("Pair", "first second")  # noqa: PYI024 - as users write it


@each(
    "value",
    [
        {1.5: 1, True: 2, None: 3, (1, 2): 4, b"a": 5},
        {1, 2},
        frozenset({"a"}),
        deque([1, 2.5], maxlen=3),
        1j,
        b"x",
        Pair(1, [2]),
        ["a", "b"],
        [True, None],
    ],
)
def test_collections_and_other_literals_come_back(value):
    decoded = decode(encode([value]))[0]
    assert decoded == value
    assert type(decoded) is type(value)
    assert getattr(decoded, "maxlen", None) == getattr(value, "maxlen", None)


def test_a_key_of_another_type_is_refused():
    with raises_at(CheckpointError, "a key of state.a: PosixPath('x')"):
        encode({"a": {Path("x"): 1}})


def test_text_that_is_cut_off_is_a_damaged_checkpoint():
    with raises_at(CheckpointCorruptError, "a checkpoint's state", "JSON"):
        decode(encode({"a": [1, 2, 3]})[:-3])


@pytest.mark.parametrize(
    ("text", "mark"), [('{"$module": "os"}', "'$module'"), ('{"a": [{"$python": "exit()"}]}', "'$python'")]
)
def test_an_unknown_mark_is_refused_and_nothing_runs(text, mark):
    with raises_at(CheckpointError, "a checkpoint's state", mark):
        decode(text)


@each("value", [np.float64(1.5), np.float32(0.1), np.int64(7), np.bool_(True)])
def test_numbers_of_numpy_come_back(value):
    assert decode(encode([value])) == [value]
    assert type(decode(encode([value]))[0]) is type(value)
