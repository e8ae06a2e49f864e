"""The table of the model at the start, and the ten lines at the end."""

from __future__ import annotations

import re

from torch import nn
from torch.utils.data import DataLoader

from accmt.callbacks.console import summarize
from tests.toys import Linear, Stream, make_points, make_trainer


def test_the_table_counts_parameters_shared_ones_once():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3, bias=False))
    model.append(model[2])
    model[0].bias.requires_grad_(False)
    lines = [line.split() for line in summarize(model).splitlines()]
    assert lines[0] == ["Sequential"]
    assert ["0", "Linear", "15", "12"] in lines
    assert ["1", "ReLU", "0", "0"] in lines
    assert ["Sequential", "24", "21"] in lines


def test_parts_of_parts_are_shown_to_the_depth_that_is_asked_for(caplog):
    class Deep(Linear):
        def __init__(self):
            self.model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(3, 1))), nn.ReLU())

        def step(self, batch):
            return (self.model[0](batch[0]) - batch[1]).square().mean()

    shown = {1: ["0", "1"], 2: ["0", "0.0", "1"], -1: ["0", "0.0", "0.0.0", "1"]}
    shown[True] = shown[1]
    for depth, names in shown.items():
        caplog.clear()
        make_trainer(enable_model_summary=depth, verbose=True).fit(Deep(), make_points(2))
        table = next(message for message in caplog.messages if "trained" in message and "\n" in message)
        assert [line.split()[0] for line in table.splitlines()[2:-2]] == names
        assert "4" in table.splitlines()[-2].split()


def test_the_table_is_said_at_the_start_if_asked_for(caplog):
    for asked in (False, True):
        make_trainer(enable_model_summary=asked, verbose=True).fit(Linear(), make_points(2))
        assert any("parameters" in message and "\n" in message for message in caplog.messages) == asked


def test_a_line_at_the_start_says_what_is_trained_on_what(caplog):
    settings = {"verbose": True, "seed": 3, "limit_batches": {"train": 3}, "grad_accumulation_steps": 2}
    module = Linear()
    module.model.bias.requires_grad_(False)
    data = {"a": make_points(3), "b": Stream(make_points(4))}
    make_trainer({"epochs": 2, "batch_size": 2}, **settings).fit(module, make_points(9), data)
    start = "1 process on cpu, mixed precision no, seed 3; 3 of 4 parameters trained; "
    start += "training: 6 samples in 3 batches; "
    start += "a: 3 samples in 2 batches; b: unknown number of samples; 4 steps of 4 samples"
    assert start in caplog.messages


def test_a_dataloader_is_described_with_its_batch_size(caplog):
    loader = DataLoader(make_points(8), batch_size=4)
    make_trainer({"epochs": 1, "batch_size": 2}, verbose=True).fit(Linear(), loader)
    assert any(message.endswith("training: 2 batches; 2 steps of 4 samples") for message in caplog.messages)


def test_the_end_of_a_run_says_the_essentials_in_ten_lines(caplog):
    trainer = make_trainer({"epochs": 2}, model_saving="best_valid_loss", verbose=True)
    trainer.fit(Linear(), make_points(8), make_points(4))
    said = caplog.messages[-1].splitlines()
    assert said[0] == "run summary"
    assert len(said) <= 10
    names = [line.split()[0] for line in said[1:]]
    assert names == ["status", "done", "time", "train_loss", "evaluation", "best", "model", "report"]
    assert "8 steps, 2 epochs, 16 samples" in said[2]
    assert f"val_loss {trainer.state.metrics['val_loss']:.5g}" in said[5]
    assert said[6] == f"  best        valid_loss {trainer.state.best['best_valid_loss']:.5g} at step 8"


def test_a_best_value_whose_model_thresholds_held_back_is_said_to_have_none(caplog):
    make_trainer(model_saving="best_valid_loss", model_saving_below=0.0, verbose=True).fit(
        Linear(), make_points(8), make_points(4)
    )
    assert re.search(r"  best +valid_loss \S+, not saved\n", caplog.text)


def test_the_samples_per_second_of_a_run_that_goes_on_are_those_of_this_part(caplog, monkeypatch):
    monkeypatch.setattr("accmt.callbacks.console.monotonic", iter(range(0, 1000, 4)).__next__)
    settings = {"checkpoint_every": "epoch", "verbose": True, "resume": "auto"}
    for epochs, samples in ((3, 24), (4, 8), (6, 16)):
        make_trainer({"epochs": epochs}, **settings).fit(Linear(), make_points(8))
        assert f"4.0 s, {samples / 4:.1f} samples/s" in caplog.messages[-1]
