"""A training of a sweep: a small network, evaluated every 4 steps, with checkpoints in between."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accmt import AcceleratorModule, Trainer
from tests.toys import make_points

HPS = {"epochs": 3, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.01}}


class Net(AcceleratorModule):
    def __init__(self, hidden: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Dropout(0.1), nn.Linear(hidden, 1))

    def step(self, batch: Any) -> torch.Tensor:
        if self.model.training and (steps := os.environ.get("SWEPT_STEPS")):
            with Path(steps).open("a") as file:
                file.write(".")
        time.sleep(float(os.environ.get("SWEPT_SLEEP", "0")))
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs), targets)


def train(hidden: int = 4) -> None:
    if log := os.environ.get("SWEPT_LOG"):
        trial = json.loads(Path(os.environ["ACCMT_TRIAL"]).read_text())["number"]
        with Path(log).open("a") as file:
            file.write(json.dumps({"trial": trial, "pid": os.getpid()}) + "\n")
    trainer = Trainer(
        HPS,
        "out/net",
        evaluate_every_n_steps=4,
        checkpoint_every=3,
        verbose=False,
        seed=1,
    )
    trainer.fit(Net(hidden), make_points(32), make_points(16))
    trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=4)
    parser.add_argument("--sweep", help="sweep this function with this file, in this process")
    options = parser.parse_args()
    if options.sweep is None:
        train(options.hidden)
    else:
        from accmt import Sweep

        Sweep.from_yaml(options.sweep).run(train)


if __name__ == "__main__":
    main()
