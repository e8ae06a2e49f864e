"""The line about each evaluation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from accmt import Metric
from tests.resume.unbroken import train
from tests.toys import Numbers, Scripted, make_trainer


def lines(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith("step ")]


def test_each_evaluation_is_told_in_one_line(caplog):
    trainer = make_trainer({"epochs": 2, "batch_size": 4}, verbose=True, shuffle_train=False)
    trainer.fit(Scripted([0.5, 0.25]), Numbers(8), Numbers(2))
    assert lines(caplog) == [
        "step 2 of 4, epoch 1:  train_loss 3.5             val_loss 0.5",
        "step 4 of 4, epoch 2:  train_loss 3.5     =       val_loss 0.25    ↓ best",
    ]


class Score(Metric):
    def compute(self, predictions, references):
        return {self.main_metric: float(predictions.mean())}


def test_a_value_is_marked_against_the_last_and_the_best(caplog):
    """Losses fall where they are better, metrics rise; what has no direction has an arrow alone."""

    class Measured(Scripted):
        def validation_step(self, batch):
            loss = super().validation_step(batch)
            return {"loss": loss, "score": (1 - loss.view(1), loss.view(1)), "size": loss}

    hps = {"epochs": 4, "batch_size": 4}
    trainer = make_trainer(hps, verbose=True, model_saving="best_score", metrics=Score("score", greater_is_better=True))
    trainer.fit(Measured([0.5, 0.25, 0.75, 0.5]), Numbers(4), Numbers(2))
    marks = [
        [re.search(rf"{name} \S+ +(.*?)(?:  |$)", line).group(1) for name in ("val_loss", "score", "size")]
        for line in lines(caplog)
    ]
    assert marks[1:] == [["↓ best", "↑ best", "↓"], ["↑", "↓", "↑"], ["↓", "↑", "↓"]]
    assert [line.endswith("saved") for line in lines(caplog)] == [True, True, False, False]


def test_a_value_that_only_equals_the_best_is_none(caplog):
    trainer = make_trainer({"epochs": 4, "batch_size": 4}, verbose=True, model_saving="best_valid_loss")
    trainer.fit(Scripted([0.5, 0.5, 0.75, 0.5]), Numbers(4), Numbers(2))
    assert [re.search(r"val_loss \S+ *(.*?) *$", line).group(1) for line in lines(caplog)] == ["saved", "=", "↑", "↓"]


def test_a_continued_run_is_compared_with_the_values_before_it(caplog):
    hps = {"epochs": 2, "batch_size": 4}
    make_trainer(hps, checkpoint_every="epoch").fit(Scripted([0.5, 0.25]), Numbers(4), Numbers(2))
    caplog.clear()
    make_trainer({**hps, "epochs": 3}, verbose=True, resume=True).fit(
        Scripted([0.5, 0.25, 0.3]), Numbers(4), Numbers(2)
    )
    assert re.search(r"val_loss 0.3 +↑$", lines(caplog)[-1])


def test_without_validation_data_the_training_loss_is_told(caplog):
    make_trainer({"batch_size": 4}, verbose=True).fit(Scripted(), Numbers(4))
    assert lines(caplog) == ["step 1 of 1, epoch 1:  train_loss 1.5"]


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
    told = [re.search(r"train_loss \S+", line).group() for line in lines(caplog)]
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
