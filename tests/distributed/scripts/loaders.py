"""Batch norm over processes, datamodules and reloaded loaders on several processes; writes what came of it.

torchrun --nproc-per-node 2 loaders.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from accmt import AcceleratorModule, Trainer
from accmt.engine import sync_batchnorm
from accmt.processes import gather_objects, is_main_process, process_index
from tests.toys import Record

SAMPLES = 9  # with batches of 2 on 2 processes the last micro-batch has one sample, and one process none
HPS: dict[str, Any] = {"epochs": 2, "batch_size": 2, "optim": {"type": "SGD", "lr": 0.1}}
QUIET: dict[str, Any] = {"model_saving": None, "checkpoint_every": None, "verbose": False, "seed": 0}


def make_series(count: int = SAMPLES) -> TensorDataset:
    """Make series `[2, 5]` of different sizes, and the targets of each."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 2, 5, generator=generator) * torch.arange(1, count + 1).reshape(-1, 1, 1)
    return TensorDataset(inputs, inputs.mean((1, 2)).unsqueeze(1).sign())


def build_model() -> nn.Sequential:
    """Build a network in which the statistics of a batch matter."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Tanh(), nn.Flatten(), nn.Linear(15, 1))


class Normed(AcceleratorModule):
    """Trains it, and notes of what kind its batch norm is in each step."""

    def __init__(self) -> None:
        self.model = build_model()
        self.kinds: list[str] = Record()

    def step(self, batch: Any) -> Any:
        inputs, targets = batch
        if self.model.training:
            self.kinds.append(type(self.unwrapped_model[1]).__name__)
        return nn.functional.mse_loss(self.model(inputs), targets)


def normalize_together(layer: nn.SyncBatchNorm, inputs: torch.Tensor) -> torch.Tensor:
    """Do on CPUs what `SyncBatchNorm` does on GPUs: normalize by mean and variance over all processes."""
    if not layer.training:
        return nn.BatchNorm1d.forward(layer, inputs)
    sums = torch.cat([torch.tensor([inputs.numel() / inputs.shape[1]]), inputs.sum((0, 2))])
    count, total = all_reduce(sums).split([1, inputs.shape[1]])
    centered = inputs - (total / count).reshape(1, -1, 1)
    variance = all_reduce(centered.square().sum((0, 2))) / count
    with torch.no_grad():
        layer.num_batches_tracked += 1
        layer.running_mean.lerp_(total / count, layer.momentum)
        layer.running_var.lerp_(variance * count / (count - 1), layer.momentum)
    normalized = centered / (variance.reshape(1, -1, 1) + layer.eps).sqrt()
    return normalized * layer.weight.reshape(1, -1, 1) + layer.bias.reshape(1, -1, 1)


def train_normed(folder: Path, accumulation: int) -> dict[str, Any]:
    """Train with synchronized batch norm."""
    module = Normed()
    settings = {**QUIET, "sync_batchnorm": True, "shuffle_train": False, "grad_accumulation_steps": accumulation}
    trainer = Trainer(HPS, folder / "normed", **settings)
    state = trainer.fit(module, make_series(), make_series(3))
    return {
        "weights": {name: tensor.tolist() for name, tensor in module.model.state_dict().items()},
        "kinds": module.kinds,
        "kind_after": type(module.model[1]).__name__,
        "updates": state.global_step,
        "val_loss": state.metrics["val_loss"],
    }


def refuse_on_cpus(folder: Path) -> str:
    """Return what is said where there are no GPUs."""
    try:
        Trainer(HPS, folder / "refused", sync_batchnorm=True, **QUIET).fit(Normed(), make_series())
    except ValueError as error:
        return str(error)
    return "nothing"


class Data:
    """A datamodule whose data are prepared slowly, in a file."""

    def __init__(self, file: Path, *, is_broken: bool = False) -> None:
        self.file = file
        self.is_broken = is_broken
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")
        if self.is_broken:
            raise OSError("no room for the data")
        time.sleep(0.3)
        self.file.write_text("8")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage} {self.file.read_text()}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        return make_series(int(self.file.read_text()))


def use_datamodule(folder: Path) -> dict[str, Any]:
    """Train on what a datamodule makes, and on what one fails to make."""
    data, error = Data(folder / "count.txt"), ""
    state = Trainer(HPS, folder / "given", **QUIET).fit(Normed(), datamodule=data)
    try:
        Trainer(HPS, folder / "broken", **QUIET).fit(Normed(), datamodule=Data(folder / "none.txt", is_broken=True))
    except OSError as raised:
        error = str(raised)
    return {"calls": data.calls, "samples": state.samples_seen, "error": error}


class Unequal(Normed):
    """Has data of its own on each process, of another length in each epoch."""

    def get_train_dataloader(self) -> Any:
        return make_series([3 + process_index(), 5 - process_index()][self.state.epoch])


def reload(folder: Path) -> list[int]:
    """Reload loaders of unequal length."""
    trainer = Trainer(
        HPS, folder / "reload", reload_dataloaders_every_n_epochs=1, data_options={"shard": False}, **QUIET
    )
    state = trainer.fit(Unequal())
    return [state.global_step, state.samples_seen]


def main() -> None:
    """Run every case."""
    result, folder = Path(sys.argv[1]), Path(sys.argv[2])
    own: dict[str, Any] = {"refusal": refuse_on_cpus(folder)}
    # Both refuse CPUs; nothing else of the run is another one than on GPUs.
    sync_batchnorm._require_gpu = DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None
    nn.SyncBatchNorm.forward = normalize_together
    own["normed"] = {accumulation: train_normed(folder, accumulation) for accumulation in (1, 2)}
    own["given"], own["reloaded"] = use_datamodule(folder), reload(folder)
    every = gather_objects(own)
    if is_main_process():
        result.write_text(json.dumps(every))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
