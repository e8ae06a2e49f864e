"""Evaluation: when it happens, what it counts and logs, and what it leaves untouched."""

from __future__ import annotations

import gc
import json
import random
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from accmt import Accuracy, Callback, LambdaCallback, Metric
from accmt.callbacks import HOOKS
from tests.raising import raises_at
from tests.toys import Linear, Numbers, Recorder, Scripted, logged, make_points, make_trainer


class Classifier(Linear):
    """Predicts the sign of a number, always plus."""

    def training_step(self, batch):
        return batch.mean() + 0 * self.model.weight.sum()

    def validation_step(self, batch):
        return {"loss": batch.mean(), "accuracy": (torch.ones_like(batch), batch.sign())}


def test_validation_loss_is_the_mean_over_samples_not_over_batches():
    trainer = make_trainer({"batch_size": 4})
    trainer.fit(Scripted(), Numbers(4), Numbers([1, 1, 1, 1, 6]))
    assert logged(trainer, "val_loss") == [(1, 2.0)]


def test_loss_can_be_reported_by_batch_and_still_decides():
    trainer = make_trainer(
        {"batch_size": [8, 2]}, report_loss_after_eval=False, model_saving="best_valid_loss", num_sanity_val_steps=0
    )
    state = trainer.fit(Scripted(), Numbers(8), Numbers([1, 1, 3, 3, 7]))
    assert logged(trainer, "val_loss") == [(1, 1.0), (2, 3.0), (3, 7.0)]
    assert state.best == {"best_valid_loss": 3.0}


def test_batches_are_reported_every_log_every():
    trainer = make_trainer({"batch_size": [8, 1]}, report_loss_after_eval=False, log_every=2, num_sanity_val_steps=0)
    trainer.fit(Scripted(), Numbers(8), Numbers([1, 2, 3, 4, 5]))
    assert logged(trainer, "val_loss") == [(2, 2.0), (4, 4.0)]


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"evaluate_every_n_steps": 4}, [4, 8, 10]),
        ({"evaluate_every_n_steps": 5}, [5, 10]),
        ({"evaluate_every_n_steps": 4, "eval_when_finish": False}, [4, 8]),
        ({"evaluate_every_n_steps": 7}, [7, 10]),
        ({"evaluate_every_n_steps": 0.5}, [2, 4, 7, 9, 10]),
        ({"evaluate_every_n_steps": 0.01}, list(range(1, 11))),
        ({}, [5, 10]),
        ({"evaluate_every_n_steps": "2 epochs"}, [10]),
    ],
)
def test_evaluations_come_when_they_are_due_and_never_twice_on_the_same_weights(settings: dict, steps: list[int]):
    trainer = make_trainer({"epochs": 2}, **settings)
    state = trainer.fit(Scripted(), Numbers(10), Numbers(2))
    assert [step for step, _ in logged(trainer, "val_loss")] == steps
    assert state.evaluations_done == len(steps)


@pytest.mark.parametrize(("every", "steps"), [(1.0, [3, 6]), (0.67, [2, 5, 6]), (0.34, [1, 2, 3, 4, 5, 6])])
def test_a_last_window_that_is_not_full_is_a_step_of_its_epoch(every: float, steps: list[int]):
    lasts = []
    look = LambdaCallback(on_epoch_start=lambda trainer: lasts.append(trainer.state.is_last_epoch))
    hps = {"epochs": -1, "max_steps": 6}
    trainer = make_trainer(hps, evaluate_every_n_steps=every, grad_accumulation_steps=2, callbacks=look)
    trainer.fit(Scripted(), Numbers(10), Numbers(2))  # 5 micro-batches: windows of 2, 2 and 1
    assert [step for step, _ in logged(trainer, "val_loss")] == steps
    assert lasts == [False, True]


