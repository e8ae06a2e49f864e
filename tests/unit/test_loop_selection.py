"""Which models a run saves, and when it ends early: rules, thresholds, patience, several validation sets."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from accmt import AcceleratorModule, Accuracy, Callback, Metric
from accmt.errors import ArgumentError, DataError, ModuleContractError, SavingError
from tests.checkpoints import names_in
from tests.raising import raises_at
from tests.toys import Linear, Numbers, Recorder, Scripted, logged, make_points, make_trainer


class Mean(Metric):
    """The mean of the references."""

    def __init__(self, name="mean", **direction):
        super().__init__(name, **direction)

    def compute(self, predictions, references):
        return {self.name: references.mean().item()}


class TwoSets(AcceleratorModule):
    """Reports the mean of a set's numbers as its loss, and as a metric."""

    def __init__(self):
        self.model = nn.Linear(1, 1, bias=False)

    def training_step(self, batch):
        return self.model(batch.reshape(-1, 1)).pow(2).mean()

    def validation_step(self, key, batch):
        return {"loss": batch.mean(), "mean": (batch, batch)}


def fit(val_losses, samples=4, **settings):
    recorder = Recorder()
    settings = {"model_saving": "best_valid_loss", "callbacks": recorder, **settings}
    trainer = make_trainer({"epochs": len(val_losses)}, **settings)
    trainer.fit(Scripted(val_losses), Numbers(samples), Numbers(2))
    return trainer, recorder


@pytest.mark.parametrize(
    ("losses", "thresholds", "saves"),
    [
        ([0.9, 0.6, 0.5], {"model_saving_below": 0.7}, 2),
        ([0.9, 0.6, 0.5], {"model_saving_below": 0.5}, 0),
        ([0.9, 0.6, 0.5], {"model_saving_above": 0.55}, 2),
        ([0.9, 0.6, 0.5], {"model_saving_above": 0.55, "model_saving_below": {"valid_loss": 0.7}}, 1),
    ],
)
def test_thresholds_hold_saving_back_but_not_the_best_value(losses, thresholds, saves, caplog):
    trainer, recorder = fit(losses, **thresholds)
    assert len(recorder.names("on_save_model")) == saves
    assert trainer.state.best["best_valid_loss"] == 0.5
    assert ("no model was saved" in caplog.text) == (saves == 0)


def test_several_rules_have_a_folder_each():
    rules = ["best_valid_loss", "best_train_loss", "always"]
    trainer, recorder = fit([3.0, 1.0, 2.0], model_saving=rules)
    assert sorted(path.name for path in Path("out/model").iterdir()) == sorted(rules)
    epochs = {rule: json.loads(Path(f"out/model/{rule}/status.json").read_text())["epoch"] for rule in rules}
    assert epochs == {"best_valid_loss": 1, "best_train_loss": 0, "always": 2}
    assert len(recorder.names("on_save_model")) == 2 + 1 + 3
    for rule in rules:
        Scripted().load_weights(f"out/model/{rule}")


