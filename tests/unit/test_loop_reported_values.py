"""Values that steps and hooks report: they are logged, and decide about saving, patience and the scheduler."""

import math
import sys
from types import ModuleType

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accmt import ArgumentError, Callback, HyperParameterError, LambdaCallback, Metric, MetricError, ModuleContractError
from accmt.metrics import TorchMetric, build_metrics
from tests.raising import raises_at
from tests.toys import Linear, Numbers, Scripted, logged, make_points, make_trainer


class Adds(Callback):
    """Adds one scripted value at each evaluation."""

    def __init__(self, *values: float, name: str = "mine", hook: str = "on_evaluation_end") -> None:
        self.values, self.name = list(values), name
        setattr(self, hook, self._add_to_outputs if hook == "on_validation_end" else self._add)

    def _add(self, metrics):
        metrics[self.name] = self.values[min(self.state.evaluations_done, len(self.values)) - 1]

    def _add_to_outputs(self, outputs):
        outputs[self.name] = self.values[self.state.evaluations_done]


def fit(callback=None, epochs=3, scheduler=None, module=None, **settings):
    hps = {"epochs": epochs, **({"scheduler": scheduler} if scheduler else {})}
    trainer = make_trainer(hps, callbacks=callback, **settings)
    trainer.fit(module or Linear(), make_points(4), make_points(4))
    return trainer


@pytest.mark.parametrize("hook", ["on_evaluation_end", "on_validation_end"])
def test_a_value_that_a_callback_adds_is_logged_and_decides(hook):
    adds = Adds(3.0, 1.0, 2.0, hook=hook)
    trainer = fit(adds, metrics={"mine": "min"}, model_saving="best_mine", patience={"mine": 2})
    assert trainer.state.best == {"best_mine": 1.0}
    assert [value for _, value in logged(trainer, "mine")] == [3.0, 1.0, 2.0]
    assert len(logged(trainer, "val_loss")) == 3
    assert trainer.state.best_metrics["mine"] == 1.0
    assert trainer.state.patience_left == {"best_mine": 1}


def test_a_module_derives_a_value_without_a_metric_or_a_callback(tmp_path):
    class Perplexing(Linear):
        def validation_step(self, batch):
            self.log("margin", batch[0].mean())
            return {"loss": self.step(batch), "half": 0.5}

        def on_evaluation_end(self, metrics):
            metrics["perplexity"] = math.exp(metrics["val_loss"])

    reported = {"perplexity": "min", "margin": "max", "half": "min"}
    rules = ["best_perplexity", "best_margin", "best_half"]
    trainer = fit(module=Perplexing(), metrics=["mse", reported][1:], model_saving=rules)
    assert trainer.state.best["best_perplexity"] == min(value for _, value in logged(trainer, "perplexity"))
    assert trainer.state.best["best_half"] == 0.5
    again = type(trainer).from_config("out/model/best_half/trainer_config.json")
    assert again.settings.evaluation.metrics == [reported]


def test_a_value_that_no_step_reports_is_an_error_before_training_where_no_hook_may_add_it():
    with raises_at(ModuleContractError, "Trainer(model_saving='best_mine')"):
        fit(metrics={"mine": "min"}, model_saving="best_mine")
    idle = LambdaCallback(on_evaluation_end=lambda metrics: None)
    with raises_at(ModuleContractError, "Trainer(model_saving='best_mine')"):
        fit(idle, metrics={"mine": "min"}, model_saving="best_mine")


def test_what_is_added_has_to_be_a_number():
    add = LambdaCallback(on_evaluation_end=lambda metrics: metrics.update(mine=[1.0]))
    with raises_at(ModuleContractError, "on_evaluation_end"):
        fit(add)


class Rates(Scripted):
    """Has scripted losses and accuracies, and keeps the rate after each epoch."""

    def __init__(self, losses, accuracies, scheduler=None):
        super().__init__(losses)
        self.accuracies, self.rates, self.scheduler_of_user = accuracies, [], scheduler

    def validation_step(self, batch):
        return {"loss": super().validation_step(batch), "acc": self.accuracies[self.state.evaluations_done]}

    def on_epoch_end(self):
        self.rates.append(self.optimizer.param_groups[0]["lr"])


class RatesOfOwnScheduler(Rates):
    def get_scheduler(self, optimizer, steps_per_epoch, epochs):
        return self.scheduler_of_user(optimizer)