def test_evaluation_before_training_is_logged_at_step_0_and_saves_nothing():
    recorder = Recorder()
    trainer = make_trainer(eval_when_start=True, model_saving="best_valid_loss", callbacks=recorder)
    state = trainer.fit(Scripted([1, 5, 5]), Numbers(2), Numbers(2))
    assert [step for step, _ in logged(trainer, "val_loss")] == [0, 1]
    assert (state.evaluations_done, recorder.calls.count("on_save_model")) == (1, 1)
    assert recorder.calls.count("on_evaluation_start") == 2


def test_the_model_as_it_was_before_training_is_none_of_the_best():
    class Worse(Scripted):
        def validation_step(self, batch):
            return {"loss": torch.tensor(5.0 if self.state.global_step else 1.0)}

    trainer = make_trainer(eval_when_start=True, model_saving="best_valid_loss", patience=1)
    state = trainer.fit(Worse(), Numbers(2), Numbers(2))
    assert dict(state.best) == {"best_valid_loss": 5.0}
    assert json.loads(Path("out/model/status.json").read_text())["global_step"] == 1
    assert state.patience_left == 1


@pytest.mark.parametrize(("every", "updates", "evaluated"), [(2, 5, [4, 5]), (3, 2, [2]), (3, 6, [6]), (2, 8, [4, 8])])
def test_a_run_that_max_steps_ends_is_evaluated_at_its_end(every: int, updates: int, evaluated: list[int]):
    """An epoch has two updates."""
    hps = {"epochs": -1, "max_steps": updates, "batch_size": 1}
    trainer = make_trainer(hps, evaluate_every_n_steps=f"{every} epochs")
    trainer.fit(Scripted(), Numbers(2), Numbers(2))
    assert [step for step, _ in logged(trainer, "val_loss")] == evaluated


def test_the_trial_evaluation_leaves_no_trace():
    recorder = Recorder()
    module = Scripted()
    trainer = make_trainer({"batch_size": [8, 1]}, callbacks=recorder, limit_batches={"train": 1})
    state = trainer.fit(module, Numbers(8), Numbers(5))
    assert [int(batch[0]) for batch in module.validated] == [0, 1, 0, 1, 2, 3, 4]
    assert (state.eval_global_step, state.evaluations_done, state.val_step) == (5, 1, 5)
    assert recorder.calls[0] == "on_fit_start"
    assert len(logged(trainer, "val_loss")) == 1


@pytest.mark.parametrize(("steps", "tried"), [(0, 0), (-1, 5), (3, 3)])
def test_the_trial_evaluation_takes_as_many_batches_as_asked_for(steps: int, tried: int):
    module = Scripted()
    make_trainer({"batch_size": [8, 1]}, num_sanity_val_steps=steps).fit(module, Numbers(8), Numbers(5))
    assert len(module.validated) == tried + 5


class Sloped(Linear):
    """Needs gradients in its validation step."""

    def validation_step(self, batch):
        with torch.enable_grad():
            inputs = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.model(inputs).sum(), inputs)
        return slope.square().mean()


def test_a_validation_step_that_needs_gradients_fails_before_training_with_the_argument_that_allows_it():
    trainer = make_trainer()
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(Sloped(), make_points(4), make_points(4))
    assert "Trainer(inference_mode=False)" in "".join(caught.value.__notes__)
    assert trainer.state.global_step == 0
    make_trainer(inference_mode=False).fit(Sloped(), make_points(4), make_points(4))


EVALUATION_HOOKS = [name for name in HOOKS if "evaluation" in name or "validation" in name] + [
    "on_log",
    "on_save_model",
]


class Modes(Callback):
    """Writes down, at each hook and step of an evaluation, what model and autograd are set to."""

    def __init__(self):
        self.seen = {}

    def note(self, name):
        inner = self.module.unwrapped_model
        modes = (self.module.model.training, inner[0].training, inner[1].training)
        self.seen.setdefault(name, set()).add((*modes, torch.is_grad_enabled()))


