import copy
import math

import pytest
import torch
from torch.optim import lr_scheduler
from transformers.optimization import get_linear_schedule_with_warmup

from accmt.errors import CheckpointError
from accmt.optimization import ChainedOptimizer, SeveralSchedulers, build_optimizer, build_scheduler
from accmt.optimization.resuming import group_arguments, restore_scheduler
from accmt.options import HyperParameters
from accmt.options.optimizer_and_scheduler_names import scheduler_names

NEEDED = {
    "StepLR": {"step_size": 4},
    "MultiStepLR": {"milestones": [2, 5, 9]},
    "ExponentialLR": {"gamma": 0.9},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3},
    "OneCycleLR": {"max_lr": 0.1},
    "CosineAnnealingLR": {"eta_min": 0.001},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2},
    "LinearWithWarmup": {"warmup_ratio": 0.25},
    "CosineWithWarmup": {"warmup_ratio": 0.25},
    "CosineWithHardRestartsWithWarmup": {"num_warmup_steps": 2, "num_cycles": 2},
    "InverseSQRT": {"num_warmup_steps": 2},
    "PolynomialDecayWithWarmup": {"power": 2},
    "PolynomialLR": {"total_iters": 12, "power": 2},
    "LinearLR": {"total_iters": 10},
    "ConstantLR": {"total_iters": 8},
}
WALKED = [name for name in scheduler_names() if name != "ReduceLROnPlateau"]


class Decay:
    """A factor as an object, whose attributes torch puts into the state."""

    def __init__(self, total):
        self.total = total

    def __call__(self, step):
        return 1 - step / self.total


class Own(lr_scheduler.LRScheduler):
    """A user's schedule that keeps its length under a name of its own, and changes the rate that it finds."""

    def __init__(self, optimizer, num_updates):
        self._end = num_updates
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch == 0:
            return list(self.base_lrs)
        groups = zip(self.optimizer.param_groups, self.base_lrs, strict=True)
        return [group["lr"] - base / self._end for group, base in groups]


class Plain:
    """A user's schedule that is no LRScheduler."""

    def __init__(self, optimizer, total):
        self.optimizer, self.total, self.taken = optimizer, total, 0

    def step(self):
        self.taken += 1
        self.optimizer.param_groups[0]["lr"] *= 0.5

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


def named(name):
    """A schedule of the YAML, as a function of an optimizer and the run's length."""

    def build(optimizer, total):
        hps = HyperParameters(scheduler=name, scheduler_kwargs=NEEDED.get(name, {}))
        return build_scheduler(hps, optimizer, total_steps=total, steps_per_epoch=4)

    return build


def sequence(optimizer, total):
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=total // 4)
    rest = lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - total // 4)
    return lr_scheduler.SequentialLR(optimizer, [warm, rest], milestones=[total // 4])


def chain(optimizer, total):
    linear = lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=total)
    return lr_scheduler.ChainedScheduler([linear, lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer)


def with_object(optimizer, total):
    return lr_scheduler.LambdaLR(optimizer, Decay(total))


BUILDERS = {name: named(name) for name in WALKED}
BUILDERS |= {"SequentialLR": sequence, "ChainedScheduler": chain, "LambdaLR": with_object, "own": Own}
every_schedule = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())


def two_groups(lr=0.1, **arguments):
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "lr": lr / 10}]
    return torch.optim.SGD(groups, lr=lr, **{"momentum": 0.9, **arguments})


def update(optimizer):
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.full_like(weight, 0.3)
    optimizer.step()


def train(optimizer, scheduler, updates, loss=None):
    """Make updates; return what each was made with."""
    made = []
    for _ in range(updates):
        made.append([(float(group["lr"]), group["momentum"]) for group in optimizer.param_groups])
        update(optimizer)
        scheduler.step() if loss is None else scheduler.step(loss)
    return made


def saved_after(optimizer, scheduler):
    """What a checkpoint keeps: copies."""
    return copy.deepcopy((optimizer.state_dict(), scheduler and scheduler.state_dict()))


