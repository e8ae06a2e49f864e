"""Runs that are interrupted and continued, beside runs that are not."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

from accmt import AcceleratorModule, Trainer, read_history
from tests.toys import InterruptAt, InterruptionError

HPS: dict[str, Any] = {
    "epochs": 3,
    "batch_size": 4,
    "optim": {"type": "AdamW", "lr": 0.01},
    "scheduler": {"type": "CosineAnnealingLR"},
}
SAMPLES = 22


class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points `[3]` with noise of all three generators, drawn anew at each fetch; counts its fetches."""

    def __init__(self, count: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(1)
        self.points = torch.randn(count, 3, generator=generator)
        self.fetched: list[int] = []

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.fetched.append(index)
        point = self.points[index]
        noise = torch.rand(3) + float(np.random.rand()) + random.random()  # noqa: NPY002 - as users do
        return point + 0.1 * noise, point.sum().reshape(1)

    def __len__(self) -> int:
        return len(self.points)


class Fragile(AcceleratorModule):
    """A network with dropout and batch norm, whose every bit depends on all that a checkpoint has to hold."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))

    def step(self, batch: Any) -> Any:
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs), targets)


def make(path: str, hps: dict[str, Any] | None = None, **settings: Any) -> Trainer:
    settings = {"checkpoint_every": "2 steps", "seed": 3, "log_every": 2, "verbose": False, **settings}
    return Trainer({**HPS, **(hps or {})}, path, **settings)


def train(path: str, *, stop: int | None = None, module: Any = None, data: Any = None, **settings: Any) -> Any:
    """Train, to the end or to an interruption; return (trainer, module)."""
    callbacks = [*settings.pop("callbacks", ()), *([] if stop is None else [InterruptAt(stop)])]
    trainer = make(path, callbacks=callbacks, **settings)
    module = Fragile() if module is None else module
    with contextlib.suppress(InterruptionError):
        trainer.fit(module, Augmented() if data is None else data, Augmented(9))
    return trainer, module


def state_of(trainer: Trainer, module: Any) -> dict[str, Any]:
    """Return everything by which two runs can differ at their end."""
    path = trainer.settings.model_folder / "model.safetensors"
    optimizer = trainer.run.stepper.optimizer.state_dict()["state"]
    return {
        "model": {name: tensor.clone() for name, tensor in module.model.state_dict().items()},
        "optimizer": {f"{i}.{name}": value for i, state in optimizer.items() for name, value in state.items()},
        "counters": trainer.state.state_dict(),
        "best": dict(trainer.state.best),
        "lr": [group["lr"] for group in trainer.run.stepper.optimizer.param_groups],
        "rows": [(row["step"], row["values"]) for row in read_history(trainer.log_dir) if "values" in row],
        "saved": load_file(path) if path.exists() else {},
    }


def assert_same(first: dict[str, Any], second: dict[str, Any], *, but: tuple[str, ...] = ()) -> None:
    """Compare two ends bit by bit."""
    for part in first.keys() - set(but):
        if part in ("model", "optimizer", "saved"):
            assert first[part].keys() == second[part].keys()
            different = [name for name, value in first[part].items() if not torch.equal(value, second[part][name])]
            assert not different, f"{part}: {different}"
        else:
            assert first[part] == second[part], part
