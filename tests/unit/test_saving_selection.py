"""Which evaluation's weights are kept, as tables of whole runs."""

from __future__ import annotations

import json
import math
import operator

import pytest

from accmt import Accuracy
from accmt.errors import ArgumentError, ModuleContractError
from accmt.saving import Selection

NAN, INF = math.nan, math.inf
DIRECTIONS = {"accuracy": operator.gt, "wer": operator.lt, "share": operator.ge}

SEQUENCES = [
    # rule, values, saved at (from 0), best
    ("best_valid_loss", [3, 2, 4, 1], [0, 1, 3], 1),
    ("best_valid_loss", [1, 2, 3], [0], 1),
    ("best_valid_loss", [2, 2, 2], [0], 2),
    ("best_valid_loss", [NAN, 2, 1], [1, 2], 1),
    ("best_valid_loss", [2, NAN, 1], [0, 2], 1),
    ("best_valid_loss", [2, 1, NAN], [0, 1], 1),
    ("best_valid_loss", [INF, 5, -INF, 4], [1, 3], 4),
    ("best_valid_loss", [NAN, INF, -INF], [], None),
    ("best_valid_loss", [0.0, 0.5, -0.5], [0, 2], -0.5),
    ("best_valid_loss", [1.0, 0.0, 0.0, 0.5], [0, 1], 0.0),
    ("best_train_loss", [3, 3, 2], [0, 2], 2),
    ("best_accuracy", [0.0, 0.1, 0.1, 0.05, 0.2], [0, 1, 4], 0.2),
    ("best_accuracy", [NAN, 0.5, NAN, 0.4, 0.6], [1, 4], 0.6),
    ("best_accuracy", [-1.0, -2.0, INF, 0.0], [0, 3], 0.0),
    ("best_wer", [0.5, 0.6, 0.4, 0.0, 0.1], [0, 2, 3], 0.0),
    ("best_share", [0.5, 0.5, 0.4], [0, 1], 0.5),
]


@pytest.mark.feature("A07", "A08", "D23")
@pytest.mark.parametrize(("rule", "values", "saved", "best"), SEQUENCES)
def test_a_model_is_saved_at_each_new_best_value(rule, values, saved, best):
    selection = Selection(rule, DIRECTIONS)
    assert [i for i, value in enumerate(values) if selection.consider({rule: value, "best_other": 0.0})] == saved
    assert selection.best == ({} if best is None else {rule: best})


@pytest.mark.feature("A09", "A10")
@pytest.mark.parametrize(("rule", "expected"), [("always", True), (None, False)])
def test_always_and_never_look_at_no_value(rule, expected):
    selection = Selection(rule, DIRECTIONS)
    assert [selection.consider(values) for values in ({}, {"best_valid_loss": NAN})] == [expected, expected]
    assert (selection.needs, selection.best) == (None, {})


@pytest.mark.feature("A07", "A08", "A09", "D23")
@pytest.mark.parametrize(
    ("rule", "nearest"),
    [
        ("best_valid_los", "best_valid_loss"),
        ("best_val_loss", "best_valid_loss"),
        ("best_trian_loss", "best_train_loss"),
        ("best_acuracy", "best_accuracy"),
        ("accuracy", "best_accuracy"),
        ("allways", "always"),
        (["best_accuracy"], "best_accuracy"),
    ],
    ids=str,
)
def test_an_unknown_rule_is_refused_with_the_nearest(rule, nearest):
    with pytest.raises(ArgumentError, match=f"model_saving='{nearest}") as error:
        Selection(rule, DIRECTIONS)
    assert "'best_valid_loss', 'best_train_loss', 'best_accuracy'" in str(error.value)


@pytest.mark.feature("D23")
def test_a_metric_that_was_not_given_is_no_rule():
    with pytest.raises(ArgumentError, match="needs that Metric in metrics="):
        Selection("best_accuracy", {})


@pytest.mark.feature("A07")
@pytest.mark.parametrize(
    ("rule", "advice"),
    [
        ("best_valid_loss", r'return \{"loss": loss\} from validation_step'),
        ("best_accuracy", r"choose one of \['best_wer'\]"),
    ],
)
def test_an_evaluation_without_what_decides_is_an_error(rule, advice):
    selection = Selection(rule, DIRECTIONS)
    for ask in (selection.consider, selection.require):
        with pytest.raises(ModuleContractError, match=advice):
            ask({"best_wer": 1.0})
    assert selection.best == {}


@pytest.mark.feature("A07")
def test_requiring_takes_no_note_of_the_values():
    selection = Selection("best_valid_loss", {})
    selection.require({"best_valid_loss": -1.0})
    assert selection.best == {}


@pytest.mark.feature("A07")
@pytest.mark.parametrize("values", [[], [3.0], [3.0, NAN], [0.0]])
def test_the_best_value_survives_a_round_trip_through_json(values):
    selection = Selection("best_valid_loss", {})
    for value in values:
        selection.consider({"best_valid_loss": value})
    again = Selection("best_valid_loss", {})
    seen_by_others = again.best
    again.load_state_dict(json.loads(json.dumps(selection.state_dict(), allow_nan=False)))
    assert again.best == selection.best
    assert seen_by_others is again.best, "the counters of the run look at this one dict"
    better = min(values, default=1.0) - 1
    assert not again.consider({"best_valid_loss": 100.0}) or not values
    assert again.consider({"best_valid_loss": better})


def test_the_state_is_a_copy():
    selection = Selection("best_valid_loss", {})
    state = selection.state_dict()
    selection.consider({"best_valid_loss": 1.0})
    assert state == {"best": {}}


@pytest.mark.feature("D23")
def test_a_metric_s_own_comparison_decides():
    metric = Accuracy()
    selection = Selection("best_accuracy", {metric.main_metric: metric.is_better})
    assert [selection.consider({"best_accuracy": value}) for value in (0.5, 0.5, 0.6, NAN)] == [
        True,
        False,
        True,
        False,
    ]
