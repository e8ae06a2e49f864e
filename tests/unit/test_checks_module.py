"""A module that does not keep the contract is refused before the first batch, with the line to write."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from accmt import AcceleratorModule, ExtendedAcceleratorModule, Trainer
from accmt.errors import ModuleContractError
from accmt.setup.user_methods import adapt_training_step, adapt_validation_step
from accmt.state import TrainingState
from tests.raising import raises_at
from tests.tables import each
from tests.toys import check_module

HPS = {"epochs": 1, "batch_size": 2, "optim": {"type": "SGD", "lr": 0.1}}


class Base(AcceleratorModule):
    def __init__(self):
        self.model = nn.Linear(2, 1)


class Trains(Base):
    def training_step(self, batch):
        return self.model(batch).mean()


class Whole(Trains):
    def validation_step(self, batch):
        return self.model(batch).mean()


class OnlyStep(Base):
    def step(self, batch):
        return self.model(batch).mean()


class WithParts(AcceleratorModule):
    training_step = Trains.training_step

    def __init__(self, *names):
        for name in names:
            setattr(self, name, nn.Linear(2, 1))


class WithoutModel(AcceleratorModule):
    training_step = Trains.training_step


class ModelOfWrongType(Trains):
    def __init__(self):
        self.model = {"layers": 2}


class Frozen(Trains):
    def __init__(self):
        super().__init__()
        self.model.requires_grad_(requires_grad=False)


class WithoutParameters(Trains):
    def __init__(self):
        self.model = nn.ReLU()


class MisspeltTraining(Base):
    def trainig_step(self, batch):
        return self.model(batch).mean()


class MisspeltValidation(Trains):
    def validation_setp(self, batch):
        return self.model(batch).mean()


class MisspeltOptimizer(Whole):
    def get_optimiser(self):
        return None


class MisspeltCollate(Whole):
    @staticmethod
    def collate_fn_trian(samples):
        return samples


class MisspeltHook(Whole):
    def on_epoch_ended(self):
        pass


class MisspeltInMixin(OnlyStep, type("Mixin", (), {"get_bach_size": lambda self, batch: 1})):
    pass


def check(module, *, has_validation=True):
    check_module(module, sets={"": []} if has_validation else {})


REFUSED = [
    (Whole, "trainer.fit(Whole(...), ...)"),
    (nn.Linear(2, 1), "AcceleratorModule.from_functions"),
    ({}, "class MyModule(AcceleratorModule)"),
    (TensorDataset(torch.ones(1)), "trainer.fit(module, data)"),
    (None, "class MyModule(AcceleratorModule)"),
    (WithoutModel(), "self.model = MyNetwork() in __init__"),
    (WithParts("net"), "self.model = self.net in __init__, and self.model(...) in the steps"),
    (WithParts("G", "D"), 'self.model = nn.ModuleDict({"G": self.G, "D": self.D}) in __init__'),
    (ModelOfWrongType(), "self.model = an nn.Module"),
    (Frozen(), "unfrozen"),
    (WithoutParameters(), "unfrozen"),
    (Base(), "def training_step(self, batch): return loss"),
    (Trains(), 'def validation_step(self, batch): return {"loss": loss}'),
    (MisspeltTraining(), "rename it to training_step"),
    (MisspeltValidation(), "rename it to validation_step"),
    (MisspeltOptimizer(), "rename it to get_optimizer"),
    (MisspeltCollate(), "rename it to collate_fn_train"),
    (MisspeltInMixin(), "rename it to get_batch_size"),
    (MisspeltHook(), "did you mean on_epoch_end"),
]


@pytest.mark.parametrize(("module", "do"), REFUSED, ids=lambda value: type(value).__name__)
def test_a_fault_of_the_module_shows_the_line_to_write(module, do):
    where = type(module).__name__ if isinstance(module, AcceleratorModule) else "fit(module)"
    with raises_at(ModuleContractError, where, do=do):
        check(module)


@pytest.mark.parametrize("module", [Base(), WithoutModel(), MisspeltTraining()], ids=lambda m: type(m).__name__)
def test_fit_refuses_before_it_reads_a_sample_or_writes_a_file(module, tmp_path):
    class Untouchable(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise AssertionError("a sample was read")

    with raises_at(ModuleContractError, type(module).__name__):
        Trainer(HPS, "out", verbose=False).fit(module, Untouchable())
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_only_alike_are_the_users_own():
    class Own(Whole):
        steps = 3
        processors = ()
        _training_step = None

        def training_loss(self):
            return 0

        def train_step(self):
            return 0

    check(Own())


def module_with(**methods):
    return type("Own", (Base,), methods)()


STATE = TrainingState(train_step=5, global_step=11, val_step=3)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda self, batch: [batch], ["b"]),
        (lambda self, batch, batch_idx: [batch, batch_idx], ["b", 5]),
        (lambda self, batch, batch_idx=0, other="kept": [batch, batch_idx, other], ["b", 5, "kept"]),
        (lambda self, batch, state: [batch, state is STATE], ["b", True]),
        (lambda self, batch, *, status_dict: [batch, status_dict["global_step"]], ["b", 11]),
        (lambda self, batch, state, batch_idx: [batch, state.train_step, batch_idx], ["b", 5, 5]),
        (lambda self, *args: list(args), ["b"]),
        (lambda self, batch, **others: [batch, others], ["b", {}]),
    ],
    ids=["batch", "index", "defaults", "state", "status", "two", "args", "kwargs"],
)
@pytest.mark.parametrize("name", ["training_step", "step"])
def test_a_training_step_gets_the_further_parameters_it_names(name, step, expected):
    assert adapt_training_step(module_with(**{name: step}), STATE)("b") == expected


@pytest.mark.parametrize(
    ("step", "shown"),
    [
        (lambda self: None, "training_step()"),
        (lambda self, inputs, labels: None, "training_step(inputs, labels)"),
        (lambda self, batch, bach_idx: None, "bach_idx)"),
        (lambda self, *, batch: None, "(*, batch)"),
        (lambda self, **values: None, "(**values)"),
        (lambda self, key, batch: None, "(key, batch)"),
    ],
)
def test_a_training_step_with_other_parameters_is_refused(step, shown):
    with raises_at(ModuleContractError, "Own", shown, do="def training_step(self, batch), with any of batch_idx"):
        adapt_training_step(module_with(training_step=step), STATE)


def validating(name, step):
    module = module_with(**{name: step})
    module.state = STATE
    return module


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda self, batch: [batch], ["b"]),
        (lambda self, batch, verbose=False: [batch, verbose], ["b", False]),
        (lambda self, key, batch: [key, batch], ["k", "b"]),
        (lambda self, name, batch: [name, batch], ["k", "b"]),
        (lambda self, batch, key: [batch, key], ["b", "k"]),
        (lambda self, batch, key=None: [batch, key], ["b", "k"]),
        (lambda self, batch, *, key: [batch, key], ["b", "k"]),
        (lambda self, batch, batch_idx: [batch, batch_idx], ["b", 3]),
        (lambda self, key, batch, batch_idx: [key, batch, batch_idx], ["k", "b", 3]),
        (lambda self, batch, state, status_dict: [batch, state is STATE, status_dict["val_step"]], ["b", True, 3]),
        (lambda self, batch, batch_idx, dataloader_idx=0: [batch, batch_idx, dataloader_idx], ["b", 3, 0]),
        (lambda self, *args: list(args), ["b"]),
    ],
)
@pytest.mark.parametrize("name", ["validation_step", "step"])
def test_a_validation_step_gets_the_key_and_what_else_it_names(name, step, expected):
    assert adapt_validation_step(validating(name, step), "validation_step")("k", "b") == expected


@pytest.mark.parametrize("step", [lambda self: 0, lambda self, a, b, c: 0, lambda self, batch, *, flag: 0])
def test_a_validation_step_with_other_parameters_is_refused(step):
    with raises_at(ModuleContractError, "Own", "validation_step(", do="def validation_step(self, key, batch)"):
        adapt_validation_step(validating("validation_step", step), "validation_step")


def make_optimizer(module):
    return torch.optim.SGD(module.model.parameters(), lr=0.1)


def make_scheduler(module):
    return torch.optim.lr_scheduler.StepLR(make_optimizer(module), 1)


RETURNED_OPTIMIZERS = {
    "a list": lambda m: [make_optimizer(m)],
    "an empty list": lambda m: [],
    "two": lambda m: [make_optimizer(m)] * 2,
    "a pair": lambda m: (make_optimizer(m), make_scheduler(m)),
    "a dict": lambda m: {"optimizer": make_optimizer(m), "lr_scheduler": {"scheduler": make_scheduler(m)}},
    "a class": lambda m: torch.optim.SGD,
    "a scheduler": make_scheduler,
    "a name": lambda m: "SGD",
    "one with a closure": lambda m: torch.optim.LBFGS(m.model.parameters()),
    "false": lambda m: False,
}


OF_MANUAL_STEPS = {"a list", "two", "one with a closure"}
"""What a module that steps by itself may return."""


@pytest.mark.parametrize("base", [Whole, ExtendedAcceleratorModule], ids=["automatic", "manual"])
def test_an_optimizer_that_is_none_is_refused_before_training(base):
    for name, make in RETURNED_OPTIMIZERS.items():
        if base is ExtendedAcceleratorModule and name in OF_MANUAL_STEPS:
            continue
        own = type("Own", (base,), {**vars(Whole), **vars(Base), "training_step": None, "get_optimizer": make})
        own.training_step = Trains.training_step
        trainer = Trainer(HPS, "out/m", checkpoint_every=None, verbose=False)
        with raises_at(ModuleContractError, "Own.get_optimizer"):
            trainer.fit(own(), TensorDataset(torch.ones(4, 2)))
        assert trainer.state.train_step == 0


class ByEpoch:
    """A scheduler that is told the epoch, as timm's are."""

    def step(self, epoch, metric=None):
        raise NotImplementedError

    def state_dict(self):
        return {}