def resume(optimizer, scheduler, saved, changed=None, *, is_stretched=False):
    built = group_arguments(optimizer)
    optimizer.load_state_dict(saved[0])
    return restore_scheduler(
        optimizer, scheduler, copy.deepcopy(saved[1]), built, changed=changed or {}, is_stretched=is_stretched
    )


def interrupted(build, updates=6, total=12, lr=0.1):
    optimizer = two_groups(lr)
    scheduler = build(optimizer, total)
    train(optimizer, scheduler, updates)
    return saved_after(optimizer, scheduler)


def unbroken(build, updates, total, lr=0.1):
    optimizer = two_groups(lr)
    return train(optimizer, build(optimizer, total), updates)


@every_schedule
def test_with_nothing_changed_the_rates_go_on_bit_for_bit(build):
    optimizer = two_groups()
    scheduler = build(optimizer, 12)
    assert resume(optimizer, scheduler, interrupted(build)) == []
    assert train(optimizer, scheduler, 6) == unbroken(build, 12, 12)[6:]


@every_schedule
@pytest.mark.parametrize("updates", [1, 6, 12])
def test_a_longer_run_goes_on_with_the_rates_of_one_that_was_as_long_from_its_start(build, updates):
    optimizer = two_groups()
    scheduler = build(optimizer, 20)
    assert resume(optimizer, scheduler, interrupted(build, updates), is_stretched=True) == []
    assert train(optimizer, scheduler, 20 - updates) == unbroken(build, 20, 20)[updates:]


@every_schedule
def test_a_shorter_run_comes_to_its_end_too(build):
    optimizer = two_groups()
    scheduler = build(optimizer, 8)
    resume(optimizer, scheduler, interrupted(build), is_stretched=True)
    assert train(optimizer, scheduler, 2) == unbroken(build, 8, 8)[6:]


@every_schedule
@pytest.mark.parametrize("total", [12, 20])
def test_a_new_rate_is_that_of_a_run_which_had_it_from_its_start(build, total):
    optimizer = two_groups(lr=0.04)
    scheduler = build(optimizer, total)
    saved = interrupted(build)
    assert resume(optimizer, scheduler, saved, {"lr": (0.1, 0.04)}, is_stretched=total != 12) == []
    assert train(optimizer, scheduler, 6) == unbroken(build, total, total, lr=0.04)[6:12]


def test_state_of_the_optimizer_stays_when_its_arguments_change():
    saved = interrupted(named("LinearWithWarmup"))
    optimizer = two_groups(lr=0.04)
    resume(optimizer, named("LinearWithWarmup")(optimizer, 12), saved, {"lr": (0.1, 0.04)})
    buffers = [optimizer.state[group["params"][0]]["momentum_buffer"] for group in optimizer.param_groups]
    assert all(torch.equal(ours, saved[0]["state"][i]["momentum_buffer"]) for i, ours in enumerate(buffers))


def test_a_rate_of_zero_can_be_changed():
    def build(optimizer, total):
        return get_linear_schedule_with_warmup(optimizer, 2, total)

    saved = interrupted(build, lr=0.0)
    optimizer = two_groups(lr=0.04)
    scheduler = build(optimizer, 12)
    resume(optimizer, scheduler, saved, {"lr": (0.0, 0.04)})
    assert train(optimizer, scheduler, 6) == unbroken(build, 12, 12, lr=0.04)[6:]


@pytest.mark.parametrize(("old", "new"), [(0.1, 0.04), (0.0, 0.04), (0.1, 0.0)])
def test_without_a_schedule_a_new_rate_holds_in_every_group(old, new):
    optimizer = two_groups(lr=new)
    assert resume(optimizer, None, saved_after(two_groups(lr=old), None), {"lr": (old, new)}) == []
    assert [group["lr"] for group in optimizer.param_groups] == [new, new / 10]


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)


