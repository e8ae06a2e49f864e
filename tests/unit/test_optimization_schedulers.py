import pytest
import torch
import transformers.optimization
from torch.optim import lr_scheduler

from accmt.errors import HyperParameterError
from accmt.optimization import build_optimizer, build_scheduler
from accmt.options import HyperParameters
from accmt.options.optimizer_and_scheduler_names import scheduler_names
from tests.raising import raises_at

NEEDED = {
    "StepLR": {"step_size": 3},
    "MultiStepLR": {"milestones": [2, 5]},
    "ExponentialLR": {"gamma": 0.9},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3},
    "OneCycleLR": {"max_lr": 0.1},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
}


class TwoNumbers(lr_scheduler.LRScheduler):
    """Wants to know the length of the run as epochs and updates."""

    def __init__(self, optimizer, epochs, steps_per_epoch):
        self.lengths = (epochs, steps_per_epoch)
        super().__init__(optimizer)

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]


def with_schedule(name, kwargs=None, **others):
    return HyperParameters(
        optim_kwargs={"lr": 0.1, "momentum": 0.9}, scheduler=name, scheduler_kwargs=kwargs or {}, **others
    )


def optimizer_of(hps):
    return build_optimizer(hps, torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2))]))


def scheduled(hps, total=10, per_epoch=5):
    optimizer = optimizer_of(hps)
    return optimizer, build_scheduler(hps, optimizer, total_steps=total, steps_per_epoch=per_epoch)


def rates(optimizer, scheduler, updates):
    """The learning rate of each update, and the one after the last."""
    values = []
    for _ in range(updates):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step(*[1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else [])
    return [*values, optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize("name", scheduler_names())
def test_every_schedule_builds_steps_and_continues_from_its_state(name):
    hps = with_schedule(name, NEEDED.get(name))
    optimizer, scheduler = scheduled(hps, total=20)
    rates(optimizer, scheduler, 10)
    resumed_optimizer, resumed = scheduled(hps, total=20)
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert rates(optimizer, scheduler, 10) == rates(resumed_optimizer, resumed, 10)


@pytest.mark.parametrize(
    ("name", "kwargs", "plain"),
    [
        (
            "LinearWithWarmup",
            {"warmup_ratio": 0.1},
            lambda optimizer: transformers.optimization.get_linear_schedule_with_warmup(optimizer, 3, 30),
        ),
        (
            "CosineWithWarmup",
            {"num_warmup_steps": 4},
            lambda optimizer: transformers.optimization.get_cosine_schedule_with_warmup(optimizer, 4, 30),
        ),
        (
            "PolynomialDecayWithWarmup",
            {"num_warmup_steps": 0.5, "power": 2},
            lambda optimizer: transformers.optimization.get_polynomial_decay_schedule_with_warmup(
                optimizer, 15, 30, power=2
            ),
        ),
        ("OneCycleLR", {"max_lr": 0.2}, lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=30)),
        ("CosineAnnealingLR", {}, lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)),
        ("CosineAnnealingLR", {"T_max": 7}, lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)),
        ("LinearLR", {}, lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=5)),
        ("StepLR", {"step_size": 10}, lambda optimizer: lr_scheduler.StepLR(optimizer, 10)),
    ],
)
def test_each_update_has_the_rate_of_the_plain_schedule(name, kwargs, plain):
    hps = with_schedule(name, kwargs)
    optimizer, scheduler = scheduled(hps, total=30)
    reference = optimizer_of(hps)
    assert rates(optimizer, scheduler, 30) == rates(reference, plain(reference), 30)


@pytest.mark.parametrize(
    ("warmup", "total", "updates"),
    [
        ({"warmup_ratio": 0.1}, 30, 3),
        ({"warmup_ratio": 0.1}, 31, 4),
        ({"warmup_ratio": 0.07}, 100, 7),
        ({"warmup_ratio": 1}, 10, 10),
        ({"warmup_ratio": 0}, 10, 0),
        ({"num_warmup_steps": 0.1}, 31, 4),
        ({"num_warmup_steps": 5.0}, 31, 5),
        ({"num_warmup_steps": "5"}, 31, 5),
        ({}, 31, 0),
    ],
)
def test_warm_up_reaches_the_full_rate_after_its_updates_rounded_up(warmup, total, updates):
    values = rates(*scheduled(with_schedule("ConstantWithWarmup", warmup), total=total), total)
    assert values.index(0.1) == updates


def test_a_schedule_stepped_per_epoch_is_counted_in_epochs():
    hps = with_schedule("LinearWithWarmup", {"num_warmup_steps": 1}, step_scheduler_per_epoch=True, epochs=5)
    values = rates(*scheduled(hps, total=35, per_epoch=7), 5)
    assert values == pytest.approx([0, 0.1, 0.075, 0.05, 0.025, 0])


def test_a_schedule_of_ones_own_gets_the_lengths_it_asks_for():
    assert scheduled(with_schedule(TwoNumbers), total=15)[1].lengths == (3, 5)
    assert scheduled(with_schedule(TwoNumbers), total=16)[1].lengths == (4, 5)
    assert scheduled(with_schedule(TwoNumbers, step_scheduler_per_epoch=True), total=15)[1].lengths == (3, 1)


@pytest.mark.parametrize(
    ("name", "kwargs", "what", "do"),
    [
        ("LinearWithWarmup", {"num_warmup_steps": 3}, "num_training_steps", "`max_steps:`"),
        ("ConstantWithWarmup", {"warmup_ratio": 0.1}, "warmup_ratio", "`num_warmup_steps:`"),
        ("OneCycleLR", {"max_lr": 0.1}, "total_steps", ""),
        ("CosineAnnealingLR", {}, "T_max", ""),
        (TwoNumbers, {}, "steps_per_epoch", ""),
    ],
)
def test_a_schedule_that_needs_an_unknown_length_says_what_to_write(name, kwargs, what, do):
    with raises_at(HyperParameterError, "HyperParameters scheduler", expected=what, do=do):
        scheduled(with_schedule(name, kwargs), total=None, per_epoch=None)


def test_a_refusal_names_the_place_and_the_reason():
    hps = HyperParameters(optim="Adagrad", scheduler="CyclicLR", scheduler_kwargs={"base_lr": 0.1, "max_lr": 1.0})
    with raises_at(HyperParameterError, "HyperParameters scheduler"):
        scheduled(hps)


def test_a_schedule_needs_an_optimizer_with_a_rate():
    with raises_at(HyperParameterError, "HyperParameters scheduler"):
        scheduled(HyperParameters(optim="Adafactor", scheduler="LinearWithWarmup"))
