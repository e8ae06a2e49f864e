"""Trains on several processes, and writes what the ledger says of each step into a file.

write_ledger.py <folder> <samples per process in a batch> <"" or "fails": whether the last process fails at step 5>
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from accmt import AcceleratorModule, AccmtError, Callback, Trainer
from accmt.addons.flight_recorder.ledger import LEDGER_FILE, read_ledger
from accmt.processes import is_main_process, num_processes, process_index


class Small(AcceleratorModule):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))

    def step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])


class Fails(Callback):
    def on_update_end(self) -> None:
        if self.state.global_step == 5 and process_index() == num_processes() - 1:
            raise RuntimeError("planted")


def main(folder: str, batch_size: str, fails: str = "") -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(22, 5, generator=generator)
    trainer = Trainer(
        {"epochs": 2, "batch_size": int(batch_size), "optim": {"type": "AdamW", "lr": 0.01}},
        f"{folder}/model",
        model_saving=None,
        logging_dir=f"{folder}/logs",
        run_name="run",
        seed=3,
        verbose=False,
        ledger={"every": None if fails else 1},
        callbacks=Fails() if fails else None,
    )
    with suppress(RuntimeError, AccmtError):
        trainer.fit(Small(), TensorDataset(inputs, inputs.sum(1, keepdim=True)))
    if is_main_process():
        ledger = read_ledger(Path(trainer.log_dir) / LEDGER_FILE)
        Path(folder, "result").write_text(json.dumps([ledger.fault, [line for _, line in ledger.effective()]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
