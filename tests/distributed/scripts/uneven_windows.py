"""Trains on 13 samples in batches of 4 with steps that processes do not finish alike; writes weights and windows.

PYTHONPATH=. torchrun --nproc-per-node 2 uneven_windows.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tests.many_runs  # noqa: F401
from accmt import AcceleratorModule, Callback, ExtendedAcceleratorModule, Trainer
from accmt.processes import gather_objects, is_main_process
from accmt.sharded_tensors import make_whole
from tests.toys import Record

SAMPLES, LR = 13, 0.1
IS_SHARDED = "ACCELERATE_USE_FSDP" in os.environ


def make_data() -> TensorDataset:
    """Make inputs `[13, 3]`, and the number of each sample."""
    return TensorDataset(torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1)), torch.arange(SAMPLES))


class Heads(nn.Module):
    """Has two heads, of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(3, 4), nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, inputs: Tensor, head: int = 0) -> Tensor:
        return self.heads[head](self.body(inputs).tanh())


class Stepping(AcceleratorModule):
    """Notes the samples of each optimizer step; a borrowed batch has none that another process's has not."""

    def __init__(self) -> None:
        self.model = Heads()
        self.trained: list[list[int]] = Record()

    def loss_of(self, inputs: Tensor, numbers: Tensor, head: int = 0) -> Tensor:
        outputs = self.model(inputs, head)
        self.trained[-1] += [[int(number), head] for number in numbers]
        return (outputs - numbers[:, None]).square().mean()


class Leaving(Stepping):
    """Returns None for some batches, after it has called the model."""

    def training_step(self, batch: Any) -> Tensor | None:
        inputs, numbers = batch
        if int(numbers[0]) in (4, 12):
            self.model(inputs)
            return None
        return self.loss_of(inputs, numbers)


class Choosing(Stepping):
    """Uses a head that the batch decides."""

    def training_step(self, batch: Any) -> Tensor:
        inputs, numbers = batch
        return self.loss_of(inputs, numbers, head=int(numbers[0]) // 4 % 2)


class Manual(ExtendedAcceleratorModule, Stepping):
    """Makes its own steps."""

    def training_step(self, batch: Any) -> None:
        self.backward(self.loss_of(*batch))
        self.step_optimizer()
        self.zero_grad()


class Windows(Callback):
    """Begins a list of samples with each optimizer step."""

    def __init__(self, module: Stepping) -> None:
        self.trained = module.trained

    def on_fit_start(self) -> None:
        self.trained.append([])

    def on_after_optimizer_step(self) -> None:
        self.trained.append([])


def train(module: Any, folder: Path, accumulation: int) -> dict[str, Any]:
    """Train, and return the weights and the samples of each optimizer step over all processes."""
    unused = None if IS_SHARDED else {"ddp": {"find_unused_parameters": True}}
    settings = {
        "grad_accumulation_steps": accumulation,
        "shuffle_train": False,
        "verbose": False,
        "parallelism": unused,
    }
    hps = {"epochs": 2, "batch_size": 4, "optim": {"type": "SGD", "lr": LR}}
    saved_nothing = {"model_saving": None, "checkpoint_every": None}
    trainer = Trainer(hps, folder, logging_dir=folder, callbacks=Windows(module), **saved_nothing, **settings)
    state = trainer.fit(module, make_data())
    weights = [make_whole(weight.detach()).flatten() for weight in module.model.parameters()]
    windows = [
        sorted({tuple(sample) for own in every for sample in own})
        for every in zip(*gather_objects(module.trained), strict=True)
    ]
    return {"weights": torch.cat(weights).tolist(), "windows": windows[:-1], "samples": state.samples_seen}


def main(result: str, folder: str) -> None:
    """Run each case."""
    found = {
        "leaving": train(Leaving(), Path(folder) / "leaving", 3),
        "manual": train(Manual(), Path(folder) / "manual", 1),
    }
    if not IS_SHARDED:  # whose backward gathers the weights of every part
        found["choosing"] = train(Choosing(), Path(folder) / "choosing", 1)
    if is_main_process():
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
