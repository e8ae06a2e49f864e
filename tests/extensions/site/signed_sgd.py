"""An optimizer: steps by the sign of the averaged gradient."""

import torch
from torch.optim import Optimizer


class SignedSGD(Optimizer):
    """Lion's simpler relative.

    Args:
        lr: The learning rate.
        momentum: Of the average.
    """

    def __init__(self, params, lr: float = 1e-3, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                    average.lerp_(weight.grad, 1 - group["momentum"])
                    weight.sub_(average.sign(), alpha=group["lr"])
