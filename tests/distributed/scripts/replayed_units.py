"""A run with `same_bits` to replay: `replayed_units.py FOLDER stream`, or `fsdp`, which shards on several processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

import tests.many_runs  # noqa: F401
from accmt import Trainer
from tests.toys import Linear, make_points

POINTS = make_points(48)


class Stream(IterableDataset[Any]):
    """Yields the points."""

    def __iter__(self) -> Iterator[Any]:
        return (POINTS[index] for index in range(len(POINTS)))


def main(folder: str, kind: str) -> None:
    """Train three steps."""
    torch.manual_seed(0)
    trainer = Trainer(
        {"epochs": 1, "batch_size": 16, "optim": {"type": "SGD", "lr": 0.01}},
        Path(folder) / "model",
        run_name="run",
        same_bits=8,
        seed=0,
        ledger=True,
        logging_dir=Path(folder) / "logs",
        parallelism={"fsdp": True} if kind == "fsdp" else None,
        verbose=False,
    )
    trainer.fit(Linear(), Stream() if kind == "stream" else POINTS)


if __name__ == "__main__":
    main(*sys.argv[1:])
