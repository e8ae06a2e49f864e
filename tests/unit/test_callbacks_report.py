"""The line about each evaluation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.resume.unbroken import train
from tests.toys import Linear, Numbers, Scripted, make_points, make_trainer


def lines(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith("step ")]


def test_each_evaluation_is_told_in_one_line(caplog):
    trainer = make_trainer({"epochs": 2, "batch_size": 4}, verbose=True, shuffle_train=False)
    trainer.fit(Scripted([0.5, 0.25]), Numbers(8), Numbers(2))
    assert lines(caplog) == [
        "step 2 of 4, epoch 1: train_loss 3.5, val_loss 0.5",
        "step 4 of 4, epoch 2: train_loss 3.5, val_loss 0.25",
    ]


def test_without_validation_data_the_training_loss_is_told(caplog):
    make_trainer({"batch_size": 4}, verbose=True).fit(Scripted(), Numbers(4))
    assert lines(caplog) == ["step 1 of 1, epoch 1: train_loss 1.5"]


def test_nothing_is_told_where_silence_was_asked_for(caplog):
    make_trainer(verbose=False).fit(Linear(), make_points(), make_points())
    assert lines(caplog) == []


class Growing(Scripted):
    """Has the number of the epoch in its loss, and weights that differ."""

    def training_step(self, batch):
        loss = super().training_step(batch) + 100 * self.state.epoch
        return {"loss": loss, "weight": torch.tensor(float(1 + self.state.train_step))}


@pytest.mark.parametrize("log_every", [1, 3, -1])
def test_the_training_loss_is_the_mean_of_the_epoch_however_often_it_is_logged(caplog, log_every):
    """Batches of 0, 1, 2 and 3 with weights 1 to 4 have the mean 2; the last row alone would be another."""
    hps = {"epochs": 2, "batch_size": 1}
    trainer = make_trainer(
        hps, verbose=True, shuffle_train=False, log_every=log_every, evaluate_every_n_steps=2, model_saving="always"
    )
    trainer.fit(Growing([0.5] * 4), Numbers(4), Numbers(1))
    told = [line.partition(": ")[2].partition(",")[0] for line in lines(caplog)]
    assert told == ["train_loss 0.6667", "train_loss 2", "train_loss 100.7", "train_loss 102"]
    summary = next(record.message for record in caplog.records if "samples/s" in record.message)
    assert re.search(r"train_loss +102\n", summary)
    assert "| train_loss | 102 |" in Path("out/model/README.md").read_text()


def test_an_epoch_that_max_steps_cuts_short_has_the_mean_of_its_part(caplog):
    hps = {"epochs": 2, "batch_size": 1, "max_steps": 6}
    make_trainer(hps, verbose=True, shuffle_train=False).fit(Growing(), Numbers(4))
    assert re.search(r"train_loss +100\.67\n", caplog.text)


@pytest.mark.parametrize("stop", [3, 5, 6, 7])
def test_the_mean_of_an_epoch_is_that_of_the_unbroken_run_bit_for_bit(stop):
    """An epoch has 6 updates; runs are cut short within the second one, so that its mean has parts of both runs."""
    hps = {"max_steps": 10}
    whole, _ = train("out/a", hps=hps)
    train("out/b", hps=hps, stop=stop)
    resumed, _ = train("out/b", hps=hps, resume=True)
    assert resumed.run.running_averages.epoch_loss == whole.run.running_averages.epoch_loss
