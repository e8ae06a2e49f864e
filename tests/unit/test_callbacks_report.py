"""The line about each evaluation."""

from __future__ import annotations

from tests.toys import Linear, Numbers, Scripted, make_points, make_trainer


def test_each_evaluation_is_told_in_one_line(caplog):
    make_trainer({"epochs": 2, "batch_size": 4}, verbose=True).fit(Scripted([0.5, 0.25]), Numbers(8), Numbers(2))
    lines = [record.message for record in caplog.records if "update" in record.message]
    assert lines == ["update 2 of 4, epoch 1: val_loss 0.5", "update 4 of 4, epoch 2: val_loss 0.25"]


def test_nothing_is_told_without_validation_data_or_where_silence_was_asked_for(caplog):
    make_trainer(verbose=True).fit(Linear(), make_points())
    make_trainer(verbose=False).fit(Linear(), make_points(), make_points())
    assert "update" not in caplog.text
