"""When patience is exhausted, as tables of whole runs."""

from __future__ import annotations

import json
import math
import operator

import pytest

from accmt.errors import ArgumentError, ModuleContractError
from accmt.saving import Patience
from tests.raising import raises_at
from tests.tables import each

NAN, INF = math.nan, math.inf
DIRECTIONS = {"accuracy": operator.gt, "wer": operator.lt, "share": operator.ge}


def continued(patience: Patience, *arguments, **settings) -> Patience:
    """Return what a resumed run goes on with, through strict JSON."""
    again = Patience(*arguments, **settings)
    again.load_state_dict(json.loads(json.dumps(patience.state_dict(), allow_nan=False)))
    return again


SEQUENCES = [
    # patience, rule, values, left after each
    (2, "best_valid_loss", [5, 6, 4, 7, 3], [2, 1, 2, 1, 2]),
    (2, "best_valid_loss", [5, 6, 7], [2, 1, 0]),
    (2, "best_valid_loss", [5, 5, 5, 5], [2, 1, 0, 0]),
    (1, "best_valid_loss", [5, 4, 4], [1, 1, 0]),
    (2, "best_valid_loss", [NAN, 5, NAN, 4, NAN, NAN], [1, 2, 1, 2, 1, 0]),
    (2, "best_valid_loss", [NAN, NAN], [1, 0]),
    (2, "best_valid_loss", [INF, -INF], [1, 0]),
    (2, "best_valid_loss", [-INF, 3, -INF, 2], [1, 2, 1, 2]),
    (2, "best_valid_loss", [0.5, 0.0, 0.0, 0.1], [2, 2, 1, 0]),
    (2, "best_valid_loss", [5, 6, 7, 4], [2, 1, 0, 2]),
    (3, "best_train_loss", [1, 2, 3, 0], [3, 2, 1, 3]),
    (2, "best_accuracy", [0.0, 0.1, 0.1, 0.05], [2, 2, 1, 0]),
    (2, "best_accuracy", [-1.0, -2.0, 0.0], [2, 1, 2]),
    (2, "best_share", [0.5, 0.5, 0.4], [2, 2, 1]),
]


@pytest.mark.parametrize(("allowed", "rule", "values", "left"), SEQUENCES)
def test_evaluations_in_a_row_without_a_better_value_use_patience_up(allowed, rule, values, left):
    for stop in range(len(values) + 1):
        patience, found = Patience(allowed, rule, DIRECTIONS), []
        for i, value in enumerate(values):
            patience = continued(patience, allowed, rule, DIRECTIONS) if i == stop else patience
            patience.consider({rule: value})
            found.append(patience.remaining)
            assert patience.is_exhausted == (left[i] == 0)
        assert found == left


def test_a_number_waits_while_any_rule_gets_better():
    patience = Patience(2, ["best_valid_loss", "best_accuracy", "always"], DIRECTIONS)
    left = []
    for loss, accuracy in [(5, 0.5), (6, 0.4), (6, 0.6), (4, 0.6), (4, 0.1), (4, NAN)]:
        patience.consider({"best_valid_loss": loss, "best_accuracy": accuracy})
        left.append(patience.remaining)
    assert left == [2, 1, 2, 2, 1, 0]


def test_a_dict_counts_each_value_for_itself_and_the_first_used_up_ends_it():
    patience = Patience({"accuracy": 2, "best_valid_loss": 3}, "always", DIRECTIONS)
    found = []
    for loss, accuracy in [(5, 0.5), (6, 0.6), (7, 0.6), (4, 0.6)]:
        patience.consider({"best_valid_loss": loss, "best_accuracy": accuracy})
        found.append((patience.remaining, patience.is_exhausted))
    assert found == [
        ({"best_accuracy": 2, "best_valid_loss": 3}, False),
        ({"best_accuracy": 2, "best_valid_loss": 2}, False),
        ({"best_accuracy": 1, "best_valid_loss": 1}, False),
        ({"best_accuracy": 0, "best_valid_loss": 3}, True),
    ]


def test_a_combined_rule_and_single_sets_can_be_waited_for():
    patience = Patience({"accuracy@en/wer": 2, "wer__de": 1}, None, DIRECTIONS, sets=["en", "de"])
    patience.consider({"best_accuracy__en": 0.5, "best_wer__en": 0.5, "best_wer__de": 0.3})
    patience.consider({"best_accuracy__en": 0.6, "best_wer__en": 0.6, "best_wer__de": 0.2})
    assert patience.remaining == {"best_accuracy@en/wer": 1, "best_wer@de": 1}


