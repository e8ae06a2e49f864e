"""A run that is compared with another one; it is copied beside `recipe.py` into a project folder.

train.py <settings as JSON>, with ACCMT_TEST_PLANT naming what it does differently without any record of it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from typing import Any

import torch
from recipe import FACTOR
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from accmt import AcceleratorModule, Callback, Trainer
from accmt.processes import process_index

PLANT = os.environ.get("ACCMT_TEST_PLANT", "")
SLIGHTLY = 1 + 1e-3


class Small(AcceleratorModule):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        if PLANT == "initial weight":
            with torch.no_grad():
                self.model[2].bias += 1e-3
        if PLANT == "type of the weights":
            self.model.double()

    def step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = (values.to(self.model[0].weight.dtype) for values in batch)
        loss = FACTOR * nn.functional.mse_loss(self.model(inputs), targets)
        is_other = PLANT in ("version", "hardware", "threads") or (PLANT == "loss" and self.state.global_step >= 3)
        return loss * SLIGHTLY if is_other else loss

    def collate_fn(self, samples: list[Any]) -> Any:
        inputs, targets = default_collate(samples)
        if PLANT == "batch of process 1" and process_index() == 1 and self.state.global_step >= 3:
            inputs[0, 0] += 1e-3
        return [inputs, targets]


class Planted(Callback):
    """Spoils something at step 4."""

    def on_after_backward(self) -> None:
        if PLANT == "gradient" and self.state.global_step == 3:
            self.module.model[0].bias.grad *= SLIGHTLY

    def on_after_optimizer_step(self) -> None:
        if PLANT == "optimizer state" and self.state.global_step == 3:
            self.module.optimizer.state[self.module.model[2].weight]["exp_avg"] *= SLIGHTLY

    def on_update_end(self) -> None:
        if PLANT == "killed" and self.state.global_step == 7:
            os._exit(9)


def make_points(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 5, generator=generator)
    if PLANT == "value in the data":
        inputs[7, 2] += 1e-3
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def main(settings: dict[str, Any]) -> None:
    versions = importlib.metadata.version
    if PLANT == "version":
        importlib.metadata.version = lambda name: "0.1" if name == "numpy" else versions(name)
        sys.modules["accmt.addons.flight_recorder.facts"].version = importlib.metadata.version
    if PLANT == "hardware":
        torch.backends.cpu.get_cpu_capability = lambda: "AVX1024"
    torch.set_num_threads(2 if PLANT == "threads" else 1)
    hps = {"epochs": 2, "batch_size": 4, "optim": {"type": "AdamW", "lr": 0.01, "betas": [0.9, 0.999]}}
    if PLANT == "order":
        settings["sampler"] = list(range(23, -1, -1))
    trainer = Trainer(
        {**hps, **settings.pop("hps", {})},
        "out/model",
        model_saving=None,
        verbose=False,
        ledger={"every": 1, "on_difference": "warn"},
        checkpoint_every="4 steps",
        checkpoint_options={"async_checkpointing": False},
        callbacks=Planted(),
        **{"seed": 3, "run_name": "run", "resume": False, **settings},
    )
    trainer.fit(Small(), make_points(25 if PLANT == "another row" else 24))
    trainer.close()


if __name__ == "__main__":
    import accmt.addons.flight_recorder.facts  # noqa: F401 - before a version is planted

    main(json.loads(sys.argv[1]))
