"""Runs on a mixture of three sources: plain, split by tokens, with a stream, and interrupted; writes what came of it.

torchrun --nproc-per-node 2 mixtures.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import tests.many_runs  # noqa: F401
from accmt import AcceleratorModule, Trainer, read_history
from accmt.processes import gather_objects, is_main_process
from tests.resume.unbroken import InterruptAt, InterruptionError
from tests.toys import Record

SIZES = {"news": 10, "code": 14, "chat": 31}
GLOBAL_BATCH = 6


class Source(Dataset[torch.Tensor]):
    """Its samples are their positions in all sources."""

    def __init__(self, begin: int, size: int) -> None:
        self.begin, self.size = begin, size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.begin + index)])

    def __len__(self) -> int:
        return self.size


class Stream(IterableDataset[torch.Tensor]):
    """The samples of a source, in order."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.source[index] for index in range(len(self.source)))


class Points(AcceleratorModule):
    """Predicts twice a number; samples have weights of their own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1).double()
        self.seen: list[list[int]] = Record()

    def training_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the losses of samples, weighted."""
        self.seen.append(batch.flatten().int().tolist())
        inputs = batch.double() / 100
        losses = (self.model(inputs) - 2 * inputs).square().squeeze(1)
        weights = 1 + batch.flatten().int() % 4
        return {
            "loss": (losses * weights).sum() / weights.sum(),
            "weight": weights.sum(),
            "losses": losses,
            "weights": weights,
        }

    def length_of(self, sample: torch.Tensor) -> int:
        """Return 1 to 5."""
        return 1 + int(sample) % 5


def train(
    folder: Path, processes: int, hps: dict[str, Any] | None = None, *, streams: bool = False, **settings: Any
) -> dict[str, Any]:
    """Train on the mixture, and return what came of it."""
    begins = [0, 10, 24]
    sources: dict[str, Any] = {
        name: Source(begin, size) for (name, size), begin in zip(SIZES.items(), begins, strict=True)
    }
    if streams:
        sources["chat"] = Stream(sources["chat"])
    values = {"epochs": 2, "batch_size": GLOBAL_BATCH // processes, "optim": {"type": "SGD", "lr": 0.1}}
    trainer = Trainer(
        {**values, "data": {"mix": {"news": 0.25, "code": 0.35, "chat": "rest"}}, **(hps or {})},
        str(folder / "model"),
        logging_dir=folder / "logs",
        checkpoint=str(folder / "checkpoints"),
        model_saving=None,
        log_every=2,
        grad_accumulation_steps=2,
        seed=1,
        verbose=False,
        **settings,
    )
    module = Points()
    trainer.fit(module, sources)
    every = (row.get("values", {}) for row in read_history(trainer.run.tracking.run_folder))
    return {
        "rows": [values for values in every if "train_loss" in values],
        "weights": [parameter.tolist() for parameter in module.model.parameters()],
        "seen": gather_objects(module.seen),
    }


def main(result: Path, folder: Path) -> None:
    """Train in each way, and write what came of it."""
    count = int(os.environ["WORLD_SIZE"])
    plain = train(folder / "plain", count)
    cut = train(folder / "cut", count, {"max_tokens": 9})
    streams = train(folder / "streams", count, streams=True)
    cut_streams = train(folder / "cut_streams", count, {"max_tokens": 9}, streams=True)
    try:
        train(folder / "parts", count, checkpoint_every="2 steps", callbacks=InterruptAt(5))
    except InterruptionError:
        resumed = train(folder / "parts", count, checkpoint_every="2 steps", resume=True)
    if is_main_process():
        every = {"plain": plain, "cut": cut, "resumed": resumed, "streams": streams, "cut streams": cut_streams}
        result.write_text(json.dumps(every))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
