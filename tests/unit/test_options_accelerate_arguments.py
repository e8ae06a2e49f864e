"""Device and precision: what other trainers take there is known, and refused when the Trainer is made."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from accmt.addons.hints.table import PRECISIONS
from accmt.errors import ArgumentError
from tests.raising import raises_at
from tests.toys import make_trainer


@pytest.mark.parametrize(
    ("value", "do"),
    [
        ("gpu", "leave it out, .*accmt launch -N 2 train.py"),
        ("auto", "leave it out"),
        ("cpu", r'accelerator=\{"cpu": True\}'),
        (2, "leave it out"),
        (True, "leave it out"),
        (torch.device("cpu"), "leave it out"),
        (Accelerator, r"accelerator=Accelerator\(\)"),
    ],
)
def test_an_accelerator_that_is_none_is_refused_when_the_trainer_is_made(value, do):
    with raises_at(ArgumentError, "Trainer(accelerator=...)"):
        make_trainer(accelerator=value)


def test_what_an_accelerator_may_be_is_taken():
    for value in (None, {"cpu": True}, Accelerator(cpu=True)):
        assert make_trainer(accelerator=value).settings.running.accelerator is value


@pytest.mark.parametrize(
    ("value", "do"),
    [
        (64, r"model.double\(\) before fit: mixed_precision has no 64 bits"),
        ("64-true", r"model.double\(\)"),
        (torch.float64, r"model.double\(\)"),
        (16, 'mixed_precision="fp16"'),
        ("16-mixed", 'mixed_precision="fp16"'),
        (torch.float16, 'mixed_precision="fp16"'),
        ("bf16-mixed", 'mixed_precision="bf16"'),
        (torch.bfloat16, 'mixed_precision="bf16"'),
        ("bf16-true", r"model.bfloat16\(\)"),
        (32, "leave it out"),
        ("32-true", "leave it out"),
        ("fp15", "mixed_precision='fp16'"),
    ],
)
def test_precisions_of_others_are_told_what_they_are_here(value, do):
    with raises_at(ArgumentError, "Trainer(mixed_precision=...)"):
        make_trainer(mixed_precision=value)
    if value != "fp15":
        with raises_at(ArgumentError, "Trainer(precision=...)"):
            make_trainer(precision=value)


@pytest.mark.parametrize("advice", sorted(set(PRECISIONS.values())))
def test_what_is_advised_works(advice):
    if advice.startswith("mixed_precision="):
        assert make_trainer(mixed_precision=advice.split('"')[1]).settings
    else:
        assert advice.startswith(("model.", "leave it out"))