@each(
    "make",
    [
        lambda o: [torch.optim.lr_scheduler.StepLR(o, 1)],
        lambda o: (o, torch.optim.lr_scheduler.StepLR(o, 1)),
        lambda o: {"scheduler": 1, "interval": "epoch"},
        lambda o: torch.optim.lr_scheduler.StepLR,
        lambda o: lambda step: 1.0,
        lambda o: ByEpoch(),
    ],
)
def test_a_scheduler_that_is_none_is_refused_before_training(make):
    module = type(
        "Own", (Trains,), {"get_scheduler": lambda self, optimizer, steps_per_epoch, epochs: make(optimizer)}
    )()
    with raises_at(ModuleContractError, "Own.get_scheduler"):
        Trainer(HPS, "out/m", checkpoint_every=None, verbose=False).fit(module, TensorDataset(torch.ones(4, 2)))


def takes_the_optimizer(self, optimizer):
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


def takes_epochs(self, optimizer, epochs):
    return torch.optim.lr_scheduler.ConstantLR(optimizer, float(epochs == 1))


def takes_anything(self, optimizer, **named):
    return torch.optim.lr_scheduler.ConstantLR(optimizer, float(named == {"steps_per_epoch": 2, "epochs": 1}))


@pytest.mark.parametrize("get_scheduler", [takes_the_optimizer, takes_epochs, takes_anything])
def test_get_scheduler_takes_the_keywords_that_it_names(get_scheduler):
    module = type("Own", (Trains,), {"get_scheduler": get_scheduler})()
    seen = []
    module.on_update_end = lambda: seen.extend(module.scheduler.get_last_lr())
    Trainer(HPS, "out/m", checkpoint_every=None, verbose=False).fit(module, list(torch.ones(4, 2)))
    assert set(seen) == {HPS["optim"]["lr"]}


