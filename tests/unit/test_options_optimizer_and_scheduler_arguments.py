from typing import Optional

import torch
from torch.optim import lr_scheduler

from accmt.options.optimizer_and_scheduler_arguments import (
    check_optimizer,
    check_scheduler,
    optimizer_arguments,
    parameters_of,
)
from accmt.options.optimizer_and_scheduler_names import find_optimizer, find_scheduler
from tests.tables import each


class Open(torch.optim.SGD):
    """Hands on whatever it gets."""

    def __init__(self, params, scale: "NotImportable" = 1, **kwargs):  # noqa: F821
        super().__init__(params, **kwargs)


class Unusual(torch.optim.SGD):
    """Has arguments whose names and annotations pydantic does not accept."""

    def __init__(self, params, lr: float = 0.1, _scale: int = 1, copy: bool = False, clip: "NotHere | None" = None):  # noqa: F821
        super().__init__(params, lr=lr)


Unusual.__init__.__annotations__["clip"] = Optional["NotHere"]  # noqa: F821 - as without the future import


def optimizer_faults(name, **given):
    return [
        (fault.path[1:], fault.got, fault.expected, fault.do)
        for fault in check_optimizer(find_optimizer(name), given)[1]
    ]


def scheduler_faults(name, **given):
    return [
        (fault.path[1:], fault.got, fault.expected, fault.do)
        for fault in check_scheduler(find_scheduler(name), given)[1]
    ]


def test_values_come_in_the_types_of_the_signature():
    arguments, faults = check_optimizer(torch.optim.AdamW, {"lr": 1, "betas": [0.9, 0.98], "amsgrad": True})
    assert faults == []
    assert arguments == {"lr": 1, "betas": (0.9, 0.98), "amsgrad": True}
    arguments, faults = check_scheduler(lr_scheduler.StepLR, {"step_size": 1e3, "gamma": 1.0})
    assert faults == []
    assert arguments == {"step_size": 1000, "gamma": 1.0}
    assert type(arguments["step_size"]) is int
    assert type(arguments["gamma"]) is float


@each(
    ("name", "given", "key", "message"),
    [
        ("AdamW", {"lr": -1, "eps": 1e-6}, ("lr",), "Invalid learning rate: -1"),
        ("AdamW", {"lr": 1e-3, "betas": [0.9, 1.5]}, ("betas",), "Invalid beta parameter at index 1: 1.5"),
        ("SGD", {"lr": 0.1, "nesterov": True}, ("nesterov",), "Nesterov momentum requires a momentum"),
        ("Adafactor", {"lr": 1e-3, "relative_step": True}, ("lr",), "Cannot combine manual `lr`"),
    ],
)
def test_a_value_that_the_optimizer_refuses_is_traced_to_its_key(name, given, key, message):
    ((path, _, expected, _),) = optimizer_faults(name, **given)
    assert path == key
    assert message in expected


@each("given", [{"warmup_ratio": 0}, {"warmup_ratio": 1.0}, {"num_warmup_steps": 1e2}, {"num_warmup_steps": 0.1}, {}])
def test_every_spelling_of_a_warm_up_is_accepted(given):
    assert scheduler_faults("LinearWithWarmup", **given) == []


def test_a_class_that_takes_anything_gets_anything_and_its_unknown_types_are_not_judged():
    assert check_optimizer(Open, {"scale": "x", "lr": 0.1}) == ({"scale": "x", "lr": 0.1}, [])
    assert list(parameters_of(Open)) == ["scale", "kwargs"]


def test_adafactor_with_lr_uses_that_lr():
    adafactor = find_optimizer("Adafactor")
    assert optimizer_arguments(adafactor, {"lr": 0.1}) == {"lr": 0.1, "relative_step": False}
    assert optimizer_arguments(adafactor, {"lr": None}) == {"lr": None}
    assert optimizer_arguments(torch.optim.SGD, {"lr": 0.1}) == {"lr": 0.1}


def test_unusual_names_and_annotations_of_arguments_are_no_errors(recwarn):
    assert check_optimizer(Unusual, {"lr": 1, "_scale": 2.0, "copy": True}) == (
        {"lr": 1, "_scale": 2, "copy": True},
        [],
    )
    [fault] = check_optimizer(Unusual, {"_scale": "two"})[1]
    assert fault.path == ("optim", "_scale")
    assert not recwarn.list