for _name in EVALUATION_HOOKS:
    setattr(Modes, _name, lambda self, _name=_name: self.note(_name))


class Frozen(Linear):
    """Has dropout, and a layer that stays in evaluation mode in training, too."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3).eval(), nn.Linear(3, 1))

    def modes(self):
        return [module.training for module in self.model.modules()]


class FreezingNet(nn.Sequential):
    """Keeps batch norm in evaluation mode, by an override of `train` as detection backbones have it."""

    def train(self, mode: bool = True):
        super().train(mode)
        self[0].eval()
        return self


class Freezing(Linear):
    def __init__(self):
        torch.manual_seed(0)
        self.model = FreezingNet(nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.seen = []

    def training_step(self, batch):
        self.seen.append([module.training for module in self.model.modules()])
        return self.step(batch)


def test_what_a_models_own_train_freezes_is_frozen_from_the_first_step():
    module = Freezing()
    make_trainer({"epochs": 2}).fit(module, make_points(), make_points(6))
    assert module.seen == [[True, False, True]] * 8
    assert module.model[0].num_batches_tracked == 0


class MergingLinear(nn.Linear):
    """Adds its adapter to the weight in evaluation mode, as loralib's layers do."""

    def __init__(self):
        super().__init__(3, 1)
        self.weight.requires_grad_(False)
        self.adapter = nn.Parameter(torch.zeros(1, 3))

    def train(self, mode: bool = True):
        if mode != self.training:
            self.weight.data += -self.adapter.data if mode else self.adapter.data
        return super().train(mode)

    def forward(self, inputs):
        return super().forward(inputs) + (inputs @ self.adapter.T if self.training else 0)


class Merging(Linear):
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(MergingLinear())


def test_an_adapter_that_is_merged_for_evaluation_is_trained_after_it():
    weights = []
    for every in ("2 steps", "1 epoch"):
        module = Merging()
        make_trainer({"epochs": 1}, evaluate_every_n_steps=every).fit(module, make_points(), make_points(6))
        weights.append(module.model[0].adapter.detach())
    torch.testing.assert_close(*weights)


OFF = {(False, False, False, False)}


@pytest.mark.parametrize("fails", [None, "on_evaluation_start", "on_validation_end", "on_evaluation_end"])
def test_hooks_of_an_evaluation_see_a_model_that_is_evaluated_and_modes_come_back(fails: str | None):
    def fail():
        if module.model.training:
            return
        module.model.train()  # whatever hooks set
        raise ValueError("broken")

    module, watching = Frozen(), Modes()
    before = module.modes()
    hooks = [watching, *([LambdaCallback(order=1, **{fails: fail})] if fails else [])]
    trainer = make_trainer(callbacks=hooks, model_saving="always", log_every=100, report_loss_after_eval=False)
    with pytest.raises(ValueError, match="broken") if fails else nullcontext():
        trainer.fit(module, make_points(), make_points(6))
    assert module.modes() == before
    assert fails or watching.seen.keys() == set(EVALUATION_HOOKS)
    watching.seen.pop("on_log", None)  # which training calls, too
    assert all(seen == OFF for seen in watching.seen.values())


def test_data_of_an_evaluation_are_fetched_with_gradients_as_those_of_training_are():
    class Differentiated(Numbers):
        def __getitem__(self, index):
            number = super().__getitem__(index).requires_grad_()
            return torch.autograd.grad(number**2, number)[0]

    state = make_trainer(num_sanity_val_steps=0).fit(Scripted(), Differentiated(4), Differentiated(4))
    assert state.metrics["val_loss"] == 3.0  # the mean of 0, 2, 4 and 6