class TestPatience:
    @pytest.mark.parametrize(
        ("losses", "patience", "evaluations"),
        [
            ([5.0, 6.0, 4.0, 7.0, 3.0], 2, 5),
            ([5.0, 6.0, 7.0, 1.0], 2, 3),
            ([5.0, 6.0, 7.0, 1.0], {"valid_loss": 1}, 2),
            ([5.0, float("nan"), float("inf"), 1.0], 2, 3),
            ([5.0, 5.0, 5.0, 1.0], 3, 4),
        ],
        ids=str,
    )
    def test_a_run_ends_when_no_evaluation_was_better(self, losses, patience, evaluations):
        trainer, recorder = fit(losses, patience=patience)
        assert trainer.state.evaluations_done == evaluations
        assert trainer.state.finished
        assert recorder.calls[-1] == "on_fit_end"

    @pytest.mark.parametrize(
        ("minimum", "updates"),
        [
            ({"min_length": "4 epochs"}, 8),
            ({"min_length": "7 steps"}, 7),
            ({"min_length": ["3 epochs", "9 steps"]}, 9),
            ({}, 4),
        ],
        ids=str,
    )
    def test_a_minimum_holds_it_back(self, minimum, updates):
        trainer, _ = fit([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], patience=1, **minimum)
        assert trainer.state.global_step == updates

    def test_it_ends_in_the_middle_of_an_epoch(self, caplog):
        with caplog.at_level(logging.INFO):
            trainer, recorder = fit([1.0, 2.0], samples=8, patience=1, evaluate_every_n_steps=1, verbose=True)
        assert (trainer.state.epoch, trainer.state.global_step, trainer.state.epoch_step) == (0, 2, 2)
        assert "early stopping at step 2" in caplog.text
        assert trainer.state.patience_left == 0

    def test_it_survives_an_interruption(self):
        losses = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        settings = {"patience": 3, "checkpoint_every": "epoch", "model_saving": "best_valid_loss"}
        make_trainer({"epochs": 3}, **settings).fit(Scripted(losses), Numbers(4), Numbers(2))
        trainer = make_trainer({"epochs": 6}, resume=True, **settings)
        trainer.fit(Scripted(losses), Numbers(4), Numbers(2))
        assert trainer.state.epoch == 4
        again = make_trainer({"epochs": 6}, resume=True, **settings)
        again.fit(Scripted(losses), Numbers(4), Numbers(2))
        assert (again.state.epoch, again.state.finished) == (4, True)
        longer = make_trainer({"epochs": 6}, resume=True, **{**settings, "patience": 4})
        longer.fit(Scripted(losses), Numbers(4), Numbers(2))
        assert longer.state.epoch == 5

    def test_what_is_left_is_known_before_the_first_evaluation_of_each_part(self):
        class Told(Callback):
            def __init__(self):
                self.left = []

            def on_fit_start(self):
                self.left.append(self.state.patience_left)

        losses, told = [1.0, 2.0, 3.0, 4.0, 5.0], Told()
        settings = {"patience": 3, "model_saving": "best_valid_loss", "checkpoint_every": "epoch", "callbacks": told}
        make_trainer({"epochs": 3}, **settings).fit(Scripted(losses), Numbers(4), Numbers(2))
        make_trainer({"epochs": 5}, resume=True, **settings).fit(Scripted(losses), Numbers(4), Numbers(2))
        make_trainer({"epochs": 1}, callbacks=told).fit(Scripted(losses), Numbers(4), Numbers(2))
        assert told.left == [3, 1, None]

    def test_a_run_that_was_left_when_it_was_used_up_says_so_when_it_goes_on(self, caplog):
        class Broken(Callback):
            def on_epoch_end(self):
                raise RuntimeError

        settings = {"patience": 1, "model_saving": "best_valid_loss", "checkpoint_every": "epoch", "handlers": "all"}
        with pytest.raises(RuntimeError):
            fit([1.0, 2.0], samples=8, evaluate_every_n_steps=1, **settings | {"callbacks": Broken()})
        with caplog.at_level(logging.INFO):
            fit([1.0, 2.0], samples=8, evaluate_every_n_steps=1, resume=True, verbose=True, **settings)
        assert "early stopping at step 2: best_valid_loss has not improved for 1 evaluation(s)" in caplog.text


class TestSeveralSets:
    @pytest.mark.parametrize(
        ("sets", "names"),
        [
            ({"en": Numbers([1, 2, 3]), "de": Numbers([5, 7])}, ["en", "de"]),
            ([Numbers([1, 2, 3]), Numbers([5, 7])], ["0", "1"]),
        ],
        ids=["dict", "list"],
    )
    def test_results_carry_the_name_of_their_set(self, sets, names):
        recorder = Recorder()
        trainer = make_trainer(callbacks=recorder, metrics=[Mean()])
        trainer.fit(TwoSets(), Numbers(4), sets)
        first, second = names
        expected = {f"val_loss__{first}": 2, f"val_loss__{second}": 6, f"mean__{first}": 2, f"mean__{second}": 6}
        assert trainer.state.metrics == pytest.approx(expected)
        assert logged(trainer, f"val_loss__{first}") == [(2, 2.0)]
        assert len(recorder.names("on_validation_end")) == 2
        assert len(trainer.val_dataloaders) == 2

    def test_a_list_of_samples_is_one_set(self):
        trainer = make_trainer(metrics=Accuracy("mean"))
        trainer.fit(TwoSets(), Numbers(4), [torch.tensor(1.0), torch.tensor(3.0)])
        assert trainer.state.metrics == {"val_loss": 2.0, "mean": 1.0}

    @pytest.mark.parametrize(
        ("rule", "best"),
        [
            ("best_valid_loss", {"best_valid_loss": 4.0}),
            ("best_valid_loss@de", {"best_valid_loss@de": 6.0}),
            ("best_mean", {"best_mean": 4.0}),
            ("best_mean__en", {"best_mean@en": 2.0}),
            ("best_mean@en/valid_loss@de", {"best_mean@en/valid_loss@de[mean@en]": 2.0}),
        ],
    )
    def test_models_are_saved_by_one_set_or_by_the_mean(self, rule, best):
        trainer = make_trainer(metrics=[Mean()], model_saving=rule)
        trainer.fit(TwoSets(), Numbers(4), {"en": Numbers([1, 2, 3]), "de": Numbers([5, 7])})
        assert trainer.state.best.items() >= best.items()
        assert Path("out/model/model.safetensors").exists()

    def test_a_set_can_have_metrics_of_its_own(self):
        class OnlyOne(TwoSets):
            def validation_step(self, key, batch):
                return {"loss": batch.mean()} | ({"mean": (batch, batch)} if key == "en" else {})

        trainer = make_trainer(metrics={"en": [Mean()]})
        trainer.fit(OnlyOne(), Numbers(4), {"en": Numbers([1, 2, 3]), "de": Numbers([5, 7])})
        assert set(trainer.state.metrics) == {"val_loss__en", "val_loss__de", "mean__en"}
        with raises_at(ArgumentError, "Trainer(metrics=...)"):
            make_trainer(metrics={"fr": [Mean()]}).fit(OnlyOne(), Numbers(4), {"en": Numbers(2)})

    @pytest.mark.parametrize("name", ["a__b", "a@b", "a/b", "", 3])
    def test_a_name_that_results_cannot_carry_is_refused(self, name):
        with raises_at(DataError, "the names of the validation sets", repr(name)):
            make_trainer().fit(TwoSets(), Numbers(4), {name: Numbers(2)})

    def test_a_plateau_looks_at_the_mean(self):
        trainer = make_trainer({"scheduler": {"type": "ReduceLROnPlateau"}}, metrics=[Mean()])
        trainer.fit(TwoSets(), Numbers(4), {"en": Numbers([1, 2, 3]), "de": Numbers([5, 7])})
        assert trainer.run.scheduler.best == pytest.approx(4.0)