def reduced(lr=0.1):
    """A run whose loss stands still, so that its rate was halved twice."""
    optimizer = two_groups(lr)
    scheduler = plateau(optimizer)
    train(optimizer, scheduler, 5, loss=1.0)
    assert optimizer.param_groups[0]["lr"] == lr / 4
    return saved_after(optimizer, scheduler)


@pytest.mark.parametrize("is_stretched", [False, True])
def test_a_schedule_that_steps_by_a_loss_goes_on_from_its_state(is_stretched):
    optimizer = two_groups()
    scheduler = plateau(optimizer)
    assert resume(optimizer, scheduler, reduced(), is_stretched=is_stretched) == []
    assert (scheduler.best, scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (1.0, 5, 0.025)
    going_on = two_groups()
    assert train(optimizer, scheduler, 5, loss=1.0) == train(going_on, plateau(going_on), 10, loss=1.0)[5:]


def test_a_new_rate_keeps_the_reductions_of_a_schedule_that_steps_by_a_loss():
    optimizer = two_groups(lr=0.2)
    scheduler = plateau(optimizer)
    resume(optimizer, scheduler, reduced(), {"lr": (0.1, 0.2)})
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]
    assert scheduler.best == 1.0


def test_a_rate_of_zero_under_a_schedule_that_steps_by_a_loss_can_be_changed():
    optimizer = two_groups(lr=0.2)
    stopped = two_groups(lr=0.0)
    resume(optimizer, plateau(optimizer), saved_after(stopped, plateau(stopped)), {"lr": (0.0, 0.2)})
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.02])


@pytest.mark.parametrize("changed", [{"lr": (0.1, 0.2)}, {"lr": (None, None), "weight_decay": (None, None)}])
def test_a_group_that_stands_still_leaves_the_reductions_of_the_others(changed):
    def groups(lr):
        optimizer = two_groups(lr)
        for group, rate in zip(optimizer.param_groups, (lr, 0.0), strict=True):
            group["lr"] = group["initial_lr"] = rate
        return optimizer

    first = groups(0.1)
    scheduler = plateau(first)
    train(first, scheduler, 5, loss=1.0)
    saved = saved_after(first, scheduler)
    optimizer = groups(changed["lr"][1] or 0.1)
    resume(optimizer, plateau(optimizer), saved, changed)
    assert [group["lr"] for group in optimizer.param_groups] == [(changed["lr"][1] or 0.1) / 4, 0.0]


def test_a_new_rate_leaves_a_group_with_its_own_beside_one_that_stands_still():
    def groups(lr):
        optimizer = two_groups(lr)
        for group, rate in zip(optimizer.param_groups, (0.0, 0.4), strict=True):
            group["lr"] = group["initial_lr"] = rate
        return optimizer

    first = groups(0.1)
    scheduler = plateau(first)
    train(first, scheduler, 5, loss=1.0)
    optimizer = groups(0.2)
    resume(optimizer, plateau(optimizer), saved_after(first, scheduler), {"lr": (0.1, 0.2)})
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.1]


def test_a_schedule_that_is_none_of_torch_gets_its_state_and_the_new_rate():
    saved = interrupted(Plain, updates=2)
    optimizer = two_groups(lr=0.2)
    scheduler = Plain(optimizer, 12)
    resume(optimizer, scheduler, saved, {"lr": (0.1, 0.2)}, is_stretched=True)
    assert (scheduler.taken, optimizer.param_groups[0]["lr"]) == (2, 0.05)


def test_other_arguments_become_what_each_group_was_built_with():
    def build(decay):
        weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        groups = [{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, weight_decay=decay, betas=(0.9, 1 - decay))

    old = build(0.1)
    update(old)
    optimizer = build(0.2)
    changed = {"weight_decay": (0.1, 0.2), "betas": ([0.9, 0.9], [0.9, 0.8])}
    assert resume(optimizer, None, saved_after(old, None), changed) == []
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.8)


def test_what_did_not_change_keeps_what_a_callback_made_of_it():
    saved = saved_after(two_groups(), None)
    saved[0]["param_groups"][0]["weight_decay"] = 0.5
    optimizer = two_groups(lr=0.2)
    lines = resume(optimizer, None, saved, {"lr": (0.1, 0.2)})
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    place = "weight_decay of the optimizer's parameter group 0"
    assert lines == [f"{place}: keeping the checkpoint's 0.5 instead of the new 0"]


