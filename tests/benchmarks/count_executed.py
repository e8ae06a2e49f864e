"""Counts the lines and files of accmt that a first run executes, and those of one later step: what a reader would open.

    python tests/benchmarks/count_executed.py

A first run is everything from `Trainer(...)` to the end of the first optimizer step, on the main thread: when other
threads run depends on the machine's load. A later step is what each of several steps executes. Module and class bodies
do not count.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import accmt
from accmt import AcceleratorModule, Trainer

PACKAGE = str(Path(accmt.__file__).parent)
IS_FUNCTION = 1  # the flag CO_OPTIMIZED of a code object


def main() -> None:
    """Print the figures."""
    executed: set[tuple[str, int]] = set()
    at_step: list[set[tuple[str, int]]] = []

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) or not frame.f_code.co_flags & IS_FUNCTION:
            return None
        executed.add((file, frame.f_lineno))
        return trace

    class Tiny(AcceleratorModule):
        """Notes at the beginning of each step what was executed since the step before."""

        def __init__(self) -> None:
            self.model = nn.Linear(4, 2)

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            at_step.append(set(executed))
            executed.clear()
            return self.model(batch[0]).square().mean()

        def validation_step(self, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"loss": self.model(batch[0]).square().mean()}

    samples = TensorDataset(torch.randn(80, 4))
    with tempfile.TemporaryDirectory() as folder:
        hps = {"epochs": 1, "batch_size": 2, "optim": {"type": "AdamW", "lr": 1e-3}}
        sys.settrace(trace)
        trainer = Trainer(
            hps, Path(folder) / "model", logging_dir=Path(folder), log_every=1000, num_sanity_val_steps=0, verbose=False
        )
        trainer.fit(Tiny(), samples, samples)
        sys.settrace(None)
    for name, found in ("a first run", at_step[0] | at_step[1]), ("one later step", set.intersection(*at_step[4:8])):
        print(f"{name}: {len(found):,} lines in {len({file for file, _ in found})} files")


if __name__ == "__main__":
    main()
