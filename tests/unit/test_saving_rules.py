"""The names of rules: every spelling, what is refused, and which values of an evaluation a rule looks at."""

from __future__ import annotations

import math
import operator

import pytest

from accmt.errors import ArgumentError, MetricError
from accmt.registry import names
from accmt.saving.selection import METRIC_NAMES, Argument, Quantities, name_by_rules, without_validation
from tests.raising import raises_at

DIRECTIONS = {"accuracy": operator.gt, "wer": operator.lt, "f1": operator.gt, "f1__macro": operator.gt}
ARGUMENT = Argument("model_saving")


def read(names, sets=("en", "de")):
    return [rule.name for rule in Quantities(DIRECTIONS, sets).read_rules(names, ARGUMENT)]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (None, []),
        ("always", ["always"]),
        ("best_valid_loss", ["best_valid_loss"]),
        ("best_accuracy@en", ["best_accuracy@en"]),
        ("best_accuracy__en", ["best_accuracy@en"]),
        ("best_valid_loss__de", ["best_valid_loss@de"]),
        ("best_f1__macro", ["best_f1__macro"]),
        ("best_f1__macro__en", ["best_f1__macro@en"]),
        ("best_accuracy@en/f1@de/train_loss", ["best_accuracy@en/f1@de/train_loss"]),
        (("best_accuracy", "always"), ["best_accuracy", "always"]),
    ],
    ids=str,
)
def test_each_rule_has_one_name_however_it_is_spelled(names, found):
    assert read(names) == found


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        ("best_acuracy", "did you mean 'best_accuracy'?"),
        ("best_accuracy@ne", "did you mean 'best_accuracy@en'?"),
        ("best_acuracy@english", "did you mean 'best_accuracy@en'?"),
        ("best_kappa@en", "a Metric named 'kappa'"),
        ("best_accuracy__fr", "did you mean 'best_accuracy'?"),
        ("best_eval_accuracy", "did you mean 'best_accuracy'?"),
        ("eval_loss", "did you mean 'best_valid_loss'?"),
        ("best_eval_kappa", "a Metric named 'kappa'"),
        ("best_wre", "did you mean 'best_wer'?"),
        ("best_train_loss@en", "did you mean 'best_train_loss'?"),
        ("best_accuracy@", "did you mean 'best_accuracy'?"),
        ("accuracy/f1", "did you mean 'best_accuracy/f1'?"),
        ("best_acuracy@en/best_f1", "did you mean 'best_accuracy@en/f1'?"),
        ("best_always", "did you mean 'always'?"),
        ("best_accuracy/kappa@en", "a Metric named 'kappa'"),
        ("best_accuracy/always", "a Metric named 'always'"),
        ("best_accuracy/accuracy", "write 'best_accuracy'"),
        ("best_", "write 'best_valid_loss'"),
        ("best_acc", "did you mean 'best_accuracy'?"),
        ("best_ACC@en", "did you mean 'best_accuracy@en'?"),
        ("best_auc/acc", """write 'best_auroc', with "auroc" among metrics=[...]"""),
        (["best_accuracy@en", "best_accuracy__en"], "model_saving=['best_accuracy@en']"),
        (["best_accuracy", None], "write 'best_valid_loss'"),
        ([], "model_saving=None"),
        (True, "write 'best_valid_loss'"),
    ],
    ids=str,
)
def test_what_is_no_rule_is_refused_with_what_may_be_meant(names, advice):
    with pytest.raises(ArgumentError) as error:
        read(names)
    assert str(error.value).startswith("Trainer(model_saving=...)")
    assert str(error.value).splitlines()[-1].strip().startswith("do: ")
    assert advice in str(error.value).splitlines()[-1]


def test_one_set_without_a_name_is_as_none():
    assert read("best_accuracy", sets=[""]) == ["best_accuracy"]
    assert value_of("accuracy", {"best_accuracy__": 1.0}, sets=[""]) is None
    with raises_at(ArgumentError, "Trainer(model_saving=...)"):
        read("best_accuracy@en", sets=[""])


def test_before_the_sets_are_known_every_set_passes_and_no_unknown_metric():
    assert read(["best_accuracy@any", "best_wer__other"], sets=None) == ["best_accuracy@any", "best_wer@other"]
    with raises_at(ArgumentError, "Trainer(model_saving=...)"):
        read("best_acuracy@any", sets=None)
    with raises_at(ArgumentError, "Trainer(model_saving=...)"):
        read("best_accuracy@en", sets=[])


def test_the_prefix_may_be_missing_where_values_are_named_one_by_one():
    quantities = Quantities(DIRECTIONS, ["en"])
    names = [quantities.read_rule(name, ARGUMENT).name for name in ("wer", "best_wer", "wer__en", "valid_loss@en")]
    assert names == ["best_wer", "best_wer", "best_wer@en", "best_valid_loss@en"]


def test_a_metric_cannot_take_the_name_of_a_loss():
    with raises_at(MetricError, "metric 'train_loss'"):
        Quantities({"train_loss": operator.gt})


def value_of(name, values, sets=("en", "de")):
    (quantity,) = Quantities(DIRECTIONS, sets).read_rule(name, ARGUMENT).quantities
    return quantity.read(values) if quantity.is_in(values) else None


@pytest.mark.parametrize(
    ("name", "values", "value"),
    [
        ("wer", {"best_wer": 0.0}, 0.0),
        ("wer", {"best_wer__en": 1.0, "best_wer__de": 0.5}, 0.75),
        ("wer", {"best_wer__en": 1.0, "best_wer__de": 0.5, "best_wer": 0.1}, 0.1),
        ("wer", {"best_wer__en": 1.0}, None),
        ("wer@de", {"best_wer__en": 1.0, "best_wer__de": 0.5, "best_wer": 0.1}, 0.5),
        ("wer@de", {"best_wer__en": 1.0, "best_wer": 0.1}, None),
        ("f1", {"best_f1__macro": 1.0, "best_f1__macro__en": 1.0}, None),
        ("train_loss", {"best_train_loss": 2.0}, 2.0),
        ("train_loss", {"best_train_loss__en": 2.0, "best_train_loss__de": 2.0}, None),
    ],
    ids=str,
)
def test_without_a_set_the_value_of_all_decides_or_else_the_mean_over_sets(name, values, value):
    assert value_of(name, values) == value


def test_without_validation_data_the_training_loss_stands_for_the_validation_loss():
    assert without_validation("best_valid_loss") == "best_train_loss"
    assert without_validation(["best_valid_loss", "always", "best_train_loss"]) == ["best_train_loss", "always"]
    for other in (None, "always", "best_accuracy", 3):
        assert without_validation(other) == other


def test_results_get_the_names_that_rules_look_for():
    results = {"eval_loss": 1.0, "eval_loss__en": 2.0, "eval_loss_scaled": 3.0, "accuracy__en": 0.5}
    assert name_by_rules(results, loss_name="eval_loss", train_loss=0.0) == {
        "best_train_loss": 0.0,
        "best_valid_loss": 1.0,
        "best_valid_loss__en": 2.0,
        "best_eval_loss_scaled": 3.0,
        "best_accuracy__en": 0.5,
    }
    assert math.isnan(name_by_rules({}, loss_name="val_loss", train_loss=None)["best_train_loss"])


def test_names_of_metrics_are_those_of_which_metrics_are_made():
    assert set(METRIC_NAMES) == set(names("accmt.metrics"))
