"""A run on a mixture whose checkpoints are large enough to be killed inside.

    killed_mixed_run.py <folder> <workers> <async: 0 or 1> [<max_tokens>]

Its weights change at a step, and the rows of its log, with the loss of each source, belong to the digest.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.nn import functional

from accmt import read_history
from accmt.processes import is_main_process
from tests.faults.scripts.killed_run import HPS, Noisy, Wide, train

MIX = {"small": {0: 0.5, 9: 0.2}, "large": {0: 0.3, 9: 0.5}, "limited": {"weight": {0: 0.2, 9: 0.3}, "epochs": 1}}
SIZES = {"small": 20, "large": 120, "limited": 15}


class Part(Noisy):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


class WideOfSources(Wide):
    def training_step(self, batch: Any) -> dict[str, torch.Tensor]:
        inputs, targets = batch
        losses = functional.mse_loss(self.model(inputs), targets, reduction="none").mean(1)
        return {"loss": losses.mean(), "losses": losses}


def main(folder: str, workers: str, is_async: str, max_tokens: str | None = None) -> None:
    sources = {name: Part(size) for name, size in SIZES.items()}
    hps = {**HPS, "epochs": -1, "max_steps": 24, "max_tokens": max_tokens, "data": {"mix": MIX}}
    train(WideOfSources(), sources, hps, folder, workers, is_async)
    result = Path("result")
    if is_main_process():
        # One that was killed before its first checkpoint left a folder of its own.
        last = max(Path(folder, "logs", "model").glob("*/history.jsonl"), key=lambda path: path.stat().st_mtime)
        rows = [row["values"] for row in read_history(last.parent) if "train_loss" in row.get("values", {})]
        assert any("train_loss__limited" in row for row in rows)
        result.write_text(result.read_text() + xxhash.xxh3_64_hexdigest(repr(rows).encode()))


if __name__ == "__main__":
    main(*sys.argv[1:])
