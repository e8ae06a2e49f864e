"""What steps may return, and what is said about the rest."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import pytest
import torch

from accmt import AcceleratorModule
from accmt.errors import ModuleContractError
from accmt.loop.step_outputs import may_return_none, read_training_output, read_validation_output
from tests.raising import raises_at
from tests.tables import each

PARAMETER = torch.nn.Parameter(torch.tensor(2.0))


def loss():
    return PARAMETER * 1.5


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_dict_holds_the_loss_and_what_else_is_logged(kind):
    attached = loss()
    entries = {"loss": loss(), "attached": attached, "one": torch.ones(1, 1), "number": 3, "flag": True}
    entries |= {"numpy": np.float32(0.5), "logits": torch.ones(2, 3), "text": "ignored", "nothing": None}
    output = read_training_output(kind(entries))
    assert {name: value.item() for name, value in output.values.items()} == {
        "attached": 3.0,
        "one": 1.0,
        "number": 3.0,
        "flag": 1.0,
        "numpy": 0.5,
    }
    assert not any(value.requires_grad or value.ndim for value in output.values.values())
    assert attached.requires_grad, "the user's own tensor is left as it is"


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (None, None),
        (3, 3.0),
        (0, 0.0),
        (0.5, 0.5),
        (torch.tensor(7), 7.0),
        (torch.tensor([2.5]), 2.5),
        (torch.tensor(True), 1.0),
        (np.int64(4), 4.0),
        (2**40 + 1, 2.0**40 + 1),
    ],
)
def test_a_weight_is_one_number(weight, expected):
    for read in (read_training_output({"loss": loss(), "weight": weight}).weight, read_weight_of_validation(weight)):
        assert read == expected
        assert read is None or type(read) is float


def read_weight_of_validation(weight):
    return read_validation_output({"loss": loss(), "weight": weight}, "val_loss")[1]


def test_a_weight_on_a_device_is_not_waited_for():
    weight = read_training_output({"loss": loss(), "weight": torch.ones(1, dtype=torch.int64, device="meta")}).weight
    assert weight.device.type == "meta"
    assert (weight.shape, weight.dtype) == ((), torch.float32)


@pytest.mark.parametrize(
    "weight", [-1, math.nan, math.inf, torch.tensor(-2.0), torch.ones(2), [1], "3", (1, 2)], ids=str
)
def test_a_wrong_weight_is_refused(weight):
    with raises_at(ModuleContractError, "training_step"):
        read_training_output({"loss": loss(), "weight": weight})
    with raises_at(ModuleContractError, "validation_step"):
        read_weight_of_validation(weight)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ({"loss": 1.0, "accuracy": ([1], [0])}, {"val_loss": 1.0, "accuracy": ([1], [0])}),
        ({"loss": 1.0, "weight": 3.0}, {"val_loss": 1.0}),
        ({"accuracy": ([1], [0])}, {"accuracy": ([1], [0])}),
        ({}, {}),
    ],
)
def test_a_validation_step_may_return_a_dict_with_or_without_a_loss(output, expected):
    before = dict(output)
    assert read_validation_output(output, "val_loss")[0] == expected
    assert output == before


@each("output", [None, [1.0], torch.ones(2, 3), 0.5, (torch.ones(()), torch.ones(2))])
def test_other_outputs_of_a_validation_step_are_refused(output):
    with raises_at(ModuleContractError, "validation_step"):
        read_validation_output(output, "val_loss")


class Leaves(AcceleratorModule):
    def training_step(self, batch):
        if len(batch):
            return batch.mean()
        return None


class LeavesByStep(AcceleratorModule):
    def step(self, batch):
        return batch.mean() if len(batch) else None


class Forgets(AcceleratorModule):
    def training_step(self, batch):
        batch.mean()


class Returns(AcceleratorModule):
    def training_step(self, batch):
        return batch.mean()


@pytest.mark.parametrize(
    ("module", "expected"), [(Leaves, True), (LeavesByStep, True), (Forgets, False), (Returns, False)]
)
def test_a_step_leaves_batches_out_only_where_it_says_so_and_returns_a_loss_elsewhere(module, expected):
    assert may_return_none(module()) == expected