@pytest.mark.parametrize("wrong", [lambda self: None, lambda self, optimizer, total_steps: None])
def test_get_scheduler_with_other_parameters_is_refused_before_training(wrong):
    module = type("Own", (Trains,), {"get_scheduler": wrong})()
    with raises_at(ModuleContractError, "Own", "get_scheduler(", do="(self, optimizer, steps_per_epoch, epochs)"):
        Trainer(HPS, "out/m", checkpoint_every=None, verbose=False).fit(module, TensorDataset(torch.ones(4, 2)))


@pytest.mark.parametrize("path", ["out/a", ("out/a", "AutoModelForCausalLM"), "hps.yaml"])
@pytest.mark.parametrize("function", ["validate", "test", "predict", "tune"])
def test_a_path_that_only_fit_takes_is_told_how_it_becomes_a_module(function, path):
    trainer = Trainer(HPS, "out/m", verbose=False)
    with raises_at(ModuleContractError, f"{function}(module)", do="AcceleratorModule.from_hf(path, "):
        getattr(trainer, function)(path, TensorDataset(torch.ones(4, 2)))


BESIDE_THE_MODEL = {
    "a parameter": (lambda m: nn.Parameter(torch.ones(1)), "self.part "),
    "a tensor": (lambda m: torch.ones(1, requires_grad=True), "self.part "),
    "a parameter in a list": (lambda m: [1, nn.Parameter(torch.ones(1))], "self.part[1] "),
    "a tensor in a dict": (lambda m: {"a": torch.ones(1, requires_grad=True)}, "self.part['a'] "),
    "a ParameterList": (lambda m: nn.ParameterList([torch.ones(1)]), "self.part "),
    "a layer in a tuple": (lambda m: (nn.Linear(1, 1),), "self.part[0] "),
}


@pytest.mark.parametrize("is_module", [False, True], ids=["plain", "also an nn.Module"])
@pytest.mark.parametrize("part", BESIDE_THE_MODEL)
def test_what_would_not_be_trained_beside_the_model_is_refused(part, is_module):
    make, got = BESIDE_THE_MODEL[part]

    class Own(*((nn.Module, AcceleratorModule) if is_module else (AcceleratorModule,))):
        def __init__(self):
            super().__init__()
            self.model = nn.Linear(1, 1)
            self.part = make(self)

        def training_step(self, batch):
            return self.model(batch).mean()

    with raises_at(ModuleContractError, "Own", got):
        check_module(Own())


def test_what_is_trained_or_cannot_be_beside_the_model_is_allowed():
    class Own(nn.Module, AcceleratorModule):
        def __init__(self):
            super().__init__()
            self.model = nn.Linear(1, 1)
            self.same = self.model
            self.parts = [self.model.weight, nn.Parameter(torch.ones(1), requires_grad=False), "text"]
            self.loss = self.model(torch.ones(1)).sum()
            self.register_buffer("scale", torch.ones(1))

        def training_step(self, batch):
            return self.model(batch).mean()

    check_module(Own())
