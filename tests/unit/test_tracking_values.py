import math
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch

from accmt.errors import MetricError
from accmt.tracking.values import CleanNames, flatten, to_floats, to_plain
from tests.raising import raises_at


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        2,
        2.0,
        np.float32(2),
        np.float64(2),
        np.int64(2),
        np.array([2.0]),
        torch.tensor(2),
        torch.tensor([2.0]),
        torch.tensor(2.0, dtype=torch.bfloat16),
        torch.tensor(2.0, requires_grad=True),
    ],
)
def test_every_kind_of_number_becomes_a_plain_float(value):
    (number,) = to_floats({"x": value}).values()
    assert type(number) is float
    assert number == 2.0


@pytest.mark.parametrize("value", [True, np.bool_(1), torch.tensor(True)])
def test_bools_become_one_or_zero(value):
    assert to_floats({"x": value}) == {"x": 1.0}


def test_non_finite_values_go_through():
    row = to_floats({"nan": torch.tensor(math.nan), "inf": math.inf, "minus": np.float32(-math.inf)})
    assert math.isnan(row["nan"])
    assert (row["inf"], row["minus"]) == (math.inf, -math.inf)


@pytest.mark.parametrize("value", ["1.0", [1.0], {"a": 1}, torch.ones(2), np.ones(3), object()])
def test_what_is_not_one_number_is_an_error_that_names_it(value):
    with raises_at(MetricError, "the logged value 'val_f1'"):
        to_floats({"val_f1": value})


def test_configurations_are_flattened_to_dotted_scalars():
    config = {"optim": {"type": "AdamW", "betas": (0.9, 0.999), "foreach": None}, "epochs": 3, "empty": {}, 7: True}
    assert flatten(config) == {
        "optim.type": "AdamW",
        "optim.betas": "[0.9, 0.999]",
        "optim.foreach": "None",
        "epochs": 3,
        "empty": "{}",
        "7": True,
    }


def test_objects_become_text_and_array_scalars_become_numbers():
    config = {
        "optimizer": torch.optim.AdamW,
        "function": math.sqrt,
        "path": Path("a/b"),
        "dtype": torch.bfloat16,
        "colour": Colour.RED,
        "lr": np.float32(0.5),
        "scale": torch.tensor(3),
    }
    assert to_plain(config) == {
        "optimizer": "torch.optim.adamw.AdamW",
        "function": "math.sqrt",
        "path": "a/b",
        "dtype": "torch.bfloat16",
        "colour": "Colour.RED",
        "lr": 0.5,
        "scale": 3,
    }


def test_a_list_of_dicts_becomes_json_text():
    assert flatten({"sets": [{"path": Path("x"), "weight": math.inf}]}) == {
        "sets": '[{"path": "x", "weight": "Infinity"}]'
    }


def test_names_are_renamed_the_same_way_every_time():
    names = CleanNames(lambda name: name.replace("@", "_"))
    assert names.rename({"f1@5": 1.0, "loss": 2.0}) == {"f1_5": 1.0, "loss": 2.0}
    assert names.rename({"f1@5": 3.0}) == {"f1_5": 3.0}


def test_two_names_that_clean_alike_stay_apart():
    names = CleanNames(lambda name: name.replace("@", "_").replace("(", "_"))
    renamed = names.rename({"f1@": 1.0, "f1(": 2.0, "f1_": 3.0})
    assert sorted(renamed.values()) == [1.0, 2.0, 3.0]
    assert names.rename({"f1(": 4.0}).keys() <= renamed.keys()


def test_names_of_an_earlier_process_stay_as_they_were_whatever_comes_first():
    names: dict[str, str] = {}
    first = CleanNames(lambda name: name.replace("@", "_"), names)
    first.rename({"a_b": 1, "a@b": 2})
    later = CleanNames(lambda name: name.replace("@", "_"), dict(names))
    assert later.rename({"a@b": 2, "a_b": 1}) == {names["a@b"]: 2, "a_b": 1}
    assert names["a@b"] != "a_b"


def test_a_new_name_is_never_one_that_an_earlier_process_gave_another():
    known = {"f1@5": "f1_5"}
    later = CleanNames(lambda name: name.replace("@", "_"), known)
    renamed = later.rename({"f1_5": 1, "f1@5": 2})
    assert renamed["f1_5"] == 2
    assert sorted(renamed.values()) == [1, 2]