PLATEAU = {"type": "ReduceLROnPlateau", "patience": 0}
ACC = {"metrics": {"acc": "max"}, "num_sanity_val_steps": 0}


@pytest.mark.parametrize("mode", [{}, {"mode": "max"}])
def test_a_scheduler_watches_a_metric_in_its_direction(mode):
    module = Rates([1, 2, 3], [0.5, 0.6, 0.4])
    trainer = make_trainer({"epochs": 3, "scheduler": {**PLATEAU, "monitor": "acc", **mode}}, **ACC)
    trainer.fit(module, Numbers(2), Numbers(2))
    assert module.rates == pytest.approx([0.1, 0.1, 0.01])


def test_a_scheduler_watches_what_a_hook_adds():
    trainer = fit(Adds(3.0, 2.0, 4.0), scheduler={**PLATEAU, "monitor": "mine"}, metrics={"mine": "min"})
    assert trainer.run.stepper.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_scheduler_of_the_module_names_what_it_watches():
    def build(optimizer, mode="max"):
        scheduler = ReduceLROnPlateau(optimizer, mode=mode, patience=0)
        scheduler.monitor = "acc"
        return scheduler

    module = RatesOfOwnScheduler([1, 2, 3], [0.5, 0.6, 0.4], build)
    make_trainer({"epochs": 3}, **ACC).fit(module, Numbers(2), Numbers(2))
    assert module.rates == pytest.approx([0.1, 0.1, 0.01])
    for wrong in (lambda optimizer: build(optimizer, "min"), lambda optimizer: ReduceLROnPlateau(optimizer, "max")):
        with raises_at(ArgumentError, "hps_config scheduler.mode"):
            make_trainer({"epochs": 3}, **ACC).fit(RatesOfOwnScheduler([1], [1], wrong), Numbers(2), Numbers(2))


@pytest.mark.parametrize(
    ("scheduler", "settings", "key", "got", "do"),
    [
        ({"mode": "max"}, {}, "mode", "'max' for valid_loss", "monitor: accuracy"),
        ({"monitor": 3}, {}, "monitor", "3 (int)", ""),
        ({"monitor": "acc"}, {}, "monitor", "'acc'", "metrics="),
        ({"monitor": "eval_loss"}, {}, "monitor", "'eval_loss'", "`monitor: valid_loss`"),
        ({"monitor": "train_loss"}, {}, "monitor", "'train_loss'", ""),
        ({"monitor": "acc", "mode": "min"}, ACC, "mode", "'min' for acc", ""),
        ({"monitor": "valid_loss", "mode": "max"}, {}, "mode", "'max' for valid_loss", ""),
    ],
)
def test_a_monitor_that_cannot_be_is_refused(scheduler, settings, key, got, do):
    with raises_at((ArgumentError, HyperParameterError), f"hps_config scheduler.{key}", got, do=do):
        fit(scheduler={**PLATEAU, **scheduler}, **settings)


def test_a_scheduler_that_watches_a_metric_resumes_exactly():
    def run(epochs, **settings):
        module = Rates([1] * 4, [0.5, 0.6, 0.4, 0.55])
        hps = {"epochs": epochs, "scheduler": {**PLATEAU, "patience": 1, "monitor": "acc"}}
        trainer = make_trainer(hps, checkpoint_every="epoch", **ACC, **settings)
        trainer.fit(module, Numbers(2), Numbers(2))
        return trainer.run.scheduler.state_dict(), module.optimizer.param_groups[0]["lr"]

    whole = run(4, model_path="out/whole")
    run(2)
    assert run(4, resume=True) == whole
    assert whole[1] == pytest.approx(0.01)


class Whole(Metric):
    """Joins predictions to a table with one row for each sample."""

    def compute(self, predictions, references):
        if len(predictions) != 6:
            raise ValueError(f"{len(predictions)} predictions for 6 rows")
        return {"whole": float(predictions.mean())}


class Pairs(Linear):
    def validation_step(self, batch):
        return {"loss": self.step(batch), "whole": (batch[0], batch[1])}


def test_a_metric_that_needs_the_whole_set_does_not_fail_in_the_trial(caplog):
    metric = Whole("whole")
    trainer = make_trainer(metrics=metric, model_saving="best_whole", num_sanity_val_steps=2)
    trainer.fit(Pairs(), make_points(4), make_points(6))
    assert (
        "metric 'whole' cannot be checked before training: over the first batches it raises ValueError" in caplog.text
    )
    assert "best_whole" in trainer.state.best


