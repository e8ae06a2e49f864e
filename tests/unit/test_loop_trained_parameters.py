"""Layers that are frozen, unfrozen or replaced during a run in one process."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from accmt import Callback, ExtendedAcceleratorModule
from accmt.errors import ModuleContractError
from tests.raising import raises_at
from tests.resume.unbroken import Fragile, make
from tests.toys import InterruptAt, InterruptionError, Linear, Record, make_points, make_trainer


class Head(Linear):
    """Trains a head on a frozen body; the optimizer has the parameters that are trained at the start."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.model[0].requires_grad_(False)

    def get_optimizer(self):
        return torch.optim.Adam([weight for weight in self.model.parameters() if weight.requires_grad], lr=0.01)


class At(Callback):
    """Does something to the model after a number of optimizer steps, once, in a hook."""

    def __init__(self, step, act, hook="on_epoch_start"):
        self.step, self.act = step, act
        setattr(self, hook, self.do)

    def do(self):
        if self.state.global_step == self.step:
            self.act(self.module)


def unfreeze(module):
    module.model[0].requires_grad_(True)


def unfreeze_with_group(module):
    unfreeze(module)
    module.optimizer.add_param_group({"params": list(module.model[0].parameters()), "lr": 0.5})


def test_parameters_that_are_unfrozen_but_not_in_the_optimizer_are_told(caplog) -> None:
    with caplog.at_level(logging.WARNING, "accmt"):
        make_trainer({"epochs": 2}, callbacks=At(4, unfreeze)).fit(Head(), make_points())
    told = [record.message for record in caplog.records]
    assert len(told) == 1
    assert "2 parameters require gradients but are not in the optimizer" in told[0]
    assert "0.weight, 0.bias" in told[0]


def test_a_model_trained_in_part_from_the_start_is_told_so(caplog) -> None:
    class Partly(Head):
        def __init__(self):
            super().__init__()
            self.model[0].requires_grad_(True)

        def get_optimizer(self):
            return torch.optim.SGD(self.model[2].parameters(), lr=0.1)

    with caplog.at_level(logging.WARNING, "accmt"):
        make_trainer().fit(Partly(), make_points())
    assert ["not in the optimizer" in record.message for record in caplog.records] == [True]


LATER = {
    "unfrozen": (unfreeze, "got: 0.weight, which was unfrozen after the epoch began"),
    "frozen": (lambda module: module.model[2].bias.requires_grad_(False), "got: 2.bias, which was frozen after"),
    "replaced": (lambda module: module.model.__setitem__(2, nn.Linear(4, 1)), "got: 2.weight, which was added to the"),
    "added": (lambda module: module.model.append(nn.Linear(1, 1)), "got: 3.weight, which was added to the model"),
}


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("what", LATER)
def test_a_change_within_an_epoch_is_an_error_that_names_the_parameter_and_the_hook(what, step) -> None:
    act, said = LATER[what]
    trainer = make_trainer({"epochs": 2}, callbacks=At(step, act, "on_update_end"))
    with pytest.raises(ModuleContractError) as caught:
        trainer.fit(Head(), make_points())
    assert said in str(caught.value)
    assert "on_epoch_start" in str(caught.value)
    assert trainer.state.global_step == (1 if step == 1 else 4)  # the first step, and the end of the epoch


def test_a_new_layer_that_the_optimizer_gets_is_trained() -> None:
    def replace(module):
        group = module.optimizer.param_groups[0]
        group["params"] = [weight for weight in group["params"] if weight not in set(module.model[2].parameters())]
        module.model[2] = nn.Linear(4, 1)
        module.optimizer.add_param_group({"params": list(module.model[2].parameters())})
        module.begun = module.model[2].weight.detach().clone()

    module = Head()
    make_trainer({"epochs": 2}, callbacks=At(4, replace)).fit(module, make_points())
    assert not torch.equal(module.begun, module.model[2].weight)


