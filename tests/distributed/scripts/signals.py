"""Runs that get a signal in every stage, one after the other; the last one loses a process.

torchrun --nproc-per-node 2 signals.py FOLDER MOMENT...

Each process writes to FOLDER/RANK.json how its runs ended: a list of [moment, error, step, steps of checkpoints].
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from accmt import AcceleratorModule, Callback, Trainer
from accmt.errors import Preempted
from accmt.processes import num_processes, process_index
from tests.splitting import is_split, num_data_processes, split
from tests.toys import make_points

IN_STEPS = ("predict_step", "generating", "sanity_check", "killed")


class Signalled(Callback):
    """Sends the signal in a hook, or predicts after the second step."""

    def __init__(self, moment: str, *, is_mine: bool) -> None:
        self.moment = moment
        self.is_mine = is_mine
        if moment not in IN_STEPS:
            setattr(self, moment, self.send)

    def on_update_end(self) -> None:
        if self.moment == "predict_step" and self.state.global_step == 2:
            self.trainer.predict(dataset=make_points(22))

    def send(self) -> None:
        if self.is_mine and self.state.global_step >= 2 * (self.moment != "sanity_check"):
            self.is_mine = False
            os.kill(os.getpid(), signal.SIGKILL if self.moment == "killed" else signal.SIGTERM)


class Sending(AcceleratorModule):
    """Sends the signal in a step, before the model needs every process."""

    def __init__(self, signalled: Signalled) -> None:
        self.signalled = signalled

    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        if is_split():
            split(self.model, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def step(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> Any:
        if self.signalled.moment in ("generating", "killed") and self.state.stage == "validate":
            self.signalled.send()
        if self.signalled.moment == "sanity_check" and self.state.stage == "sanity_check":
            self.signalled.send()
        if self.signalled.moment == "generating":
            batch = [self.model(batch[0]).expand(-1, 3), batch[1]]
        return self.step(batch)

    def predict_step(self, batch: Any) -> torch.Tensor:
        self.signalled.send()
        return self.model(batch[0])


def run(folder: Path, moment: str, *, is_mine: bool) -> list[Any]:
    signalled = Signalled(moment, is_mine=is_mine)
    trainer = Trainer(
        {"max_steps": 6, "batch_size": 4 // num_data_processes(), "optim": {"type": "SGD", "lr": 1e-2}},
        folder / moment / "model",
        logging_dir=folder / moment / "logs",
        checkpoint_every="100 epochs",
        evaluate_every_n_steps=2,
        model_saving="best_valid_loss",
        seed=0,
        verbose=False,
        callbacks=signalled,
    )
    ended = "finished"
    try:
        trainer.fit(Sending(signalled), make_points(22), make_points(22))
    except (Preempted, RuntimeError) as error:
        ended = f"{type(error).__name__} {error}"
    taken = sorted(path.name for path in trainer.checkpoint_path.glob("step-*"))
    return [moment, ended, trainer.state.global_step, taken]


def main(folder: str, *moments: str) -> None:
    torch.set_num_threads(1)
    outcomes: list[Any] = []
    for index, moment in enumerate(moments):
        is_mine = index % 2 == 1 and moment != "killed" or process_index() == num_processes() - 1
        outcomes.append(run(Path(folder), moment, is_mine=is_mine))
        Path(folder, f"{process_index()}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
