"""A run that is compared with another one; it is copied beside `recipe.py` into a project folder.

train.py <settings as JSON>: the batch size, and what the run does differently without any record of it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from recipe import FACTOR
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from accmt import AcceleratorModule, Callback, Trainer
from accmt.processes import process_index

SETTINGS = json.loads(sys.argv[1])


class Small(AcceleratorModule):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))

    def step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return FACTOR * nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def collate_fn(self, samples: list[Any]) -> Any:
        inputs, targets = default_collate(samples)
        if SETTINGS["plant"] == "batch of process 1" and process_index() == 1 and self.state.global_step >= 3:
            inputs[0, 0] += 1e-3
        return [inputs, targets]


class Planted(Callback):
    """Spoils a gradient at step 4."""

    def on_after_backward(self) -> None:
        if SETTINGS["plant"] == "gradient" and self.state.global_step == 3:
            self.module.model[0].bias.grad *= 1 + 1e-3


def main() -> None:
    inputs = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
    own: dict[str, Any] = {"model_saving": None, "verbose": False, "seed": 3, "run_name": "run"}
    hps = {"epochs": 2, "batch_size": SETTINGS["batch_size"], "optim": {"type": "AdamW", "lr": 0.01}}
    ledger = {"every": 1, "on_difference": "warn"}
    trainer = Trainer(hps, "out/model", checkpoint_every=None, ledger=ledger, callbacks=Planted(), **own)
    trainer.fit(Small(), TensorDataset(inputs, inputs.sum(1, keepdim=True)))
    trainer.close()


if __name__ == "__main__":
    main()
