"""The line about each evaluation."""

from __future__ import annotations

from tests.toys import Linear, Numbers, Scripted, make_points, make_trainer


def lines(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith("update ")]


def test_each_evaluation_is_told_in_one_line(caplog):
    trainer = make_trainer({"epochs": 2, "batch_size": 4}, verbose=True, shuffle_train=False)
    trainer.fit(Scripted([0.5, 0.25]), Numbers(8), Numbers(2))
    assert lines(caplog) == [
        "update 2 of 4, epoch 1: train_loss 5.5, val_loss 0.5",
        "update 4 of 4, epoch 2: train_loss 5.5, val_loss 0.25",
    ]


def test_without_validation_data_the_training_loss_is_told(caplog):
    make_trainer({"batch_size": 4}, verbose=True).fit(Scripted(), Numbers(4))
    assert lines(caplog) == ["update 1 of 1, epoch 1: train_loss 1.5"]


def test_nothing_is_told_where_silence_was_asked_for(caplog):
    make_trainer(verbose=False).fit(Linear(), make_points(), make_points())
    assert lines(caplog) == []
