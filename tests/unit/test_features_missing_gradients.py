"""A loss that does not reach the model, or only a part of it, at the first optimizer step of a run."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from accmt import AcceleratorModule, Callback, ExtendedAcceleratorModule, ModuleContractError
from tests.raising import raises_at
from tests.toys import make_trainer

HPS = {"epochs": 1, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.1}}
DATA = TensorDataset(torch.randn(16, 3, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2)


class Classifier(AcceleratorModule):
    def __init__(self):
        self.model = nn.ModuleDict({"used": nn.Linear(3, 2), "idle": nn.Linear(3, 2)})

    def training_step(self, batch):
        inputs, targets = batch
        return cross_entropy(self.model["used"](inputs), targets)


class Detached(Classifier):
    def training_step(self, batch):
        inputs, targets = batch
        return cross_entropy(self.model["used"](inputs).detach().requires_grad_(), targets)


class Copied(Classifier):
    def training_step(self, batch):
        inputs, targets = batch
        return cross_entropy(torch.tensor(self.model["used"](inputs).tolist(), requires_grad=True), targets)


class DetachedByHand(ExtendedAcceleratorModule, Detached):
    def training_step(self, batch):
        self.backward(Detached.training_step(self, batch))
        self.step()
        self.zero_grad()


class ZeroFirst(Classifier):
    """Returns no loss, or one of weight 0, for the first batches."""

    seen = 0

    def training_step(self, batch):
        self.seen += 1
        if self.seen == 1:
            return None
        return {"loss": super().training_step(batch), "weight": float(self.seen > 2)}


@pytest.mark.parametrize("kind", [Detached, Copied, DetachedByHand])
def test_a_loss_that_does_not_reach_the_model_is_an_error(kind):
    with raises_at(ModuleContractError, "training_step"):
        make_trainer(HPS).fit(kind(), DATA)


@pytest.mark.parametrize("kind", [Classifier, ZeroFirst])
def test_parameters_that_the_first_step_does_not_train_are_named_once(kind, caplog):
    with caplog.at_level(logging.INFO, "accmt"):
        make_trainer(HPS, grad_accumulation_steps=1 if kind is Classifier else 2).fit(kind(), DATA)
    lines = [line for line in caplog.messages if "does not depend on" in line]
    assert len(lines) == 1
    assert "2 of 4 parameters" in lines[0]
    assert "idle.weight, idle.bias" in lines[0]


def test_gradients_that_a_callback_holds_back_are_not_missing():
    class Holding(Callback):
        def on_after_backward(self):
            model = self.module.model["used"]
            self.held = [(one, one.grad) for one in model.parameters()]
            for one, _ in self.held:
                one.grad = None

        def on_before_optimizer_step(self):
            for one, gradient in self.held:
                one.grad = gradient

    module = Classifier()
    before = module.model["used"].weight.clone()
    make_trainer(HPS, callbacks=[Holding()]).fit(module, DATA)
    assert not torch.equal(module.model["used"].weight, before)


def test_gradients_used_within_backward_are_not_missing():
    module = Classifier()

    def use(parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in module.model["used"].parameters():
        parameter.register_post_accumulate_grad_hook(use)
    before = module.model["used"].weight.clone()
    make_trainer(HPS).fit(module, DATA)
    assert not torch.equal(module.model["used"].weight, before)
