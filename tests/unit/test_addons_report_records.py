"""What a run folder is read into."""

from __future__ import annotations

import json

import pytest
import torch

from accmt import Metric
from accmt.addons.report import read_run
from accmt.addons.report.page import build_page
from accmt.addons.report.records import Event
from tests.toys import Numbers, Scripted, make_trainer


def write_history(folder, *rows):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def values(step, time, **named):
    return {"step": step, "time": time, "values": named}


CONFIG = {"time": 100.0, "config": {"optim": {"lr": 0.1}, "epochs": 2}}


def test_curves_have_steps_and_seconds_since_the_start(tmp_path):
    folder = write_history(
        tmp_path / "a", CONFIG, values(1, 101.0, train_loss=2.0), values(3, 104.5, train_loss=1.0, x="NaN")
    )
    run = read_run(folder)
    assert (run.name, run.status, run.num_steps, run.duration_s) == ("a", "running", 3, 4.5)
    assert vars(run.curves["train_loss"]) == {"steps": [1, 3], "times_s": [1.0, 4.5], "values": [2.0, 1.0]}
    assert run.curves["x"].values[0] != run.curves["x"].values[0]


def test_the_configuration_is_on_one_level_and_the_newest(tmp_path):
    newer = {"time": 200.0, "config": {"optim": {"lr": 0.2}}}
    assert read_run(write_history(tmp_path, CONFIG, newer)).config == {"optim.lr": 0.2}


def test_evaluations_are_told_from_training(tmp_path):
    rows = [values(1, 101, train_loss=1.0), values(1, 102, val_loss=2.0, mae=3.0), values(1, 103, checkpoint=1.0)]
    assert read_run(write_history(tmp_path, CONFIG, *rows)).evaluations == [(1, {"val_loss": 2.0, "mae": 3.0})]


def test_what_happened_is_kept_and_rows_that_were_taken_back_are_not(tmp_path):
    folder = write_history(
        tmp_path,
        CONFIG,
        values(1, 101, train_loss=1.0),
        values(1, 102, checkpoint=1.0),
        values(2, 103, train_loss=9.0),
        {"time": 104.0, "status": "FAILED"},
        {"time": 110.0, "rewind": {"line": 3, "step": 1, "attempt": 2}},
        values(2, 111, train_loss=3.0),
        {"time": 112.0, "status": "FINISHED"},
    )
    run = read_run(folder)
    assert run.curves["train_loss"].values == [1.0, 3.0]
    assert "checkpoint" not in run.curves
    assert run.events == [
        Event("started", 0, 0.0),
        Event("checkpoint", 1, 2.0),
        Event("failed", 2, 4.0),
        Event("resumed", 1, 10.0),
        Event("finished", 2, 12.0),
    ]
    assert run.status == "finished"


def test_the_time_split_adds_up(tmp_path):
    rows = [values(step, 101, train_loss=1, seconds_data=0.5, seconds_compute=2.0) for step in (1, 2)]
    assert read_run(write_history(tmp_path, CONFIG, *rows)).seconds_by_purpose == {"data": 1.0, "compute": 4.0}


class Errors(Metric):
    def compute(self, predictions, references):
        return {self.name: float((predictions - references).abs().sum())}


class Measured(Scripted):
    def validation_step(self, batch):
        loss = super().validation_step(batch)
        return {"loss": loss, "errors": (loss.view(1), torch.zeros(1)), "hits": (loss.view(1), torch.zeros(1))}


def test_a_run_says_what_is_better_and_what_its_model_was_saved_by():
    metrics = [Errors("errors", greater_is_better=False), Errors("hits", greater_is_better=True)]
    hps = {"epochs": 3, "batch_size": 4}
    trainer = make_trainer(hps, metrics=metrics, model_saving=["best_errors", "best_hits"])
    trainer.fit(Measured([0.5, 0.25, 0.75]), Numbers(4), Numbers(1))
    run = read_run(trainer.log_dir)
    assert run.config["model_saving"] == "best_errors, best_hits"
    assert run.config["metrics.errors"] == "lower is better"
    assert run.config["metrics.hits"] == "higher is better"
    assert run.best == {"val_loss": (2, 0.25), "errors": (2, 0.25), "hits": (3, 0.75)}


def test_an_interruption_is_told_from_a_kill(tmp_path):
    class Interrupted(Scripted):
        def on_update_end(self):
            raise KeyboardInterrupt

    trainer = make_trainer()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Interrupted(), Numbers(4))
    interrupted = read_run(trainer.log_dir)
    killed = read_run(
        write_history(tmp_path / "killed", CONFIG, values(1, 101.0, x=1.0), {"time": 2e2, "status": "KILLED"})
    )
    assert (interrupted.status, killed.status) == ("interrupted", "killed")
    page = build_page([interrupted, killed])
    assert '<b class="interrupted">interrupted</b>' in page
    assert "1 × interrupted" in page
    assert "1 × killed" in page
