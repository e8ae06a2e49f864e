"""Trains on several machines; holds once where a test wants to cut a link or kill a machine.

RANK and the like from a launcher; machines.py FOLDER [HOLD_AT] [RESUME]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from accmt import Callback, Trainer
from tests.toys import Linear

folder, hold_at = Path(sys.argv[1]), int(sys.argv[2])
resume: Any = {"no": False, "auto": "auto"}[sys.argv[3]]
NUM_SAMPLES, BATCH_SIZE, PATIENCE_S = 96, 4, 90.0


class Hold(Callback):
    """Waits after a step, once, until a test says that it may go on."""

    def on_update_end(self) -> None:
        go = folder / "go"
        if self.state.global_step != hold_at or go.exists():
            return
        (folder / f"held-{self.trainer.run.accelerator.process_index}").touch()
        deadline = time.monotonic() + PATIENCE_S
        while not go.exists() and time.monotonic() < deadline:
            time.sleep(0.05)


def main() -> None:
    """Train."""
    inputs = torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    Trainer(
        {"epochs": 2, "batch_size": BATCH_SIZE, "optimizer": {"type": "AdamW", "lr": 0.01}},
        folder / "model",
        checkpoint_every="4 steps",
        resume=resume,
        seed=0,
        enable_progress_bar=False,
        callbacks=Hold(),
        failures={"machine_timeout_s": 6},
    ).fit(Linear(), data)


if __name__ == "__main__":
    main()
