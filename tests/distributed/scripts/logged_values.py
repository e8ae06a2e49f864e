"""A run that logs values in its steps and measures its gradients; writes the rows and what each process saw.

torchrun --nproc-per-node 2 logged_values.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tests.many_runs  # noqa: F401
from accmt import AcceleratorModule, Trainer, read_history
from accmt.processes import gather_objects, is_main_process, num_processes, process_index

SAMPLES, GLOBAL_BATCH = 32, 12


def make_numbers() -> TensorDataset:
    """Make the numbers 0 to 31 as samples `[1]`."""
    return TensorDataset(torch.arange(float(SAMPLES)).unsqueeze(1) / SAMPLES)


class Logging(AcceleratorModule):
    """Logs its batches."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        [numbers] = batch
        self.log("mean", numbers.mean())
        self.log("samples", len(numbers), reduction="sum")
        if process_index() == num_processes() - 1:
            self.log("of_the_last", 5.0)
        return ((self.model(numbers) - 1) ** 2).mean()

    def validation_step(self, batch: Any) -> torch.Tensor:
        [numbers] = batch
        self.log("validated", numbers.mean())
        if process_index() == 0:
            self.log("of_the_first", 7.0)
        return numbers.mean()


def main(result: Path, folder: Path) -> None:
    """Train, and write what came of it."""
    trainer = Trainer(
        {"epochs": 1, "batch_size": GLOBAL_BATCH // int(num_processes_asked()), "optim": {"type": "SGD", "lr": 0.1}},
        str(folder / "model"),
        logging_dir=folder / "logs",
        shuffle_train=False,
        model_saving=None,
        checkpoint_every=None,
        verbose=False,
        seed=0,
        monitor=["grad_norm", "cpu_utilization"],
        clip_grad=0.001,
    )
    trainer.fit(Logging(), make_numbers(), make_numbers())
    metrics = gather_objects(trainer.state.metrics)
    epoch_losses = gather_objects(trainer.run.running_averages.epoch_loss)
    if is_main_process():
        rows = [(row["step"], row["values"]) for row in read_history(trainer.log_dir) if "values" in row]
        result.write_text(json.dumps({"rows": rows, "metrics": metrics, "epoch_losses": epoch_losses}))


def num_processes_asked() -> str:
    """Return how many processes the launcher started."""
    import os

    return os.environ.get("WORLD_SIZE", "1")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