def test_another_rate_in_code_is_told_even_under_a_schedule():
    build = named("LinearWithWarmup")
    optimizer = two_groups(lr=0.2)
    lines = resume(optimizer, build(optimizer, 12), interrupted(build))
    place = "initial_lr of the optimizer's parameter group 0"
    assert lines == [f"{place}: keeping the checkpoint's 0.1 instead of the new 0.2"]


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_momentum_that_a_schedule_drives_stays_driven(name):
    build = named(name)
    optimizer = two_groups(momentum=0.5)
    scheduler = build(optimizer, 12)
    resume(optimizer, scheduler, interrupted(build), {"momentum": (0.9, 0.5)})
    assert train(optimizer, scheduler, 6) == unbroken(build, 12, 12)[6:]


def test_the_choice_of_kernel_is_the_one_of_now_and_the_next_update_works():
    weights = {"foreach": False, "fused": None}
    old = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], **weights)
    update(old)
    optimizer = build_optimizer(
        HyperParameters(optim="AdamW"), torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2))])
    )
    resume(optimizer, None, saved_after(old, None), {"foreach": (False, None), "fused": (None, None)})
    assert (optimizer.param_groups[0]["foreach"], optimizer.param_groups[0]["fused"]) == (None, True)
    update(optimizer)
    assert next(iter(optimizer.state.values()))["step"] == 2


def test_a_step_count_that_a_fused_kernel_cannot_read_is_converted():
    old = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], fused=False)
    update(old)
    saved = saved_after(old, None)
    saved[0]["state"][0]["step"] = saved[0]["state"][0]["step"].double()
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], fused=True)
    resume(optimizer, None, saved, {"fused": (False, True)})
    assert next(iter(optimizer.state.values()))["step"].dtype == torch.float32


def test_adafactor_that_found_its_own_rate_takes_a_given_one():
    parameters = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2, 2))])
    old = build_optimizer(HyperParameters(optim="Adafactor"), parameters)
    update(old)
    optimizer = build_optimizer(HyperParameters(optim="Adafactor", optim_kwargs={"lr": 0.01}), parameters)
    resume(optimizer, None, saved_after(old, None), {"lr": (None, 0.01), "relative_step": (True, False)})
    group = optimizer.param_groups[0]
    assert (group["lr"], group["relative_step"]) == (0.01, False)


def test_a_rate_in_a_tensor_stays_a_tensor():
    def build(optimizer, total):
        return get_linear_schedule_with_warmup(optimizer, 0, total)

    def optimizer_of(lr):
        weight = torch.nn.Parameter(torch.ones(2))
        return torch.optim.AdamW([weight], lr=torch.tensor(lr, dtype=torch.float64))

    old = optimizer_of(0.1)
    old_schedule = build(old, 10)
    for _ in range(5):
        update(old)
        old_schedule.step()
    optimizer = optimizer_of(0.4)
    schedule = build(optimizer, 10)
    rate = optimizer.param_groups[0]["lr"]
    resume(optimizer, schedule, saved_after(old, old_schedule), {"lr": (0.1, 0.4)})
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == pytest.approx(0.2, rel=1e-12)


def test_bounds_that_follow_from_the_length_of_the_run_are_those_of_now():
    def build(optimizer, total):
        bounds = {"max_lr": 1 / total, "base_momentum": 1 / total, "max_momentum": 2 / total}
        return lr_scheduler.OneCycleLR(optimizer, total_steps=total, **bounds)

    optimizer = two_groups()
    scheduler = build(optimizer, 20)
    assert resume(optimizer, scheduler, interrupted(build), is_stretched=True) == []
    assert train(optimizer, scheduler, 14) == unbroken(build, 20, 20)[6:]


