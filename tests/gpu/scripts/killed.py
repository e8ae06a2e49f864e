"""A run that kills itself at a step: `killed.py <folder> <device> <step or None>`; the end is in result.json."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product of a process

import torch
import xxhash

from accmt import Callback, Trainer
from tests.gpu.toys import HPS, WITHOUT_TRACES, AtStep, Classifier, make_data


def kill() -> None:
    """End this process as a machine that fails does."""
    os.kill(os.getpid(), signal.SIGKILL)


class First(Callback):
    """Keeps the step at which training began."""

    step = -1

    def on_fit_start(self) -> None:
        self.step = self.state.global_step


def main(folder: Path, device: str, dies_at: int | None) -> None:
    """Train, or continue to train."""
    first = First()
    callbacks = [first] if dies_at is None else [first, AtStep(dies_at, kill)]
    trainer = Trainer(
        HPS,
        folder / "model",
        **{**WITHOUT_TRACES, "checkpoint_every": "2 steps"},
        accelerator={"cpu": device == "cpu"},
        mixed_precision="bf16",
        torch_flags={"deterministic": True},
        resume="auto",
        logging_dir=folder / "logs",
        callbacks=callbacks,
    )
    module = Classifier("device", width=256)
    trainer.fit(module, make_data())
    digest = xxhash.xxh3_64()
    state = trainer.run.stepper.optimizer.state_dict()["state"].values()
    for tensor in [*module.model.state_dict().values(), *(value for of_one in state for value in of_one.values())]:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    (folder / "result.json").write_text(json.dumps({"digest": digest.hexdigest(), "first_step": first.step}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], None if sys.argv[3] == "None" else int(sys.argv[3]))
