"""Which evaluation's weights are saved, and what lies in the folder afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from accmt import Callback, Trainer
from accmt.addons.model_card import _name_of_path
from accmt.errors import ArgumentError, SavingError
from tests.raising import raises_at
from tests.toys import Linear, Numbers, Recorder, Scripted, make_points, make_trainer


class SaveSteps(Callback):
    """Writes down the update at which a model was saved."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save_model(self, folder):
        assert folder == Path("out/model")
        self.steps.append(self.state.global_step)


def saved_at(model_saving, val_losses=(), epochs=4, train=(1.0,), **settings) -> list[int]:
    saves = SaveSteps()
    trainer = make_trainer({"epochs": epochs, "batch_size": 1}, model_saving=model_saving, callbacks=saves, **settings)
    val = Numbers(1) if val_losses else None
    trainer.fit(Scripted(val_losses), Numbers(train), val)
    return saves.steps


def test_the_lowest_validation_loss_is_saved():
    assert saved_at("best_valid_loss", [3, 2, 4, 1]) == [1, 2, 4]
    status = json.loads(Path("out/model/status.json").read_text())
    assert status["best"] == {"best_valid_loss": 1.0}
    assert (status["global_step"], status["evaluations_done"]) == (4, 4)


def test_without_validation_data_the_training_loss_decides(caplog):
    assert saved_at("best_valid_loss", train=[2.0], verbose=True) == [1]
    assert "models are saved by best_train_loss" in caplog.text


def test_the_training_loss_since_the_last_evaluation_decides():
    class Falling(Scripted):
        def training_step(self, batch):
            return batch.mean() * self.sign * self.state.global_step + 0 * self.model.weight.sum()

    def run(sign):
        saves, module = SaveSteps(), Falling()
        module.sign = sign
        make_trainer({"epochs": 3, "batch_size": 1}, model_saving="best_train_loss", callbacks=saves, log_every=3).fit(
            module, Numbers([1, 1])
        )
        return saves.steps

    assert run(-1) == [2, 4, 6]
    assert run(+1) == [2]


def test_always_saves_at_each_evaluation():
    assert saved_at("always", [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert saved_at("always") == [1, 2, 3, 4]
    assert saved_at("always", [1, 2, 3, 4], evaluate_every_n_steps=2) == [2, 4]


def test_a_run_that_saved_nothing_leaves_no_folder_of_a_model():
    Path("kept").mkdir()
    for path in ("a/b/model", "kept/a/model", "kept/model"):
        trainer = make_trainer({"epochs": 1}, path, model_saving="best_valid_loss")
        trainer.fit(Scripted([float("nan")]), Numbers(4), Numbers(2))
    assert not Path("a").exists()
    assert not list(Path("kept").iterdir())


def test_the_best_weights_are_in_the_folder_not_the_last():
    weights = []

    class Keep(Callback):
        def on_update_end(self):
            weights.append(self.module.unwrapped_model.weight.detach().clone())

    class Module(Linear):
        def validation_step(self, batch):
            return torch.tensor([3.0, 1.0, 2.0][self.state.evaluations_done])

    module = Module()
    trainer = make_trainer({"epochs": 3, "batch_size": 8}, model_saving="best_valid_loss", callbacks=Keep())
    trainer.fit(module, make_points(8), make_points(2))
    fresh = Linear()
    fresh.load_weights("out/model")
    assert torch.equal(fresh.model.weight, weights[1])
    assert not torch.equal(weights[1], weights[2])
    with raises_at(ArgumentError, "trainer.save_model()", "after step 3, and the best model, after step 2"):
        trainer.save_model()
    trainer.save_model("out/last")
    fresh.load_weights("out/last")
    assert torch.equal(fresh.model.weight, weights[2])


def test_a_model_folder_without_a_better_model_gets_the_last_weights():
    trainer = make_trainer({"epochs": 2, "batch_size": 8}, model_saving=None)
    trainer.fit(Linear(), make_points(8))
    trainer.save_model()
    trainer.save_model()
    fresh = Linear()
    fresh.load_weights("out/model")
    assert torch.equal(fresh.model.weight, trainer.model.weight)


def test_a_model_path_below_a_file_is_refused_before_training():
    Path("file").write_text("x")
    recorder = Recorder()
    trainer = make_trainer(model_path="file/model", model_saving="always", callbacks=recorder)
    with raises_at(SavingError, "Trainer(model_path='file/model')", str(Path("file").absolute())):
        trainer.fit(Linear(), make_points(), make_points())
    assert recorder.calls == []


def test_the_run_folder_is_named_after_the_model_path():
    trainer = Trainer(
        {"epochs": 1, "batch_size": 4, "optim": "SGD"},
        "a/b/",
        run_name="first",
        model_saving=None,
        checkpoint_every=None,
        verbose=False,
    )
    trainer.fit(Linear(), make_points())
    assert trainer.log_dir == Path("logs/b/first")
    assert (trainer.log_dir / "history.jsonl").exists()


def test_the_card_of_a_model_counts_the_epoch_at_whose_end_it_was_saved():
    module = Scripted([2.0, 1.0])
    make_trainer({"epochs": 2}, model_saving="best_valid_loss").fit(module, Numbers(4), Numbers(2))
    assert "| epochs finished | 2 |" in Path("out/model/README.md").read_text()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("runs/bert-tiny", "bert-tiny"),
        ("runs/news/model", "news/model"),
        ("runs/news/model/best_valid_loss", "news/model/best_valid_loss"),
        ("cache/models--google--vit-base/snapshots/0123456789abcdef", "google/vit-base"),
    ],
)
def test_a_base_model_in_a_folder_is_called_by_what_says_something(path, name):
    assert _name_of_path(Path(path)) == name