@pytest.mark.parametrize("name", ["LinearWithWarmup", "OneCycleLR"])
def test_a_schedule_that_the_checkpoint_does_not_know_begins_at_its_start(name):
    build = named(name)
    optimizer = two_groups()
    scheduler = build(optimizer, 12)
    resume(optimizer, scheduler, saved_after(two_groups(), None))
    assert train(optimizer, scheduler, 12) == unbroken(build, 12, 12)


def test_a_checkpoint_with_a_schedule_goes_on_without_one_at_the_rate_it_had():
    optimizer = two_groups()
    lines = resume(optimizer, None, interrupted(named("ExponentialLR")))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**6)
    assert len(lines) == 1
    assert lines[0].startswith("lr of the optimizer's parameter group 0: keeping the checkpoint's 0.053")


def test_a_step_that_takes_only_options_is_walked():
    class Verbose(lr_scheduler.ExponentialLR):
        def step(self, epoch=None, **options):
            super().step(epoch)

    def build(optimizer, total):
        return Verbose(optimizer, 0.9)

    optimizer = two_groups(lr=0.2)
    scheduler = build(optimizer, 12)
    resume(optimizer, scheduler, interrupted(build), {"lr": (0.1, 0.2)})
    assert math.isclose(optimizer.param_groups[0]["lr"], 0.2 * 0.9**6)


def make_several(step_size):
    optimizers = [two_groups(), two_groups()]
    chained = ChainedOptimizer(optimizers)
    return chained, SeveralSchedulers(
        [lr_scheduler.StepLR(optimizers[0], step_size), lr_scheduler.ExponentialLR(optimizers[1], 0.9)]
    )


@pytest.mark.parametrize("step_size", [4, 5])
def test_of_several_schedulers_only_a_changed_constant_is_said(step_size):
    optimizer, scheduler = make_several(4)
    train(optimizer, scheduler, 3)
    saved = saved_after(optimizer, scheduler)
    optimizer, scheduler = make_several(step_size)
    lines = resume(optimizer, scheduler, saved)
    said = "step_size of the scheduler StepLR: keeping the checkpoint's 4 instead of the new 5"
    assert lines == ([said] if step_size == 5 else [])


def step_on(optimizer, weights, steps):
    for number in range(steps):
        for weight in weights:
            weight.grad = torch.full_like(weight, 0.1 * (number + 1))
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
    ids=lambda one: str(one),
)
def test_an_argument_that_needs_more_state_holds_from_the_next_step_on(kind, argument):
    weights = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(4))]
    before = kind(weights, lr=0.1)
    step_on(before, weights, 2)
    after = kind(weights, lr=0.1, **argument)
    built = group_arguments(after)
    lr_scheduler.StepLR(after, 1)  # which replaces its `step`
    after.load_state_dict(before.state_dict())
    changed = {name: (None, value) for name, value in argument.items()}
    restore_scheduler(after, None, None, built, changed=changed, is_stretched=False)
    kept = copy.deepcopy({name: entry for name, entry in before.state[weights[0]].items() if name != "step"})
    for name, entry in kept.items():
        assert torch.equal(after.state[weights[0]][name], entry)
    step_on(after, weights, 1)
    assert all(torch.isfinite(weight).all() for weight in weights)
    assert after.state.keys() == set(weights)


class Remembering(torch.optim.SGD):
    """Begins a state with something else than zeros."""

    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["step"] = torch.ones(())
                if group["nesterov"]:
                    self.state[weight]["begun"] = weight.detach() + 1


def test_an_argument_whose_state_cannot_be_begun_late_is_refused():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    before = Remembering([weight], lr=0.1)
    step_on(before, [weight], 1)
    after = Remembering([weight], lr=0.1, momentum=0.9, nesterov=True)
    built = group_arguments(after)
    after.load_state_dict(before.state_dict())
    changed = {"nesterov": (False, True), "momentum": (0, 0.9)}
    with pytest.raises(CheckpointError, match="no 'begun' of Remembering, which a changed argument requires"):
        restore_scheduler(after, None, None, built, changed=changed, is_stretched=False)
