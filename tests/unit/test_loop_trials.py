"""Runs that try a script, overfit a few batches, or look closer: fast_dev_run, overfit_batches, and torch's flags."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accmt import HyperParameters, Trainer
from tests.toys import HPS, Linear, Numbers, Recorder, Scripted, make_points, make_trainer


@pytest.mark.parametrize("number", [True, 1, 2])
def test_a_trial_run_has_so_many_batches_of_each_kind_and_then_ends(number: Any) -> None:
    module = Scripted()
    trainer = make_trainer({"epochs": 5, "max_steps": 100}, fast_dev_run=number)
    state = trainer.fit(module, Numbers(20), Numbers(20))
    assert (state.global_step, state.epoch, state.finished) == (int(number), 1, True)
    assert len(module.seen) == len(module.validated) == int(number)
    predictions = trainer.predict(Linear(), make_points(20).tensors[0])
    assert len(predictions) == 2 * int(number)


def test_a_trial_run_leaves_the_hyper_parameters_of_the_user_alone() -> None:
    hps = HyperParameters(epochs=3, batch_size=2, max_steps=5)
    trainer = Trainer(hps, "out/model", fast_dev_run=True, verbose=False)
    trainer.fit(Linear(), make_points())
    assert trainer.state.global_step == 1
    assert (hps.epochs, hps.max_steps) == (3, 5)


def test_a_trial_run_writes_nothing_and_calls_no_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorder = Recorder()
    trainer = Trainer(
        {**HPS, "epochs": 3},
        "out/model",
        log_with="tensorboard",
        checkpoint_every="1 step",
        model_saving=["best_valid_loss", "last"],
        patience=1,
        handlers="all",
        evaluate_every_n_steps=1,
        eval_when_start=True,
        min_length="50 steps",
        max_time="00:01:00:00",
        fast_dev_run=True,
        callbacks=recorder,
        seed=0,
    )
    trainer.fit(Linear(), make_points(), make_points())
    assert list(tmp_path.iterdir()) == []
    assert recorder.names("on_evaluation_start", "on_save_model", "on_save_checkpoint") == ["on_evaluation_start"]
    assert trainer.tune(Linear(), make_points(), batch_size="power", lr=True).batch_size is None
    assert Trainer.from_config(trainer.config(), callbacks=[]).settings.running.fast_dev_run is True


def test_an_error_in_a_trial_run_leaves_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Linear):
        def training_step(self, batch: Any) -> Any:
            raise ValueError("a bad batch")

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="a bad batch"):
        Trainer(HPS, "out/model", handlers="all", fast_dev_run=True).fit(Broken(), make_points())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "batches"), [(2, 2), (0.3, 3)])
def test_overfitting_trains_and_validates_on_the_same_batches_in_each_epoch(number: Any, batches: int) -> None:
    module = Scripted()
    trainer = make_trainer(
        {"epochs": 3, "batch_size": [2, 5]}, overfit_batches=number, num_sanity_val_steps=0, sampler=[5, 4, 3]
    )
    trainer.fit(module, Numbers(20), Numbers([100.0]))
    expected = [[2.0 * index, 2.0 * index + 1] for index in range(batches)]
    assert module.seen == module.validated == 3 * expected


def test_overfitting_on_a_loader_of_the_users_keeps_its_batches() -> None:
    module = Scripted()
    loader = DataLoader(Numbers(20), batch_size=4)
    make_trainer({"epochs": 2}, overfit_batches=1, num_sanity_val_steps=0).fit(module, loader, Numbers(4))
    assert module.seen == module.validated == 2 * [[0.0, 1.0, 2.0, 3.0]]


class Looking(Linear):
    """Writes down torch's flags in its step."""

    def training_step(self, batch: Any) -> Any:
        cudnn = torch.backends.cudnn
        self.flags = {
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "benchmark": cudnn.benchmark,
            "warns": torch.is_deterministic_algorithms_warn_only_enabled(),
            "cudnn": cudnn.deterministic,
            "anomaly": torch.is_anomaly_enabled(),
            "variable": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        }
        return self.step(batch)


OFF = {
    "deterministic": False,
    "benchmark": False,
    "warns": False,
    "cudnn": False,
    "anomaly": False,
    "variable": None,
}


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({}, {}),
        (
            {"torch_flags": {"deterministic": True}},
            {"deterministic": True, "cudnn": True, "variable": ":4096:8"},
        ),
        (
            {"torch_flags": {"deterministic": "warn"}},
            {"deterministic": True, "warns": True, "cudnn": True, "variable": ":4096:8"},
        ),
        ({"torch_flags": {"benchmark": True}}, {"benchmark": True}),
        ({"torch_flags": {"detect_anomaly": True}}, {"anomaly": True}),
    ],
)
def test_flags_are_set_for_the_time_of_a_run(settings: dict[str, Any], changed: dict[str, Any]) -> None:
    module = Looking()
    make_trainer(**settings).fit(module, make_points())
    assert module.flags == OFF | changed
    Looking.training_step(module, next(iter(DataLoader(make_points()))))
    assert module.flags == OFF


def test_a_choice_of_the_program_is_kept_and_deterministic_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    module = Looking()
    make_trainer().fit(module, make_points())
    assert module.flags["benchmark"]
    make_trainer(torch_flags={"deterministic": True}).fit(module, make_points())
    assert not module.flags["benchmark"]
    assert torch.backends.cudnn.benchmark


def test_an_operation_that_is_not_deterministic_is_an_error() -> None:
    class Scattering(Linear):
        def training_step(self, batch: Any) -> Any:
            # https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]), accumulate=False)
            return self.step(batch)

    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        make_trainer(torch_flags={"deterministic": True}).fit(Scattering(), make_points())
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
def test_the_operation_that_made_a_nan_is_found() -> None:
    class Rooted(Linear):
        def training_step(self, batch: Any) -> Any:
            inputs, _ = batch
            return (self.model(inputs) * 0).sum().sqrt() * 0

    with pytest.raises(RuntimeError, match="SqrtBackward0' returned nan values"):
        make_trainer(torch_flags={"detect_anomaly": True}).fit(Rooted(), make_points())
