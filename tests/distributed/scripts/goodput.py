"""Trains on two processes, of which the second is slower, with checkpoints by time; writes what was recorded.

goodput.py <folder> <where the second process is slow: data or forward>
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from accmt import AcceleratorModule, Callback, Trainer
from accmt.addons.goodput.records import read_goodput
from accmt.processes import gather_objects, is_main_process, process_index
from tests.toys import Record

DELAY_S = 0.03


class Points(Dataset[torch.Tensor]):
    def __init__(self, *, are_slow: bool) -> None:
        self.are_slow = are_slow

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(DELAY_S * (self.are_slow and process_index() == 1))
        return torch.full((3,), float(index))

    def __len__(self) -> int:
        return 120


class Slow(AcceleratorModule):
    def __init__(self, *, is_slow: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.is_slow = is_slow

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(DELAY_S * (self.is_slow and process_index() == 1))
        return self.model(batch).square().mean()


class Saved(Callback):
    """Notes after which steps this process took part in a checkpoint."""

    def __init__(self) -> None:
        self.steps: list[int] = Record()

    def on_save_checkpoint(self) -> None:
        self.steps.append(self.state.global_step)


def main(folder: str, where: str) -> None:
    saved = Saved()
    hps: dict[str, Any] = {"epochs": 1, "batch_size": 1, "optim": {"type": "SGD", "lr": 1e-6}}
    trainer = Trainer(
        hps,
        f"{folder}/model",
        model_saving=None,
        logging_dir=f"{folder}/logs",
        log_every=5,
        checkpoint_every="1 s",
        run_name="run",
        monitor=["goodput"],
        callbacks=saved,
        seed=3,
        verbose=False,
    )
    trainer.fit(Slow(is_slow=where == "forward"), Points(are_slow=where == "data"))
    steps = gather_objects(saved.steps)
    if is_main_process():
        totals = read_goodput(Path(trainer.log_dir))
        Path(folder, "result").write_text(json.dumps({"slowest": totals.slowest, "steps": steps}))


if __name__ == "__main__":
    main(*sys.argv[1:])
