"""An optimizer that trains other weights than those that are evaluated, as schedule-free ones do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class FreeSGD(torch.optim.Optimizer):
    """SGD without a schedule: gradients are taken at y, between z, which steps, and their mean x, which is evaluated.

    Source: Defazio et al. 2024, The Road Less Scheduled (https://arxiv.org/abs/2405.15682), equations 4 to 6.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def train(self) -> None:
        self._move(train=True)

    def eval(self) -> None:
        self._move(train=False)

    @torch.no_grad()
    def _move(self, *, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train:
                group["train_mode"] = train
                weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("the optimizer is not in train mode")
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                z = self.state[parameter].setdefault("z", parameter.clone())
                x = parameter.lerp(z, 1 - 1 / group["beta"])
                z.sub_(parameter.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["k"])
                parameter.copy_(x.lerp(z, 1 - group["beta"]))
