"""The records of a run name what was used, where a module or a DataLoader takes precedence over hyper-parameters."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from accmt import HyperParameters
from accmt.loop.fit import describe
from tests.toys import Linear, make_points, make_trainer

HPS = {
    "epochs": 1,
    "batch_size": [16, 32],
    "optim": {"type": "AdamW", "lr": 0.01},
    "scheduler": {"type": "StepLR", "step_size": 2},
}


class Own(Linear):
    def get_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def get_scheduler(self, optimizer, steps_per_epoch, epochs):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def test_the_optimizer_and_the_scheduler_of_a_module_are_recorded(caplog):
    trainer = make_trainer(HPS, model_saving="best_valid_loss")
    with caplog.at_level(logging.INFO, "accmt"):
        trainer.fit(Own(), make_points(8), make_points(4))
    seen = describe(trainer.run)
    assert (seen["optim.type"], seen["optim.lr"], seen["optim.set_by"]) == ("SGD", 1e-3, "Own.get_optimizer")
    assert (seen["scheduler.type"], seen["scheduler.set_by"]) == ("ExponentialLR", "Own.get_scheduler")
    card = next(Path("out").rglob("README.md")).read_text(encoding="utf-8")
    assert "SGD" in card
    assert "AdamW" not in card
    written = HyperParameters.from_config(next(Path("out").rglob("hps.yaml")))
    assert written.optim is None
    assert written.scheduler is None
    lines = [line for line in caplog.messages if "takes precedence" in line]
    assert [line.split(" ")[0] for line in lines] == ["Own.get_optimizer", "Own.get_scheduler"]


def test_the_batch_size_of_a_dataloader_is_recorded():
    trainer = make_trainer(HPS, model_saving="best_valid_loss", grad_accumulation_steps=2)
    trainer.fit(Linear(), DataLoader(make_points(8), 4), make_points(4))
    seen = describe(trainer.run)
    assert (seen["batch_size"], seen["effective_batch_size"]) == (4, 8)
    assert HyperParameters.from_config(next(Path("out").rglob("hps.yaml"))).train_batch_size == 4