def test_the_last_weights_can_be_saved_apart():
    trainer, _ = fit([1.0, 2.0], model_saving=["best_valid_loss", "last"])
    module = Scripted()
    module.load_weights("out/model/last")
    assert Path("out/model/model.safetensors").is_file()  # the best one
    assert torch.equal(module.model.weight, trainer.run.module.model.weight)
    assert json.loads(Path("out/model/last/status.json").read_text())["epoch"] == 2
    assert json.loads(Path("out/model/status.json").read_text())["epoch"] == 0


def test_a_model_that_could_not_be_saved_is_not_the_best(monkeypatch):
    from accmt import huggingface

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    trainer = make_trainer({"epochs": 2}, model_saving="best_valid_loss", checkpoint_every="epoch")
    module = Scripted([2.0, 1.0])

    class FillTheDisk(Callback):
        def on_evaluation_start(self):
            if self.state.evaluations_done == 1:
                monkeypatch.setattr(huggingface, "save_model", full)

    module.get_callbacks = lambda: [FillTheDisk()]
    with raises_at(SavingError, "model folder out/model", "step 4 ", "Errno 28"):
        trainer.fit(module, Numbers(4), Numbers(2))
    assert trainer.state.best == {"best_valid_loss": 2.0}
    Scripted().load_weights("out/model")
    assert names_in(trainer.checkpoint_path) == ["step-00000004"]


def test_batches_with_and_without_a_weight_cannot_be_averaged():
    class Mixed(TwoSets):
        def validation_step(self, batch):
            output = {"loss": batch.mean()}
            return output | ({"weight": 2.0} if batch[0] > 1 else {})

    with raises_at(ModuleContractError, "validation_step"):
        make_trainer().fit(Mixed(), Numbers(4), Numbers(4))


def test_metrics_are_given_by_name():
    pytest.importorskip("torchmetrics")

    class Regression(Linear):
        def validation_step(self, batch):
            inputs, targets = batch
            return {"loss": self.step(batch), "mse": (self.model(inputs), targets)}

    trainer = make_trainer(metrics="mse", model_saving="best_mse")
    trainer.fit(Regression(), make_points(), make_points(9))
    assert trainer.state.metrics["mse"] == pytest.approx(trainer.state.metrics["val_loss"], rel=1e-5)
    assert trainer.state.best == {"best_mse": trainer.state.metrics["mse"]}


class TestRegisteredRules:
    def test_two_values_of_two_sets_must_both_be_better(self):
        recorder = Recorder()
        trainer = make_trainer({"epochs": 2}, metrics=[Mean()], model_saving=None, callbacks=recorder)
        trainer.register_model_saving("best_mean@en/valid_loss@de", saving_below={"valid_loss@de": 7})
        trainer.fit(TwoSets(), Numbers(4), {"en": Numbers([1, 2, 3]), "de": Numbers([5, 7])})
        assert recorder.names("on_save_model") == ["on_save_model"]  # equal values are not better
