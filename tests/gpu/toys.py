"""Modules and data for the suite of GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from accmt import AcceleratorModule, Callback, Trainer

WITHOUT_TRACES: dict[str, Any] = {
    "model_saving": None,
    "checkpoint_every": None,
    "verbose": False,
    "seed": 0,
    "log_every": -1,
    "enable_progress_bar": False,
}
HPS: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 4,
    "optim": {"type": "AdamW", "lr": 1e-2},
    "scheduler": {"type": "CosineAnnealingLR"},
}
CLASSES = 5


class Classifier(AcceleratorModule):
    """A small network with dropout and batch norm, whose every bit depends on all that a checkpoint has to hold.

    Args:
        weighs: What a step says that its loss weighs: "device" a tensor there, "host" a number, None nothing.
    """

    def __init__(self, weighs: str | None = None, width: int = 32) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2), nn.Linear(width, CLASSES)
        )
        self.weighs = weighs

    def training_step(self, batch: Any) -> Any:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.log("twice", loss.detach() * 2)
        self.log("one", 1.0)
        if self.weighs is None:
            return loss
        return {"loss": loss, "weight": (labels >= 0).sum() if self.weighs == "device" else float(len(labels))}

    def validation_step(self, batch: Any) -> Any:
        inputs, labels = batch
        outputs = self.model(inputs)
        return {"loss": nn.functional.cross_entropy(outputs, labels), "accuracy": (outputs, labels)}


def make_data(count: int = 64) -> TensorDataset:
    """Make points `[8]` of some classes."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 8, generator=generator) + labels[:, None], labels)


def train(module: Any, data: Any, settings: dict[str, Any], *, folder: str = "run", **others: Any) -> Trainer:
    """Train a module and return the Trainer; `hps` and `val` are taken out of the other arguments."""
    hps, val = {**HPS, **others.pop("hps", {})}, others.pop("val", None)
    trainer = Trainer(hps, f"{folder}/model", **{**settings, "logging_dir": f"{folder}/logs", **others})
    trainer.fit(module, data, val)
    return trainer


def weights_of(module: AcceleratorModule) -> dict[str, torch.Tensor]:
    """Return the state of a module's model on the host."""
    return {name: tensor.detach().cpu().clone() for name, tensor in module.model.state_dict().items()}


def assert_same_bits(one: AcceleratorModule, other: AcceleratorModule) -> None:
    mine, theirs = weights_of(one), weights_of(other)
    assert mine.keys() == theirs.keys()
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


class AtStep(Callback):
    """Calls a function after an optimizer step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step = step
        self.action = action

    def on_update_end(self) -> None:
        if self.state.global_step == self.step:
            self.action()


class InterruptionError(Exception):
    """What ends a run before its time."""


def interrupt() -> None:
    raise InterruptionError