def test_a_resume_that_watches_other_values_begins_their_counts_anew():
    patience = Patience({"accuracy": 2, "wer": 2}, None, DIRECTIONS)
    for _ in range(2):
        patience.consider({"best_accuracy": 0.5, "best_wer": 0.5})
    again = continued(patience, {"wer": 2, "share": 2}, None, DIRECTIONS)
    assert again.remaining == {"best_wer": 1, "best_share": 2}
    assert again.best == {"best_wer": 0.5}


def test_an_evaluation_that_lacks_a_watched_value_is_an_error_that_counts_nothing():
    patience = Patience({"accuracy": 2, "wer": 2}, None, DIRECTIONS)
    for ask in (patience.consider, patience.require):
        with raises_at(ModuleContractError, "Trainer(patience='best_wer')"):
            ask({"best_accuracy": 0.5})
    assert patience.state_dict() == {"without_better": {"best_accuracy": 0, "best_wer": 0}, "best": {}}


@each(
    ("patience", "rule"),
    [
        *[(number, "best_valid_loss") for number in (0, -1, 2.0, True, "3")],
        *[({"accuracy": number}, None) for number in (0, None)],
        *[({name: 3}, None) for name in ("bleu", "acuracy", "fid", "always")],
        ({"accuracy": 3, "best_accuracy": 2}, None),
        ({}, None),
        (3, None),
        (3, "always"),
    ],
)
def test_patience_that_cannot_be_is_refused(patience, rule):
    with raises_at(ArgumentError, "Trainer(patience=...)"):
        Patience(patience, rule, DIRECTIONS)


@pytest.mark.parametrize(
    ("patience", "rule", "needed"),
    [
        (2, "best_train_loss", False),
        (2, "best_valid_loss", True),
        ({"train_loss": 2}, "best_valid_loss", False),
        ({"train_loss": 2, "accuracy": 1}, None, True),
    ],
    ids=str,
)
def test_it_is_known_whether_validation_is_needed(patience, rule, needed):
    assert Patience(patience, rule, DIRECTIONS).needs_validation is needed


FALLING = {"wer": lambda new, best: new < best}
RISING = {"accuracy": lambda new, best: new > best}


def consider(patience, values, directions=RISING):
    """Return the patience, and after how many evaluations it ended training."""
    watcher, name = Patience(patience, None, directions), next(iter(directions))
    for number, value in enumerate(values, 1):
        watcher.consider({f"best_{name}": value, "best_train_loss": 0.0})
        if watcher.is_exhausted:
            return watcher, number
    return watcher, None


@pytest.mark.parametrize(
    ("options", "values", "ends", "why"),
    [
        ({"patience": 2}, [0.5, 0.51, 0.52], None, ""),
        ({"patience": 2, "min_delta": 0.02}, [0.5, 0.51, 0.52], 3, "has not improved for 2 evaluation(s)"),
        ({"patience": 2, "min_delta": 0.02}, [0.5, 0.51, 0.53, 0.53, 0.5], 5, "has not improved"),
        ({"stopping_threshold": 0.9}, [0.5, 0.4, 0.3, 0.9], 4, "has reached 0.9: 0.9"),
        ({"stopping_threshold": 0.9}, [float("nan"), float("-inf")], None, ""),
        ({"check_finite": True}, [0.5, float("nan")], 2, "is nan"),
        ({"check_finite": True, "patience": 1}, [0.5, 0.6, float("inf")], 3, "is "),
        ({"check_finite": False, "patience": 2}, [0.5, float("nan"), float("nan")], 3, "has not improved"),
    ],
)
def test_what_ends_training_by_one_value(options, values, ends, why):
    for sign, directions in ((1, RISING), (-1, FALLING)):
        turned = {key: sign * value if key == "stopping_threshold" else value for key, value in options.items()}
        watcher, ended = consider({next(iter(directions)): turned}, [sign * value for value in values], directions)
        assert ended == ends
        assert why.replace("reached 0.9: 0.9", "reached") in watcher.describe_exhausted()


def test_what_ended_training_is_known_after_a_resume():
    watcher, _ = consider({"accuracy": {"stopping_threshold": 0.9}}, [0.95])
    again = Patience({"accuracy": {"stopping_threshold": 0.9}}, None, RISING)
    again.load_state_dict(watcher.state_dict())
    assert again.is_exhausted
    assert again.remaining == {}
    longer = Patience({"accuracy": {"patience": 3, "min_delta": 0.1}}, None, RISING)
    longer.load_state_dict(watcher.state_dict())
    assert not longer.is_exhausted
