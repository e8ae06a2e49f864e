"""Optimizers around another one, as libraries write them: the plain loop's weights, and resumed bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from accmt import AcceleratorModule, ExtendedAcceleratorModule
from tests.toys import InterruptAt, InterruptionError, make_points, make_trainer

EPOCHS, BATCH_SIZE, SAMPLES = 2, 2, 12


class SAM(torch.optim.Optimizer):
    """Sharpness-aware, as published: the base has the groups, and momentum that `state_dict` leaves out.

    Source: https://github.com/davda54/sam.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["before"] = parameter.data.clone()
            parameter.add_(parameter.grad * self.param_groups[0]["rho"] / norm)
        self.zero_grad()
        torch.enable_grad()(closure)()
        for parameter in parameters:
            parameter.data = self.state[parameter]["before"]
        self.base.step()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.base.param_groups = self.param_groups


class Around(torch.optim.Optimizer):
    """Passes on to another optimizer, without the constructor of torch."""

    def __init__(self, parameters: Any) -> None:
        self.base = SGD(parameters, lr=0.1, momentum=0.9)
        self._optimizer_step_pre_hooks: dict[int, Any] = {}
        self._optimizer_step_post_hooks: dict[int, Any] = {}

    state = property(lambda self: self.base.state)
    param_groups = property(lambda self: self.base.param_groups)
    defaults = property(lambda self: self.base.defaults)

    def step(self, closure: Any = None) -> None:
        self.base.step()

    def zero_grad(self) -> None:
        self.base.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(state)


class Lookahead(Around):
    """Goes back to slow weights every third step, and has them in a nested `state_dict`, by group and number."""

    param_groups = defaults = state = None

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups, self.defaults, self.state = self.base.param_groups, self.base.defaults, self.base.state
        self.slow = {(0, number): item.detach().clone() for number, item in enumerate(self.param_groups[0]["params"])}
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.num_steps += 1
        if self.num_steps % 3 == 0:
            for slow, parameter in zip(self.slow.values(), self.param_groups[0]["params"], strict=True):
                parameter.copy_(slow.lerp_(parameter, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "slow": self.slow, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(state["base"])
        self.slow, self.num_steps = state["slow"], state["num_steps"]


class ScheduleFree:
    """Schedule-free as `ScheduleFreeWrapper` is: no optimizer of torch, and its mode is not in its state.

    Source: https://github.com/facebookresearch/schedule_free.
    """

    def __init__(self, parameters: Any) -> None:
        self.base, self.trains = SGD(parameters, lr=0.1), False

    param_groups = property(lambda self: self.base.param_groups)
    zero_grad = Around.zero_grad
    state_dict = Around.state_dict
    load_state_dict = Around.load_state_dict

    @torch.no_grad()
    def _move(self, weight: float) -> None:
        for parameter, state in self.base.state.items():
            parameter.lerp_(state["z"], weight)

    def train(self) -> None:
        if not self.trains:
            self._move(0.1)
        self.trains = True

    def eval(self) -> None:
        if self.trains:
            self._move(1 - 1 / 0.9)
        self.trains = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["k"] = group.get("k", 0) + 1
        for parameter in group["params"]:
            z = self.base.state[parameter].setdefault("z", parameter.clone())
            mean = parameter.lerp(z, 1 - 1 / 0.9)
            z.sub_(parameter.grad, alpha=group["lr"])
            parameter.copy_(mean.lerp_(z, 1 / group["k"]).lerp(z, 0.1))


KINDS = [(kind, by_hand) for kind in (SAM, Around, Lookahead, ScheduleFree) for by_hand in (True, False)]
KINDS.remove((SAM, False))  # it needs a closure


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class Built:
    def __init__(self, kind: Any) -> None:
        self.model, self.kind = build(), kind

    def get_optimizer(self) -> Any:
        return self.kind(self.model.parameters())

    def get_scheduler(self, optimizer: Any) -> Any:
        return None if self.kind is ScheduleFree else CosineAnnealingLR(optimizer, 15)


class Automatic(Built, AcceleratorModule):
    def training_step(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.model(batch[0]), batch[1])


class Manual(Built, ExtendedAcceleratorModule):
    def training_step(self, batch: Any) -> torch.Tensor:
        def closure() -> torch.Tensor:
            loss = mse_loss(self.model(batch[0]), batch[1])
            self.backward(loss)
            return loss

        loss = closure()
        self.optimizer.step(closure)
        self.optimizer.zero_grad()
        return loss


def train(kind: Any, path: str, *, by_hand: bool, stop: int | None = None, **settings: Any) -> dict[str, torch.Tensor]:
    module, callbacks = (Manual if by_hand else Automatic)(kind), [] if stop is None else [InterruptAt(stop)]
    hps = {"epochs": EPOCHS, "batch_size": BATCH_SIZE}
    trainer = make_trainer(
        hps, path, checkpoint_every="step", shuffle_train=False, callbacks=callbacks, verbose=False, **settings
    )
    trainer.fit(module, make_points(SAMPLES))
    return module.model.state_dict()


@pytest.mark.parametrize(("kind", "by_hand"), KINDS)
def test_an_optimizer_around_another_one_trains_as_in_a_plain_loop(kind: Any, *, by_hand: bool) -> None:
    model = build()
    optimizer = kind(model.parameters())
    scheduler = None if kind is ScheduleFree else CosineAnnealingLR(optimizer, 15)
    if kind is ScheduleFree:
        optimizer.train()
    for inputs, targets in [*DataLoader(make_points(SAMPLES), BATCH_SIZE)] * EPOCHS:

        def closure(inputs=inputs, targets=targets) -> None:
            mse_loss(model(inputs), targets).backward()

        closure()
        optimizer.step(closure)
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    if kind is ScheduleFree:
        optimizer.eval()
    for name, weight in train(kind, "out/plain", by_hand=by_hand).items():
        assert torch.equal(weight, model.state_dict()[name]), name


@pytest.mark.parametrize(("kind", "by_hand"), KINDS)
def test_an_optimizer_around_another_one_is_resumed_bit_for_bit(kind: Any, *, by_hand: bool) -> None:
    whole = train(kind, "out/whole", by_hand=by_hand)
    with pytest.raises(InterruptionError):
        train(kind, "out/part", by_hand=by_hand, stop=7)
    for name, weight in train(kind, "out/part", by_hand=by_hand, resume=True).items():
        assert torch.equal(weight, whole[name]), name