def test_an_error_that_is_no_matter_of_the_trial_is_raised_there(caplog):
    class Misspelt(Whole):
        def compute(self, predictions, references):
            return {"whole": predictions.maen()}

    with pytest.raises(AttributeError) as error:
        make_trainer(metrics=Misspelt("whole")).fit(Pairs(), make_points(4), make_points(6))
    assert "happened in the trial before training" in error.value.__notes__[0]
    for data, steps in ((make_points(4), 2), (make_points(8), -1)):  # sets that the trial sees whole
        with pytest.raises(ValueError, match="predictions for 6 rows"):
            make_trainer(metrics=Whole("whole"), num_sanity_val_steps=steps).fit(Pairs(), make_points(4), data)
    assert "is not tried" not in caplog.text


def test_advice_about_a_direction_is_what_works():
    from torchmetrics import PearsonCorrCoef

    class Correlated(Linear):
        def validation_step(self, batch):
            return {"loss": self.step(batch), "pearson": (self.model(batch[0]), batch[1])}

    points = make_points(4), make_points(6)
    with raises_at(MetricError, "metric 'pearson'"):
        make_trainer(metrics={"pearson": PearsonCorrCoef()}, model_saving="best_pearson").fit(Correlated(), *points)
    unnamed = TorchMetric(PearsonCorrCoef(), greater_is_better=True)
    with raises_at(MetricError, "Trainer(metrics=...)"):
        make_trainer(metrics={"pearson": unnamed})
    named = TorchMetric(PearsonCorrCoef(), "pearson", greater_is_better=True)
    state = make_trainer(metrics={"pearson": named}, model_saving="best_pearson").fit(Correlated(), *points)
    assert "best_pearson" in state.best


@pytest.fixture
def modules(monkeypatch):
    """Return the base classes of `evaluate`, as far as accmt looks at them."""
    package = ModuleType("evaluate.module")
    for name in ("EvaluationModule", "CombinedEvaluations"):
        setattr(package, name, type(name, (), {"__module__": "evaluate.module"}))
    monkeypatch.setitem(sys.modules, "evaluate.module", package)
    return package


def test_metrics_of_evaluate_are_taken_as_they_are(modules):
    class Loaded(modules.EvaluationModule):
        def __init__(self, name, *results):
            self.name, self.results = name, results

        def compute(self, predictions=None, references=None):
            share = float((predictions > references).float().mean())
            return {result: share for result in self.results} | {"of_classes": [1, 2]}

    class Both(Linear):
        def validation_step(self, batch):
            pair = self.model(batch[0]), batch[1]
            return {"loss": self.step(batch), "wer": pair, "own": pair, "glue": pair}

    metrics = [Loaded("wer", "wer"), {"own": Loaded("share", "share"), "glue": Loaded("glue", "f1", "glue")}]
    trainer = make_trainer(metrics=metrics, model_saving=["best_wer", "best_own"])
    trainer.fit(Both(), make_points(4), make_points(6))
    assert set(trainer.state.metrics) == {"val_loss", "wer", "own", "f1", "glue"}
    lower, higher = trainer.run.metrics[""][:2]
    assert (lower.greater_is_better, higher.greater_is_better) == (False, True)
    combined = type(
        "Two", (modules.CombinedEvaluations,), {"compute": lambda self, **k: {"a": 1, "b": torch.tensor(2)}}
    )
    (metric,) = build_metrics({"b": combined()})
    assert metric.compute(None, None) == {"a": 1.0, "b": 2.0}
    with raises_at(MetricError, "metric 'c'"):
        build_metrics({"c": combined()})[0].compute(None, None)


@pytest.mark.parametrize(
    ("options", "values", "evaluations"),
    [
        ({"stopping_threshold": 0.9}, (0.5, 0.9, 0.1, 0.1), 2),
        ({"check_finite": True}, (0.5, math.nan, 0.1, 0.1), 2),
        ({"patience": "2 evals", "min_delta": 0.1}, (0.5, 0.55, 0.58, 0.59), 3),
    ],
)
def test_training_ends_by_the_options_of_patience(options, values, evaluations, caplog):
    caplog.set_level("INFO", logger="accmt")
    settings = {"metrics": {"mine": "max"}, "patience": {"mine": options}, "checkpoint_every": "epoch"}
    assert fit(Adds(*values), epochs=4, **settings).state.evaluations_done == evaluations
    assert "early stopping at step" in caplog.text
    assert fit(Adds(*values), epochs=4, **settings, resume=True).state.evaluations_done == evaluations
