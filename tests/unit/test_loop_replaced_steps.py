"""What users put in the place of the Trainer's and the optimizer's steps is called, however it is put there."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch

from accmt import Callback, Trainer
from accmt.errors import DataError
from tests.toys import Linear, make_points, make_trainer

STEPS = 2  # of 8 points in batches of 4


def counted(function, calls):
    @functools.wraps(function)  # which copies `__module__` too
    def wrapped(*arguments, **keywords):
        calls.append(function.__name__)
        return function(*arguments, **keywords)

    return wrapped


def fit(trainer: Trainer, data=None) -> None:
    trainer.fit(Linear(), make_points(8) if data is None else data)


def build(**settings) -> Trainer:
    hps = {"epochs": 1, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.1}}
    return make_trainer(hps, "out/m", **settings)


@pytest.mark.parametrize("name", ["do_backward", "do_opt_step", "do_zero_grad"])
def test_a_decorated_method_on_the_object_is_called(name: str) -> None:
    trainer, calls = build(), []
    setattr(trainer, name, counted(getattr(trainer, name), calls))
    fit(trainer)
    assert calls.count(name) >= STEPS


@pytest.mark.parametrize("name", ["do_backward", "do_opt_step", "do_zero_grad"])
def test_a_patched_class_is_called(name: str) -> None:
    own = getattr(Trainer, name)
    with mock.patch.object(Trainer, name, autospec=True, side_effect=own) as patched:
        fit(build())
    assert patched.call_count >= STEPS


def test_an_optimizer_whose_zero_grad_a_hook_replaces_is_asked() -> None:
    calls: list[str] = []

    class Replaces(Callback):
        def on_fit_start(self) -> None:
            optimizer = self.module.optimizer
            optimizer.zero_grad = counted(optimizer.zero_grad, calls)

    fit(build(callbacks=Replaces()))
    assert len(calls) >= STEPS


def test_unequal_tensors_in_tuples_are_explained() -> None:
    data = [(torch.randn(3 + index % 2), torch.tensor(1.0)) for index in range(8)]
    with pytest.raises(DataError, match="making a batch"):
        fit(build(), data)
