"""Trains with windows that a package outside of accmt decides, whole or interrupted and resumed; writes the weights.

windows.py RESULT.json FOLDER STOP: the optimizer step to stop at, or 0; or "apart": processes decide differently
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "site"))  # as where the package is installed

import growing
import torch
from torch.distributed.tensor import DTensor

from accmt import Callback, Trainer
from accmt.errors import DataError
from accmt.processes import is_main_process, process_index
from tests.toys import Linear, make_points


class Watch(Callback):
    """Notes the samples of each step, and ends the run at one."""

    def __init__(self, stop: int) -> None:
        self.stop = stop
        self.seen: list[int] = []
        self.ends: list[bool] = []

    def on_before_training_step(self) -> None:
        if self.stop and self.state.global_step == self.stop:
            raise InterruptedError
        self.ends.append(self.state.is_grad_accum_boundary())

    def on_update_end(self) -> None:
        self.seen.append(self.state.samples_seen)


def whole(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight, collected from all processes if it is sharded."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def main(result: str, folder: str, stop: str) -> None:
    """Run one part."""
    if stop == "apart":
        growing.growing = lambda window, state: window.num_batches > process_index()
    watch = Watch(0 if stop == "apart" else int(stop))
    trainer = Trainer(
        {"epochs": 2, "batch_size": 2, "optim": {"type": "SGD", "lr": 0.1, "momentum": 0.5}},
        f"{folder}/model",
        grad_accumulation_steps="growing",
        checkpoint_every="2 steps",
        resume="auto",
        shuffle_train=False,
        callbacks=[watch],
        seed=3,
        verbose=False,
    )
    module, ended = Linear(), "finished"
    try:
        trainer.fit(module, make_points(41))
    except InterruptedError:
        ended = "stopped"
    except DataError as error:
        ended = str(error)
    found = {
        "ended": ended,
        "seen": watch.seen,
        "ends": watch.ends,
        "weights": [whole(weight).tolist() for weight in module.unwrapped_model.parameters()],
        "state": trainer.state.state_dict(),
    }
    if is_main_process():
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4])
