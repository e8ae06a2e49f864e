"""Trains in a folder, with checkpoints at a URL: train_in.py FOLDER URL EPOCHS."""

import os
import sys
from pathlib import Path

import torch

from accmt import Callback
from tests.toys import Linear, make_points, make_trainer

folder, url, epochs = sys.argv[1:]
os.chdir(folder)


class Note(Callback):
    def on_resume(self):
        if self.trainer.is_main:
            Path("said").write_text(f"resumed at {self.state.global_step}")

    def on_fit_end(self):
        weights = self.trainer.model.state_dict()
        whole = {
            name: getattr(weight, "full_tensor", lambda weight=weight: weight)() for name, weight in weights.items()
        }
        if self.trainer.is_main:
            torch.save(whole, "weights.pt")


settings = {"checkpoint": url, "checkpoint_every": "1 step", "resume": "auto"} if url else {}
trainer = make_trainer({"epochs": int(epochs), "batch_size": 2}, "out/model", seed=0, callbacks=Note(), **settings)
trainer.fit(Linear(), make_points())
