"""Trains with what packages outside of accmt add, whole or interrupted and resumed; writes what came of it.

run.py RESULT.json FOLDER STOP: the optimizer step to stop at, or 0
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "site"))  # as where the packages are installed

import torch
from torch import nn

from accmt import AcceleratorModule, Callback, Trainer, read_history
from accmt.processes import is_main_process
from tests.toys import make_points


class Regression(AcceleratorModule):
    """Fits a linear function."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        outputs = self.model(batch[0])
        self.used = [type(self.trainer.run.engine).__name__, str(outputs.dtype)]
        return nn.functional.mse_loss(outputs, batch[1])

    def validation_step(self, batch: Any) -> dict[str, Any]:
        outputs = self.model(batch[0])
        return {"loss": nn.functional.mse_loss(outputs, batch[1]), "bias": (outputs, batch[1])}


class StopAt(Callback):
    """Ends the run in the middle of an epoch."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_training_step(self) -> None:
        if self.state.global_step == self.step:
            raise InterruptedError


def main(result: str, folder: str, stop: int) -> None:
    """Run one part."""
    os.environ["SHELF"] = f"{folder}/shelf"
    hps = {"epochs": 2, "batch_size": 2, "optim": {"type": "SignedSGD", "lr": 0.1, "momentum": 0.5}}
    trainer = Trainer(
        {**hps, "scheduler": {"type": "Halving", "every": 3}},
        f"{folder}/model",
        checkpointer="shelf",
        checkpoint_every="2 steps",
        resume="auto",
        metrics=["bias"],
        monitor=["train_loss", "weight_norm"],
        log_with="text_file",
        parallelism={"engine": "compressed"},
        mixed_precision="coarse",
        logging_dir=f"{folder}/logs",
        model_saving="best_bias",
        callbacks=[StopAt(stop)] if stop else [],
        run_name="run",
        seed=3,
        verbose=False,
    )
    module, ended = Regression(), "finished"
    try:
        trainer.fit(module, make_points(24), make_points(6))
    except InterruptedError:
        ended = "stopped"
    if is_main_process():
        rows = [row for row in read_history(trainer.log_dir) if "values" in row]
        found = {
            "ended": ended,
            "used": module.used,
            "weights": [weight.tolist() for weight in module.unwrapped_model.parameters()],
            "state": trainer.state.state_dict(),
            "rows": [(row["step"], row["values"]) for row in rows],
            "text": (Path(trainer.log_dir) / "rows.txt").read_text(),
        }
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
