"""Parts of runs that are interrupted and continued; writes which samples each process saw in each part.

torchrun --nproc-per-node 2 resume.py RESULT.json PARTS, with PARTS a JSON list of
["FOLDER", BATCH_SIZE, ACCUMULATION, STOP_AT_UPDATE or null, SETTINGS]
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import Dataset

from accmt import AcceleratorModule, Callback, Trainer
from accmt.processes import gather_from_data, is_main_process
from accmt.sharded_tensors import make_whole
from tests.splitting import is_split, split
from tests.toys import Record

SAMPLES = 118
EPOCHS = 2


class Indexed(Dataset[tuple[torch.Tensor, int]]):
    """Points with their index."""

    def __init__(self) -> None:
        self.points = torch.randn(SAMPLES, 24, generator=torch.Generator().manual_seed(1))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.points[index], index

    def __len__(self) -> int:
        return SAMPLES


def build_model(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(400, 400), nn.GELU(), nn.Dropout(dropout))]
    return nn.Sequential(nn.Linear(24, 400), nn.LayerNorm(400), *layers, nn.Linear(400, 1))


class Recording(AcceleratorModule):
    """Writes down which samples it trained on. Large enough that gradients lie in several buckets.

    Args:
        drifts: Whether the loss depends on an attribute that is another on each process.
    """

    def __init__(self, dropout: float, *, drifts: bool) -> None:
        if not is_split():
            self.model = build_model(dropout)
        self.dropout, self.drifts = dropout, drifts
        self.mean = torch.zeros(24)
        self.process_state = ("mean",) if drifts else ()
        self.seen: list[tuple[int, int, list[int]]] = Record()

    def configure_model(self) -> None:
        styles = {"2": ColwiseParallel(), "5": RowwiseParallel(), "8": ColwiseParallel(output_layouts=Replicate())}
        self.model = split(build_model(self.dropout), styles)

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, indices = batch
        self.seen.append((self.state.epoch, self.state.train_step, indices.tolist()))
        if self.drifts:
            self.mean.lerp_(inputs.mean(0), 0.1)
        return nn.functional.mse_loss(self.model(inputs), (inputs - self.mean).sum(1, keepdim=True))


class StopAt(Callback):
    """Ends the run in the middle of a window, on all processes."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_epoch_start(self) -> None:
        self._stop_if_due()

    def on_before_training_step(self) -> None:
        self._stop_if_due()

    def _stop_if_due(self) -> None:
        if self.state.global_step == self.update:
            raise InterruptedError


def train(
    folder: str, batch_size: int, accumulation: int, stop: int | None, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train a new module from the newest checkpoint in `folder`, to the end or to an update."""
    settings = settings or {}
    dropout, drifts = settings.pop("dropout", 0.1), settings.pop("drifts", False)
    trainer = Trainer(
        {
            "epochs": EPOCHS,
            "batch_size": batch_size,
            "optim": {"type": "AdamW", "lr": 1e-3},
            "scheduler": {"type": "CosineAnnealingLR"},
        },
        f"{folder}/model",
        resume="auto",
        checkpoint_every="epoch" if stop is None else f"{stop} steps",
        checkpoint_options={"max_checkpoints": 2},
        grad_accumulation_steps=accumulation,
        seed=5,
        model_saving=None,
        verbose=False,
        logging_dir=f"{folder}/logs",
        callbacks=[begin := Begin(), *([] if stop is None else [StopAt(stop)])],
        **settings,
    )
    module = Recording(dropout, drifts=drifts)
    with contextlib.suppress(InterruptedError):
        trainer.fit(module, Indexed())
    weights = xxhash.xxh3_64()
    for tensor in module.unwrapped_model.state_dict().values():
        weights.update(make_whole(tensor).contiguous().numpy().data)
    return {
        "seen": gather_from_data(module.seen),
        "began": begin.counters,
        "ended": trainer.state.state_dict(),
        "weights": weights.hexdigest(),
        "total": trainer.run.total_steps,
        "last_loss": trainer.run.running_averages.epoch_loss,
    }


def main(result: str, parts: str) -> None:
    outcomes = [train(*part) for part in json.loads(parts)]
    if is_main_process():
        Path(result).write_text(json.dumps(outcomes))


class Begin(Callback):
    """Writes down the counters and the rate with which the run begins."""

    counters: dict[str, Any]

    def on_fit_start(self) -> None:
        self.counters = {**self.state.state_dict(), "lr": self.module.optimizer.param_groups[0]["lr"]}


if __name__ == "__main__":
    main(*sys.argv[1:])
