"""Several results made into one: what is taken, its mean, its name in rules and patience, and what is logged."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest
import torch

from accmt import Accuracy, Metric, read_history
from accmt.addons.averages import Averages
from accmt.errors import ArgumentError, MetricError
from tests.raising import raises_at
from tests.toys import Linear, Numbers, Scripted, logged, make_points, make_trainer

SETS = {"en": Numbers([1, 2, 3]), "de": Numbers([5, 7]), "fr": Numbers([0])}


class Mean(Metric):
    def compute(self, predictions, references):
        return {self.name: predictions.mean(), "largest": predictions.max()}


class OfSets(Scripted):
    def validation_step(self, key, batch):
        return {"loss": batch.mean(), "mean": (batch, batch), "count": float(len(batch))}


def starts_with_mean(name):
    return name.startswith("mean")


def fit(means, *, sets=SETS, epochs=1, metrics=None, options=None, **settings):
    options = {"averages": means, **(options or {})}
    trainer = make_trainer({"epochs": epochs}, metrics=metrics or [Mean("mean")], metric_options=options, **settings)
    trainer.fit(OfSets(), Numbers(4), sets)
    return trainer


# In a run


@pytest.mark.parametrize("choice", [starts_with_mean, ["mean__en", "mean__de", "mean__fr"]], ids=["function", "names"])
def test_the_mean_of_what_is_taken_is_a_result(choice):
    trainer = fit({"average": choice})
    assert trainer.state.metrics["average"] == pytest.approx((2 + 6 + 0) / 3)
    assert logged(trainer, "average") == [(2, pytest.approx(8 / 3))]


@pytest.mark.parametrize("reports_all", [False, True])
def test_what_was_taken_is_logged_only_if_it_is_asked_for(reports_all):
    trainer = fit({"average": starts_with_mean}, options={"report_all": reports_all})
    names = {name for row in read_history(trainer.log_dir) for name in row.get("values", {})}
    taken = {"mean__en", "mean__de", "mean__fr"}
    assert names & taken == (taken if reports_all else set())
    assert {"average", "val_loss__en", "largest__de", "count__fr"} <= names
    assert taken <= trainer.state.metrics.keys()


def test_a_function_of_all_their_values_gives_further_results():
    def lowest(values):
        assert values == {"average": [2.0, 6.0, 0.0], "germanic": [2.0, 6.0]}
        return {"lowest": min(values["average"]), "highest": torch.tensor(max(values["germanic"]))}

    choices = {"average": starts_with_mean, "germanic": ["mean__en", "mean__de"]}
    trainer = fit(choices, options={"derived": lowest})
    found = {name: trainer.state.metrics[name] for name in ("germanic", "lowest", "highest")}
    assert found == {"germanic": 4.0, "lowest": 0.0, "highest": 6.0}
    assert logged(trainer, "lowest") == [(2, 0.0)]


def test_losses_are_never_taken():
    trainer = fit({"all": lambda name: True}, metrics=[Accuracy("mean")])
    of_metrics = [trainer.state.metrics[f"{name}__{key}"] for name in ("mean", "count") for key in SETS]
    assert trainer.state.metrics["all"] == pytest.approx(sum(of_metrics) / 6)


def test_models_are_saved_and_runs_end_by_it():
    class Changing(OfSets):
        def validation_step(self, key, batch):
            mean = torch.tensor([2.0, 4.0, 3.0, 1.0, 0.0][self.state.epoch])
            return {"loss": batch.mean(), "mean": (mean, mean), "count": 1.0}

    told = {"model_saving": "best_average", "patience": {"average": 2}, "metrics": [Mean("mean")]}
    trainer = make_trainer({"epochs": 5}, metric_options={"averages": {"average": starts_with_mean}}, **told)
    trainer.fit(Changing(), Numbers(4), SETS)
    assert trainer.state.best == {"best_average": 4.0}
    assert trainer.state.epoch == 4
    assert Path("out/model/model.safetensors").exists()


def test_its_direction_is_that_of_what_is_taken():
    class Falling(Mean):
        def __init__(self):
            super().__init__("mean", greater_is_better=False)

    trainer = fit({"average": starts_with_mean}, metrics=[Falling()], model_saving="best_average")
    assert trainer.run.saver.selection.consider({"best_average": 1.0})
    assert not trainer.run.saver.selection.consider({"best_average": 9.0})


def test_evaluations_by_hand_have_it_too_and_may_be_of_other_sets():
    trainer = fit({"average": starts_with_mean, "two": ["mean__en", "mean__de"]}, model_saving=None)
    assert trainer.validate() == trainer.state.metrics
    results = trainer.test(test_dataset={"en": Numbers([3]), "it": Numbers([4])})
    assert results["average"] == 3.5
    assert "two" not in results
    assert trainer.test(test_dataset=Numbers([3, 4]))["average"] == 3.5


def test_one_set_alone_and_a_run_without_any_are_no_error():
    trainer = make_trainer(metrics=[Accuracy()], metric_options={"averages": {"average": lambda name: True}})
    trainer.fit(Linear(), make_points())
    assert trainer.state.metrics == {}
    assert fit({"average": ["mean", "largest"]}, sets=Numbers([1, 3])).state.metrics["average"] == 2.5


# What goes wrong


@pytest.mark.parametrize(
    ("choice", "got", "do"),
    [
        (["mean__en", "mean_de"], "'mean_de' in 'average'", "'mean__de'"),
        (lambda name: name == "accuracy", "'average', which selects", ""),
    ],
)
def test_what_is_not_there_surfaces_before_the_first_update(choice, got, do):
    trainer = make_trainer(metrics=[Mean("mean")], metric_options={"averages": {"average": choice}})
    with raises_at(MetricError, 'Trainer(metric_options={"averages": ...})', got, do=do):
        trainer.fit(OfSets(), Numbers(4), SETS)
    assert trainer.state.global_step == 0


def test_a_name_that_a_result_has_is_rejected():
    with raises_at(MetricError, 'Trainer(metric_options={"averages": ...})'):
        fit({"mean": lambda name: name == "largest"}, sets=Numbers([1, 3]))
    assert fit({"mean": starts_with_mean}).state.metrics["mean"] == pytest.approx(8 / 3)  # of several sets it is free


def test_results_of_two_directions_are_rejected_at_the_start():
    metrics = [Mean("mean"), Accuracy("count")]
    metrics[0].greater_is_better, metrics[0].comparator = False, "<"
    with raises_at(MetricError, 'Trainer(metric_options={"averages": ...})'):
        fit({"average": lambda name: True}, metrics=metrics)


def test_what_has_no_direction_cannot_decide():
    with raises_at(ArgumentError, "Trainer(model_saving=...)"):
        fit({"average": lambda name: name.startswith("count")}, model_saving="best_average")


@pytest.mark.parametrize("made", [3.0, {"lowest": torch.ones(2)}, {"lowest": "low"}, None])
def test_a_function_that_returns_no_numbers_is_rejected(made):
    with raises_at(MetricError, 'Trainer(metric_options={"derived": ...})'):
        Averages({"average": ["a"]}, lambda values: made).compute({"a": 1.0})


def test_a_further_result_with_a_name_that_there_is_is_rejected():
    with raises_at(MetricError, 'Trainer(metric_options={"averages": ...})'):
        Averages({"average": ["a"]}, lambda values: {"average": 1.0}).compute({"a": 1.0})


def test_directions_are_known_where_all_that_is_taken_has_one():
    def unknown(new, best):
        raise MetricError("nobody knows")

    directions = {"up": operator.gt, "down": operator.lt, "strange": unknown}
    choices = {"ups": ["up"], "downs": ["down"], "strange": ["strange"], "none": ["missing"]}
    assert Averages(choices).find_directions(directions) == {"ups": operator.gt, "downs": operator.lt}


# The parts
