"""The user's module outside a run: what it shows, and how its parts fall back on each other."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from accmt import AcceleratorModule, TrainingState
from accmt.addons.hints.methods import FOREIGN_ATTRIBUTES
from accmt.addons.made_modules import HuggingFaceModule
from accmt.module import defines
from tests.toys import Linear


class Classifier(AcceleratorModule):
    def __init__(self, model=None):
        self.model = nn.Linear(2, 1) if model is None else model


class Bare(AcceleratorModule):
    pass


def test_a_module_shows_its_size_and_its_structure():
    module = Classifier()
    assert repr(module) == "Classifier(3 parameters)"
    assert str(module) == str(module.model)
    assert len(module) == 3
    assert bool(module) is True
    assert module.get_optimizer() is module.get_callbacks() is None
    module.state = TrainingState(epoch=2, global_step=7)
    assert module.status_dict == module.state.state_dict()


@pytest.mark.parametrize("module", [Bare(), Classifier("bert")])
def test_a_module_without_a_model_can_still_be_shown(module):
    assert repr(module) == f"{type(module).__name__}(no model)"
    assert bool(module) is True


def test_calling_a_module_runs_forward_which_runs_the_model():
    module = Classifier()
    batch = torch.ones(1, 2)
    assert torch.equal(module(batch), module.model(batch))

    class Twice(Classifier):
        def forward(self, batch, *, scale=1):
            return self.model(batch) * scale

    twice = Twice()
    assert torch.equal(twice(batch, scale=2), twice.model(batch) * 2)


def test_steps_fall_back_on_the_shared_one():
    class Shared(Classifier):
        def step(self, batch):
            return ("step", batch)

    module = Shared()
    assert module.training_step(1) == module.validation_step(1) == module.test_step(1) == ("step", 1)


def test_a_step_that_is_not_defined_says_what_to_define():
    for step in (Classifier().training_step, Classifier().validation_step, Classifier().step):
        with pytest.raises(NotImplementedError, match=r"define training_step\(self, batch\), or step"):
            step(1)


def test_a_transformers_module_takes_the_loss_that_its_model_computes():
    class Model(nn.Module):
        def forward(self, labels, inputs):
            return type("Output", (), {"loss": (labels - inputs).sum()})()

    processor = object()
    module = HuggingFaceModule(Model(), processor)
    batch = {"labels": torch.tensor([3.0]), "inputs": torch.tensor([1.0])}
    assert module.training_step(batch).item() == module.validation_step(batch).item() == 2.0
    assert module.processor is processor


def test_parts_of_the_model_are_frozen_and_trained_again():
    class Two(AcceleratorModule):
        def __init__(self):
            self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    module = Two()
    first, second = module.model
    module.freeze(first)
    assert [p.requires_grad for p in module.model.parameters()] == [False, False, True, True]
    module.freeze()
    assert not any(p.requires_grad for p in module.model.parameters())
    module.unfreeze(second)
    assert [p.requires_grad for p in module.model.parameters()] == [False, False, True, True]
    module.unfreeze()
    assert all(p.requires_grad for p in module.model.parameters())


@pytest.mark.parametrize("name", sorted(FOREIGN_ATTRIBUTES))
def test_attributes_of_other_modules_are_told_where_they_are_here(name):
    module = Linear()
    with pytest.raises(AttributeError, match=rf"self\.{name}\n(.|\n)*do: (write|leave it out:) ") as caught:
        getattr(module, name)
    assert caught.value.name == name
    assert not hasattr(module, name)
    setattr(module, name, 3)
    assert getattr(module, name) == 3


def test_other_attributes_that_are_missing_are_ordinary_errors_and_copies_work():
    with pytest.raises(AttributeError, match="^'Linear' object has no attribute 'own'$"):
        Linear().own  # noqa: B018
    copied = pickle.loads(pickle.dumps(copy.deepcopy(Linear())))
    assert torch.equal(copied.model.weight, Linear().model.weight)


def test_what_torchs_module_defines_is_not_the_users():
    class Both(AcceleratorModule, nn.Module):
        def __init__(self):
            nn.Module.__init__(self)
            self.model = nn.Linear(1, 1)

    assert not defines(Both(), "state_dict")
    assert "2 parameters" in repr(Both())
