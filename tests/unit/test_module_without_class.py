"""Modules made of functions: a toy of functions is the toy of a class."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate
from transformers import BertConfig, BertForSequenceClassification

from accmt import AcceleratorModule
from accmt.addons.made_modules import HuggingFaceModule
from accmt.errors import DataError
from tests.raising import raises_at
from tests.toys import Linear, make_points, make_trainer


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def train_step(batch, trainer):
    inputs, targets = batch
    return {"loss": nn.functional.mse_loss(trainer.model(inputs), targets)}


def twice_the_loss(batch, trainer):
    assert not torch.is_grad_enabled()
    return {"loss": 2 * train_step(batch, trainer)["loss"]}


def fit(module, **settings):
    trainer = make_trainer({"epochs": 2}, **settings)
    trainer.fit(module, make_points(), make_points(4))
    return trainer


@pytest.mark.parametrize("step", [train_step, lambda *both: train_step(*both)["loss"]], ids=["a dict", "a loss"])
def test_functions_train_as_a_class_of_the_same_steps_does(step):
    of_class, of_functions = Linear(), AcceleratorModule.from_functions(make_model(), step)
    results = fit(of_class).state.metrics, fit(of_functions).state.metrics
    assert torch.equal(of_functions.model.weight, of_class.model.weight)
    assert results[0] == results[1] != {}


def test_a_function_for_evaluation_is_used_there_and_without_training_too():
    module = AcceleratorModule.from_functions(make_model(), train_step, twice_the_loss)
    plain = make_trainer().validate(Linear(), make_points(4))["val_loss"]
    assert make_trainer().validate(module, make_points(4))["val_loss"] == pytest.approx(2 * plain)
    trainer = fit(module)
    assert trainer.validate()["val_loss"] == trainer.state.metrics["val_loss"]


def test_a_given_optimizer_is_used():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = model.weight.detach().clone()
    module = AcceleratorModule.from_functions(model, train_step, optim=optimizer)
    fit(module)
    assert module.optimizer is optimizer
    assert torch.equal(model.weight, before)


def test_every_run_begins_with_the_optimizer_as_it_was_given():
    def trained(runs):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        module = AcceleratorModule.from_functions(model, train_step, optim=optimizer)
        for hps in runs:
            model.load_state_dict(make_model().state_dict())
            make_trainer(hps).fit(module, make_points())
        return model.weight.detach(), optimizer.state_dict()["state"][0]["step"]

    once, twice = trained([{}]), trained([{"scheduler": "LinearWithWarmup"}, {}])
    assert torch.equal(once[0], twice[0])
    assert once[1] == twice[1] == 4


def test_lists_where_a_transformers_model_needs_tensors_are_told_with_what_to_write():
    model = BertForSequenceClassification(
        BertConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    )
    batch = default_collate([{"text": "a", "input_ids": [1, 2], "labels": 0}] * 2)
    with raises_at(
        DataError,
        "a batch for the transformers model",
        "'text', 'input_ids'",
        do="remove_columns(['text']), and Trainer(coll",
    ):
        HuggingFaceModule(model).step(batch)
    batch = default_collate([{"input_ids": torch.tensor([1, 2]), "labels": "a"}] * 2)
    with raises_at(DataError, "a batch for the transformers model", "'labels'", do="class_encode_column('labels')"):
        HuggingFaceModule(model).step(batch)
    with pytest.raises(AttributeError, match="wrong"):
        HuggingFaceModule(Failing()).step({"input_ids": torch.ones(1)})


class Failing(torch.nn.Module):
    def forward(self, input_ids):
        raise AttributeError("wrong")