class ByHand(ExtendedAcceleratorModule):
    """Trains by hand, with one optimizer for each layer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

    def get_optimizer(self):
        return [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in self.model]

    def training_step(self, batch):
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        if "late" in vars(self):
            self.late.step()
            self.late.zero_grad()
        self.zero_grad()
        return loss


@pytest.mark.parametrize("where", ["a group", "an optimizer of the module"])
def test_a_new_layer_in_manual_optimization_that_an_optimizer_gets_is_trained(where) -> None:
    def replace(module):
        module.model[1] = layer = nn.Linear(4, 1)
        if where == "a group":
            module.optimizers()[1].param_groups.clear()
            module.optimizers()[1].add_param_group({"params": list(layer.parameters())})
        else:
            module.late = torch.optim.SGD(layer.parameters(), lr=0.01)
        module.begun = layer.weight.detach().clone()

    module = ByHand()
    make_trainer({"epochs": 2}, callbacks=At(4, replace)).fit(module, make_points())
    assert not torch.equal(module.begun, module.model[1].weight)


def test_another_optimizer_during_a_run_is_an_error() -> None:
    def replace(module):
        module.optimizer = torch.optim.SGD(module.model.parameters(), lr=1.0)

    with raises_at(ModuleContractError, "Head.optimizer"):
        make_trainer({"epochs": 2}, callbacks=At(4, replace)).fit(Head(), make_points())


def test_a_group_of_parameters_added_during_the_run_is_there_after_a_resume() -> None:
    def train(path, stop=None, **settings):
        module = Head()
        callbacks = [At(4, unfreeze_with_group), *([] if stop is None else [InterruptAt(stop)])]
        trainer = make_trainer(
            {"epochs": 2}, path, checkpoint_every="step", resume="auto", callbacks=callbacks, **settings
        )
        trainer.fit(module, make_points())
        return module

    unbroken = train("unbroken/model")
    with pytest.raises(InterruptionError):
        train("broken/model", stop=6)
    continued = train("broken/model")
    for ours, theirs in zip(continued.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert continued.model[0].weight.requires_grad


def test_what_the_program_freezes_when_it_starts_does_not_count_as_changed() -> None:
    class Freeze(Callback):
        def on_fit_start(self):
            self.module.model[0].requires_grad_(False)

        def on_epoch_start(self):
            self.flags = getattr(self, "flags", Record())
            self.flags.append(self.module.model[0].weight.requires_grad)

    def start(freeze, **settings):
        act = At(6, lambda module: module.model[0].requires_grad_(True))
        make("out/model", resume="auto", callbacks=[freeze, act, *settings.pop("more", [])]).fit(
            Fragile(), make_points(22)
        )

    with pytest.raises(InterruptionError):
        start(first := Freeze(), more=[InterruptAt(9)])
    start(second := Freeze())
    assert first.flags == [False, False]  # before the change of the second epoch
    assert second.flags == [True, True]


def test_nothing_left_to_train_is_an_error_at_that_step() -> None:
    with raises_at(ModuleContractError, "freezing or unfreezing parameters"):
        make_trainer({"epochs": 2}, callbacks=At(4, lambda module: module.freeze())).fit(Linear(), make_points())


@pytest.mark.parametrize("hook", ["on_fit_start", "on_epoch_start", "on_update_end"])
def test_another_model_during_a_run_is_refused_before_it_is_trained_in_vain(hook) -> None:
    class Swapping(Linear):
        pass

    def swap(self):
        self.model = nn.Linear(3, 1)

    setattr(Swapping, hook, swap)
    trainer = make_trainer({"epochs": 2})
    with raises_at(ModuleContractError, "Swapping.model"):
        trainer.fit(Swapping(), make_points())
    assert trainer.state.global_step == (hook == "on_update_end")


def test_the_same_model_in_a_wrapper_is_trained_on() -> None:
    class Wrapping(Linear):
        def on_fit_start(self):
            self.model = nn.Sequential(self.model)

    plain, wrapped = Linear(), Wrapping()
    for module in (plain, wrapped):
        make_trainer().fit(module, make_points())
    assert torch.equal(plain.model.weight, wrapped.model.weight)