def test_metrics_see_every_sample_once_and_a_model_can_be_selected_by_them():
    trainer = make_trainer({"batch_size": 2}, metrics=Accuracy(), model_saving="best_accuracy")
    state = trainer.fit(Classifier(), Numbers(4), Numbers([1, -1, 1, 1, 1]))
    assert logged(trainer, "accuracy") == [(2, 0.8)]
    assert state.best == {"best_accuracy": 0.8}
    assert state.metrics == {"accuracy": 0.8, "val_loss": pytest.approx(0.6)}


def test_a_validation_step_without_the_loss_that_decides_fails_before_the_first_update():
    class Lossless(Scripted):
        def validation_step(self, batch):
            return {"accuracy": (batch, batch)}

    with raises_at(TypeError, "Trainer(model_saving='best_valid_loss')"):
        make_trainer(metrics=Accuracy(), model_saving="best_valid_loss").fit(Lossless(), Numbers(4), Numbers(4))


def test_a_validation_step_needs_no_loss_where_nothing_is_selected_by_it():
    class Lossless(Scripted):
        def validation_step(self, batch):
            return {"accuracy": (batch, batch)}

    state = make_trainer(metrics=Accuracy(), model_saving="best_accuracy").fit(Lossless(), Numbers(4), Numbers(4))
    assert state.metrics == {"accuracy": 1.0}


def test_reduce_on_plateau_steps_by_the_validation_loss():
    hps = {"epochs": 4, "scheduler": {"type": "ReduceLROnPlateau", "patience": 0, "factor": 0.5}}
    trainer = make_trainer(hps)
    module = Scripted([1, 2, 2, 2])
    trainer.fit(module, Numbers(2), Numbers(2))
    assert module.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


def test_a_metric_may_return_several_values():
    class Spread(Metric):
        def compute(self, predictions, references):
            return {"low": predictions.min(), "high": predictions.max().item()}

    class Module(Scripted):
        def validation_step(self, batch):
            return {"loss": batch.mean(), "spread": (batch, batch)}

    metric = Spread("spread", comparator="<", main_metric="low")
    state = make_trainer(metrics=[metric], model_saving="best_low").fit(Module(), Numbers(4), Numbers([3, 1, 2]))
    assert (state.metrics["low"], state.metrics["high"], state.best) == (1.0, 3.0, {"best_low": 1.0})


def test_what_is_kept_of_batches_does_not_grow_with_their_number():
    living: list[int] = []

    class Counting(Scripted):
        def validation_step(self, batch):
            if self.state.val_step % 50 == 0:
                living.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
            return {"loss": batch.mean(), "accuracy": (batch > 0, batch >= 0)}

    results = make_trainer({"batch_size": 1}, metrics=Accuracy()).validate(Counting(), Numbers(2400))
    assert results == {"val_loss": 1199.5, "accuracy": 2399 / 2400}
    assert len(living) == 48
    first, later = living[:24], living[24:]
    assert max(later) <= max(first) + 10


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_that_draws_gets_the_same_numbers_however_data_are_loaded(workers: int):
    class Drawing(Scripted):
        def validation_step(self, batch):
            return {"loss": batch.mean(), "drawn": torch.rand((), dtype=torch.float64), "random": random.random()}

    results = [make_trainer(dataloader_num_workers=n).validate(Drawing(), Numbers(5)) for n in (0, workers)]
    assert results[0] == results[1]
    assert 0 < results[0]["drawn"] < 1
    assert results[0]["random"] != make_trainer(seed=1).validate(Drawing(), Numbers(5))["random"]


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_each_batch_draws_numbers_of_its_own(method: str):
    drawn: list[float] = []

    class Drawing(Scripted):
        def validation_step(self, batch):
            drawn.append(torch.rand(()).item())
            return {"loss": batch.mean()}

        def predict_step(self, batch):
            drawn.append(torch.rand(()).item())
            return batch

    for _ in range(2):
        getattr(make_trainer({"batch_size": 1}), method)(Drawing(), Numbers(4))
    assert len(set(drawn)) == 4
    assert drawn[:4] == drawn[4:], "the same in each evaluation"
