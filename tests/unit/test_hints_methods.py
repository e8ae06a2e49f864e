"""Methods of other trainers on a module: nothing here calls them, so they are an error that says what to write."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from accmt import AcceleratorModule, Callback, ExtendedAcceleratorModule, LambdaCallback
from accmt.addons.hints.methods import FOREIGN_METHODS, ONLY_WITH, find_foreign_method
from accmt.callbacks import HOOKS, find_hooks
from accmt.compat import HOOK_NAMES
from accmt.errors import ModuleContractError, UnknownArgumentError
from tests.raising import raises_at
from tests.tables import each
from tests.toys import Linear, check_module, make_points, make_trainer

METHODS = [(owner, name) for owner, names in FOREIGN_METHODS.items() for name in names]


def module_with(base=Linear, **members):
    return type("Ported", (base,), members)()


def make_method(name):
    return eval(f"lambda self, {ONLY_WITH[name]}=None: None") if name in ONLY_WITH else lambda self, *_args: None


@each(("owner", "name"), METHODS)
def test_a_method_that_only_another_trainer_calls_is_an_error_with_what_to_write(owner, name):
    with pytest.raises(ModuleContractError) as caught:
        check_module(module_with(**{name: make_method(name)}))
    where, got, _, do = str(caught.value).split("\n")
    assert where == f"Ported.{name}"
    assert owner in got
    assert do.startswith(f"  do: {find_foreign_method(name)[1]}")


def test_the_setup_of_a_callback_is_an_error_unless_it_is_a_helper():
    class Freezing(Callback):
        def setup(self, trainer, pl_module, stage):
            """Lightning calls this before it creates the optimizer."""

    class Helper(Callback):
        def setup(self):
            """Called by hooks of the class."""

    trainer = make_trainer(callbacks=[Helper(), Freezing()])
    with pytest.raises(ModuleContractError, match=r"^Freezing\.setup\n(.|\n)*do: write def on_fit_start\(self\)"):
        trainer.fit(Linear(), make_points())
    make_trainer(callbacks=Helper()).fit(Linear(), make_points())


def test_early_stopping_is_answered_with_its_values():
    class EarlyStopping:
        monitor, patience, min_delta = "val_loss", 2, -0.01

    with raises_at(ModuleContractError, "Trainer(callbacks=...)") as caught:
        make_trainer(callbacks=EarlyStopping())
    line = 'Trainer(patience={"val_loss": {"patience": 2, "min_delta": 0.01}})'
    assert line in str(caught.value)
    assert eval(line, {"Trainer": make_trainer})


def test_data_for_fit_by_the_names_of_lightning_are_told_where_they_go():
    with raises_at(UnknownArgumentError, "fit") as caught:
        make_trainer().fit(Linear(), train_dataloaders=make_points(), val_dataloaders=make_points())
    assert str(caught.value).endswith("do: write trainer.fit(module, train_dataset, val_dataset)")


def test_nothing_that_works_here_is_refused():
    refused = {name for _, name in METHODS} - set(ONLY_WITH)
    assert refused & {*HOOKS, *HOOK_NAMES, *dir(AcceleratorModule)} == set()


def test_fit_refuses_before_it_trains():
    module = module_with(configure_optimizers=lambda self: torch.optim.SGD(self.model.parameters(), lr=1.0))
    trainer = make_trainer()
    with pytest.raises(ModuleContractError, match=r"(?s)LightningModule.*do: write def get_optimizer\(self\)"):
        trainer.fit(module, make_points())
    assert trainer.state.train_step == 0


@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_what_does_not_train_refuses_too(function):
    with pytest.raises(ModuleContractError, match="validation_epoch_end"):
        getattr(make_trainer(), function)(module_with(validation_epoch_end=lambda self, outputs: None), make_points())


class Uses(Linear):
    """Calls what it names as others do: in a step, in a nested function, and by way of another method."""

    def step(self, batch):
        return self.compute_loss(batch)

    def compute_loss(self, batch):
        return Linear.step(self, batch)

    def get_optimizer(self):
        return (lambda: self.configure_optimizers())()

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def get_train_dataloader(self):
        return self.train_dataloader()

    def train_dataloader(self):
        return make_points()


class UsesOfBase(Uses):
    def compute_loss(self, batch):
        return 2 * super().compute_loss(batch)


@pytest.mark.parametrize("kind", [Uses, UsesOfBase])
def test_a_method_that_the_module_itself_calls_is_the_users_own(kind):
    trainer = make_trainer()
    trainer.fit(kind())
    assert trainer.state.global_step == 4


@each(
    "member",
    [
        staticmethod(lambda outputs: None),
        classmethod(lambda cls, outputs: None),
        torch.no_grad()(lambda self, outputs: None),
        functools.lru_cache(lambda self, outputs: None),
        property(lambda self: None),
    ],
)
def test_decorated_methods_are_seen(member):
    with pytest.raises(ModuleContractError, match="validation_epoch_end"):
        check_module(module_with(validation_epoch_end=member))


def test_a_method_of_a_mixin_is_seen_and_one_of_a_library_is_not():
    mixin = type("Mixin", (), {"train_dataloader": lambda self: None})
    with pytest.raises(ModuleContractError, match="train_dataloader"):
        check_module(type("Ported", (Linear, mixin), {})())

    class Both(Linear, nn.Module):
        def __init__(self):
            nn.Module.__init__(self)
            Linear.__init__(self)

    check_module(Both())


def test_a_module_with_steps_of_its_own_has_a_backward():
    class Manual(ExtendedAcceleratorModule):
        def __init__(self):
            self.model = nn.Linear(1, 1)
            self.automatic_optimization = False

        def training_step(self, batch):
            return self.model(batch).mean()

    check_module(Manual())
    with pytest.raises(ModuleContractError, match="backward"):
        check_module(type("Ported", (Manual,), {"backward": lambda self, loss, *args: loss.backward()})())


@pytest.mark.parametrize("name", ["on_test_epoch_end", "on_predict_start", "on_save"])
def test_hooks_of_others_that_are_not_here_are_told_apart_from_misspelt_ones(name):
    of_class = type("Ported", (Callback,), {name: lambda self: None})
    for define in (lambda: find_hooks(of_class()), lambda: LambdaCallback(**{name: print})):
        with raises_at(ModuleContractError, name, "a hook of ") as caught:
            define()
        assert "did you mean" not in str(caught.value)


def test_optimization_by_hand_is_another_class_here():
    module = Linear()
    module.automatic_optimization = False
    with raises_at(ModuleContractError, "Linear.automatic_optimization"):
        check_module(module)
    module.automatic_optimization = True
    check_module(module)
