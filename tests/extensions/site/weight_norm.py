"""A monitored value: the norm of the weights, in each row of the log."""

import torch

from accmt import Callback


class WeightNorm(Callback):
    """Is a callback, so it may look at any moment of a run; `measure` is called when a row is due."""

    def measure(self) -> dict[str, float]:
        norms = [weight.detach().norm() for weight in self.module.unwrapped_model.parameters()]
        return {"weight_norm": float(torch.stack(norms).norm())}
