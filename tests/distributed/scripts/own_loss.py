"""Trains one step on the loss that a transformers model computes, and tells its gradient.

torchrun --nproc-per-node 2 own_loss.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import tests.many_runs  # noqa: F401
from accmt import Callback, Trainer
from accmt.processes import is_main_process, num_processes
from tests.unit.test_features_own_loss import Inside, Own, make_model, make_rows

CASES: dict[str, tuple[type[Own], dict[str, Any]]] = {
    "own": (Own, {}),
    "inside": (Inside, {}),
    "unused": (Own, {"parallelism": {"ddp": {"find_unused_parameters": True}}}),
    "without targets": (Own, {"grad_accumulation_steps": 4, "shuffle_train": False}),
}


def with_rows_without_targets() -> list[dict[str, torch.Tensor]]:
    """Return the rows in pairs, after each of which a pair without targets follows: a batch of the other process."""
    rows = make_rows()
    empty = {**rows[0], "labels": torch.full_like(rows[0]["labels"], -100)}
    return [row for first in range(0, len(rows), 2) for row in (*rows[first : first + 2], empty, empty)]


class Gradient(Callback):
    """Keeps the gradient of a step, whole."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        parameters = self.trainer.run.unwrapped_model.parameters()
        whole = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in parameters]
        self.gradient = torch.cat([part.flatten() for part in whole]).tolist()


def train(kind: type[Own], settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make one step of all rows, in two micro-batches of each process."""
    hps = {"epochs": 1, "batch_size": 4 // num_processes(), "optim": {"type": "SGD", "lr": 1e-6}}
    gradient = Gradient()
    settings = {"callbacks": gradient, "grad_accumulation_steps": 2, "model_saving": None, **settings}
    trainer = Trainer(hps, folder, logging_dir=folder, verbose=False, **settings)
    rows = with_rows_without_targets() if folder.name == "without targets" else make_rows()
    state = trainer.fit(kind(make_model()), rows, make_rows())
    return {"gradient": gradient.gradient, "val_loss": state.metrics["val_loss"], "targets": state.target_tokens_seen}


def main() -> None:
    """Run each case and write the results."""
    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    found = {name: train(*case, folder / name) for name, case in CASES.items()}
    if is_main_process():
        path.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
