"""Device and precision: what other trainers take there is known, and refused when the Trainer is made."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from accmt.errors import ArgumentError
from tests.raising import raises_at
from tests.toys import make_trainer


@pytest.mark.parametrize("value", ["gpu", "cpu", 2, True, torch.device("cpu"), Accelerator])
def test_an_accelerator_that_is_none_is_refused_when_the_trainer_is_made(value):
    with raises_at(ArgumentError, "Trainer(accelerator=...)"):
        make_trainer(accelerator=value)


def test_what_an_accelerator_may_be_is_taken():
    for value in (None, {"cpu": True}, Accelerator(cpu=True)):
        assert make_trainer(accelerator=value).settings.running.accelerator == value


@pytest.mark.parametrize("value", [64, torch.float64, 16, "16-mixed", torch.bfloat16, "bf16-true", "32-true", "fp15"])
def test_precisions_of_others_are_told_what_they_are_here(value):
    with raises_at(ArgumentError, "Trainer(mixed_precision=...)"):
        make_trainer(mixed_precision=value)
    if value != "fp15":
        with raises_at(ArgumentError, "Trainer(precision=...)"):
            make_trainer(precision=value)
