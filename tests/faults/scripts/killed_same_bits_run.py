"""Like killed_run.py, with `same_bits`: the digest in the file `result` is the same on any number of processes.

    killed_same_bits_run.py <folder> <workers> <async: 0 or 1>

The last batch of an epoch has 5 units of one sample, and a step three batches.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

os.environ.setdefault("ACCMT_TEST_WIDTH", "512")

from tests.faults.scripts.killed_run import HPS, WIDTH, Noisy, Wide, train


class Dropping(Wide):
    """Has no batch norm, whose statistics follow the units of a process."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers: list[Any] = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 1)]
        self.model = nn.Sequential(*layers)

    def configure_model(self) -> None:
        """Keep the model."""


def main(folder: str, workers: str, is_async: str) -> None:
    hps = HPS | {"epochs": 4, "batch_size": 8}
    train(Dropping(), Subset(Noisy(), range(117)), hps, folder, workers, is_async, same_bits=8, clip_grad=0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
