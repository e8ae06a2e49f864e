"""Which evaluation's weights are kept, as tables of whole runs."""

from __future__ import annotations

import json
import math
import operator
import random
from pathlib import Path

import pytest

from accmt.errors import ArgumentError, ModuleContractError
from accmt.saving import Selection
from tests.raising import raises_at

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


def is_saved(rule: str, values: list[float]) -> list[int]:
    """Say the definition: finite, and better than every finite value before it."""
    is_better = {"best_valid_loss": operator.lt, "best_train_loss": operator.lt}.get(rule) or DIRECTIONS[rule[5:]]
    return [
        i
        for i, value in enumerate(values)
        if math.isfinite(value) and all(is_better(value, old) for old in values[:i] if math.isfinite(old))
    ]


def continued(selection: Selection, *arguments, **settings) -> Selection:
    """Return what a resumed run goes on with: a new one with the state of the old one, through strict JSON."""
    again = Selection(*arguments, **settings)
    again.load_state_dict(json.loads(json.dumps(selection.state_dict(), allow_nan=False)))
    return again


@pytest.mark.parametrize(("rule", "values", "saved", "best"), SEQUENCES)
def test_a_resume_between_any_two_evaluations_changes_nothing(rule, values, saved, best):
    assert is_saved(rule, values) == saved
    for stop in range(len(values) + 1):
        selection, found = Selection(rule, DIRECTIONS), []
        for i, value in enumerate(values):
            selection = continued(selection, rule, DIRECTIONS) if i == stop else selection
            found += [i] if selection.consider({rule: value}) else []
        assert found == saved
        assert selection.best == ({} if best is None else {rule: best})


@pytest.mark.parametrize("rule", ["best_valid_loss", "best_accuracy", "best_wer", "best_share"])
def test_random_sequences_save_what_the_definition_says(rule):
    draw = random.Random(rule)
    for _ in range(200):
        values = draw.choices([NAN, INF, -INF, -1.0, -0.0, 0.0, 0.25, 0.5, 1.0], k=draw.randint(0, 8))
        selection, found = Selection(rule, DIRECTIONS), []
        for i, value in enumerate(values):
            selection = continued(selection, rule, DIRECTIONS) if draw.random() < 0.3 else selection
            found += [i] if selection.consider({rule: value}) else []
        assert found == is_saved(rule, values), values


@pytest.mark.parametrize(("rule", "expected"), [("always", True), (None, False)])
def test_always_and_never_look_at_no_value(rule, expected):
    selection = Selection(rule, DIRECTIONS)
    assert [bool(selection.consider(values)) for values in ({}, {"best_valid_loss": NAN})] == [expected, expected]
    assert selection.best == {}


def run(selection: Selection, evaluations: list[dict[str, float]]) -> list[list[str]]:
    return [selection.consider(values) for values in evaluations]


def test_each_rule_of_a_list_has_its_own_best():
    selection = Selection(["best_valid_loss", "best_accuracy", "always"], DIRECTIONS)
    loss, accuracy = [3.0, 2.0, 4.0, NAN], [0.5, 0.4, 0.6, 0.6]
    evaluations = [{"best_valid_loss": a, "best_accuracy": b} for a, b in zip(loss, accuracy, strict=True)]
    assert run(selection, evaluations) == [
        ["best_valid_loss", "best_accuracy", "always"],
        ["best_valid_loss", "always"],
        ["best_accuracy", "always"],
        ["always"],
    ]
    assert selection.best == {"best_valid_loss": 2.0, "best_accuracy": 0.6}
    assert selection.rule == "best_valid_loss, best_accuracy, always"


def test_one_rule_saves_into_the_model_folder_and_several_each_into_its_own():
    path = Path("out/model")
    for rule in ("best_accuracy", ["best_accuracy"]):
        assert Selection(rule, DIRECTIONS).folder(path, "best_accuracy") == path
    selection = Selection(["best_accuracy", "best_accuracy/wer", "always"], DIRECTIONS)
    assert [selection.folder(path, name).relative_to(path).as_posix() for name in selection.names] == [
        "best_accuracy",
        "best_accuracy+wer",
        "always",
    ]


def test_a_combined_rule_saves_only_if_both_are_better_than_at_its_last_best():
    selection = Selection("best_accuracy/wer", DIRECTIONS)
    table = [
        # accuracy, wer, saved
        (NAN, 0.5, False),
        (0.5, 0.5, True),
        (0.7, 0.5, False),
        (0.4, 0.1, False),
        (0.6, 0.4, True),  # not as accurate as the third, which was never best
        (0.6, 0.3, False),
        (INF, 0.0, False),
        (0.7, 0.0, True),
    ]
    for accuracy, wer, saved in table:
        selection = continued(selection, "best_accuracy/wer", DIRECTIONS)
        assert bool(selection.consider({"best_accuracy": accuracy, "best_wer": wer})) == saved
    assert selection.best == {"best_accuracy/wer[accuracy]": 0.7, "best_accuracy/wer[wer]": 0.0}


def test_rules_that_share_a_metric_do_not_share_its_best_value():
    selection = Selection(["best_accuracy", "best_accuracy/wer"], DIRECTIONS)
    evaluations = [(0.5, 0.5), (0.7, 0.6), (0.6, 0.4)]
    assert run(selection, [{"best_accuracy": a, "best_wer": b} for a, b in evaluations]) == [
        ["best_accuracy", "best_accuracy/wer"],
        ["best_accuracy"],
        ["best_accuracy/wer"],
    ]


def test_the_name_of_a_metric_may_contain_a_slash_alone_and_in_a_combined_rule():
    directions = {**DIRECTIONS, "val/iou": operator.gt}
    for rule in ("best_val/iou", "best_accuracy/val/iou", "best_val/iou/accuracy", "best_val/iou@en/wer@de"):
        assert Selection(rule, directions).names == (rule,)
    selection = Selection("best_accuracy/val/iou", directions)
    rows = [{"best_accuracy": 0.5, "best_val/iou": 0.1}, {"best_accuracy": 0.6, "best_val/iou": 0.1}]
    assert run(selection, rows) == [["best_accuracy/val/iou"], []]
    with raises_at(ArgumentError, "Trainer(model_saving=...)"):
        Selection("best_val/iuo", directions)


def test_several_sets_decide_by_their_mean_or_each_for_itself():
    selection = Selection(["best_valid_loss", "best_wer@de", "best_accuracy@en/wer@de"], DIRECTIONS, sets=["en", "de"])
    names = ["valid_loss__en", "valid_loss__de", "accuracy__en", "wer__de"]
    table = [(1, 3, 0.5, 0.5), (2, 1, 0.6, 0.5), (0, NAN, 0.7, 0.4), (INF, -INF, 0.6, 0.3)]
    evaluations = [{f"best_{name}": value for name, value in zip(names, row, strict=True)} for row in table]
    assert run(selection, evaluations) == [
        ["best_valid_loss", "best_wer@de", "best_accuracy@en/wer@de"],
        ["best_valid_loss"],
        ["best_wer@de", "best_accuracy@en/wer@de"],
        ["best_wer@de"],
    ]
    assert selection.best["best_valid_loss"] == 1.5


THRESHOLDS = [
    # rule, below, above, values, saved at, best
    ("best_valid_loss", 0.7, None, [0.9, 0.6, 0.5], [1, 2], 0.5),
    ("best_valid_loss", 0.7, None, [0.7, 0.7], [], 0.7),
    ("best_accuracy", None, 0.5, [0.4, 0.6], [1], 0.6),
    ("best_accuracy", None, 0.5, [0.5, 0.4], [], 0.5),
    ("best_accuracy", 0.8, None, [0.9, 0.7], [], 0.9),  # the record stands, though it was not saved
    ("best_accuracy", 0.8, 0.5, [0.4, 0.6, 0.7, 0.9, 0.75], [1, 2], 0.9),
    ("best_valid_loss", 0.0, None, [0.0, -0.5, NAN, -INF], [1], -0.5),
    ("best_valid_loss", None, 0.0, [0.5, 0.0], [0], 0.0),
    ("best_valid_loss", INF, -INF, [NAN, 0.5], [1], 0.5),
]


@pytest.mark.parametrize(("rule", "below", "above", "values", "saved", "best"), THRESHOLDS)
def test_thresholds_hold_back_saving_and_not_the_best_value(rule, below, above, values, saved, best):
    for stop in range(len(values) + 1):
        settings = {"below": below, "above": above}
        selection, found = Selection(rule, DIRECTIONS, **settings), []
        for i, value in enumerate(values):
            selection = continued(selection, rule, DIRECTIONS, **settings) if i == stop else selection
            found += [i] if selection.consider({rule: value}) else []
        assert (found, selection.best) == (saved, {rule: best})


def test_a_dict_gives_each_value_a_threshold_of_its_own():
    selection = Selection(
        ["best_valid_loss", "best_accuracy", "always"], DIRECTIONS, below={"valid_loss": 1.0}, above={"accuracy": 0.5}
    )
    assert run(selection, [{"best_valid_loss": 0.9, "best_accuracy": 0.5}]) == [["best_valid_loss", "always"]]
    assert run(selection, [{"best_valid_loss": 0.8, "best_accuracy": 0.6}]) == [
        ["best_valid_loss", "best_accuracy", "always"]
    ]
    spelled = Selection("best_accuracy@en", DIRECTIONS, sets=["en"], above={"best_accuracy__en": 0.5})
    assert not spelled.consider({"best_accuracy__en": 0.4})


def test_a_number_holds_for_every_value_of_a_combined_rule():
    selection = Selection("best_accuracy/share", DIRECTIONS, above=0.5)
    assert not selection.consider({"best_accuracy": 0.6, "best_share": 0.5})
    assert selection.consider({"best_accuracy": 0.7, "best_share": 0.6})


@pytest.mark.parametrize(
    ("rule", "settings", "got", "do"),
    [
        ("best_accuracy", {"below": "0.5"}, "'0.5' (str)", "model_saving_below=0.5"),
        ("best_accuracy", {"above": NAN}, "nan (float)", ""),
        ("best_accuracy", {"above": True}, "True (bool)", ""),
        ("best_accuracy", {"above": 0.5, "below": 0.5}, "accuracy above 0.5 and below 0.5", ""),
        ("best_accuracy", {"above": {"acuracy": 0.5}}, "'acuracy'", "'best_accuracy'"),
        ("best_accuracy", {"above": {"wer": 0.5}}, "'wer'", ""),
        ("best_accuracy", {"above": {}}, "{}", ""),
        ("always", {"above": 0.5}, "0.5, and always", ""),
    ],
    ids=str,
)
def test_thresholds_that_cannot_be_are_refused(rule, settings, got, do):
    with raises_at(ArgumentError, f"Trainer(model_saving_{next(iter(settings))}=...)", got, do=do):
        Selection(rule, DIRECTIONS, **settings)


def test_a_registered_rule_has_thresholds_of_its_own():
    selection = Selection("best_valid_loss", DIRECTIONS)
    selection.register("best_accuracy/wer", above={"accuracy": 0.5})
    values = [{"best_valid_loss": 1.0, "best_accuracy": a, "best_wer": b} for a, b in [(0.4, 0.5), (0.6, 0.4)]]
    assert run(selection, values) == [["best_valid_loss"], ["best_accuracy/wer"]]
    assert selection.names == ("best_valid_loss", "best_accuracy/wer")


def test_registering_a_rule_that_is_there_or_is_none_is_refused():
    selection = Selection("best_valid_loss", DIRECTIONS)
    for name in ("best_valid_loss", "best_wre"):
        with raises_at(ArgumentError, "register_model_saving(name=...)"):
            selection.register(name)
    with raises_at(ArgumentError, "register_model_saving(saving_above=...)"):
        selection.register("best_wer", above="high")
    assert selection.names == ("best_valid_loss",)


def test_an_evaluation_that_lacks_one_value_changes_nothing():
    selection = Selection(["best_valid_loss", "best_wer@de", "best_accuracy"], DIRECTIONS, sets=["en", "de"])
    whole = {f"best_{name}__{key}": 0.5 for name in ("valid_loss", "wer", "accuracy") for key in ("en", "de")}
    for name, missing in [
        ("best_valid_loss__en", "best_valid_loss__en and best_valid_loss__de"),
        ("best_wer__de", "best_wer__de"),
        ("best_accuracy__de", "best_accuracy__en and best_accuracy__de"),
    ]:
        values = {key: value for key, value in whole.items() if key != name}
        with raises_at(ModuleContractError, "Trainer(model_saving='best_", expected=missing):
            selection.consider(values)
        assert selection.state_dict() == {"best": {}, "chosen": [], "saved_at": {}}
    assert selection.consider(whole) == list(selection.names)


def test_the_step_of_a_model_is_that_of_its_best_value():
    rule = "best_valid_loss/accuracy"
    selection = Selection(["best_valid_loss", rule], DIRECTIONS, above={"valid_loss": 0.3})
    steps = {10: (1.0, 0.5), 20: (0.5, 0.4), 30: (0.2, 0.6)}
    for step, (loss, accuracy) in steps.items():
        selection.consider({"best_valid_loss": loss, "best_accuracy": accuracy}, step=step)
        seen = [selection.saved_at(key) for key in ("best_valid_loss", f"{rule}[valid_loss]")]
        assert seen == {10: [10, 10], 20: [20, 10], 30: [None, None]}[step]


def test_a_run_that_saved_nothing_says_why():
    rules = ["best_valid_loss", "best_accuracy", "best_wer", "always"]
    selection = Selection(rules, DIRECTIONS, above={"accuracy": 95})
    run(selection, [{"best_valid_loss": NAN, "best_accuracy": 0.953, "best_wer": 0.5}])
    selection = continued(selection, rules, DIRECTIONS, above={"accuracy": 95})
    assert selection.explain_unsaved() == [
        "best_valid_loss was never finite",
        "best_accuracy was never within its thresholds when it was best (its best: 0.953)",
    ]


def test_a_resume_with_other_rules_keeps_those_that_stayed():
    selection = Selection(["best_valid_loss", "best_accuracy"], DIRECTIONS)
    selection.consider({"best_valid_loss": 1.0, "best_accuracy": 0.5}, step=7)
    again = continued(selection, ["best_accuracy", "best_wer"], DIRECTIONS)
    kept = {"best": {"best_accuracy": 0.5}, "chosen": ["best_accuracy"], "saved_at": {"best_accuracy": 7}}
    assert again.state_dict() == kept
    assert (again.saved_at("best_accuracy"), again.saved_at("best_valid_loss")) == (7, None)
    assert again.consider({"best_accuracy": 0.4, "best_wer": 0.9}) == ["best_wer"]


@pytest.mark.parametrize(
    ("rule", "needed"),
    [
        (None, False),
        ("always", False),
        (["best_train_loss", "always"], False),
        ("best_valid_loss", True),
        (["best_train_loss", "best_accuracy"], True),
        ("best_train_loss/accuracy", True),
    ],
    ids=str,
)
def test_it_is_known_whether_validation_is_needed(rule, needed):
    assert Selection(rule, DIRECTIONS).needs_validation is needed


def test_only_what_a_rule_had_saved_can_be_missing():
    selection = Selection(["best_valid_loss", "best_train_loss"], {}, below={"valid_loss": 0.5})
    assert selection.consider({"best_valid_loss": 1.0, "best_train_loss": 1.0}) == ["best_train_loss"]
    assert selection.forget(lambda rule: True) == []
    assert selection.forget(lambda rule: False) == ["best_train_loss (1)"]
    assert selection.best == {"best_valid_loss": 1.0}, "its threshold held it back: no folder can hold it"
    assert selection.forget(lambda rule: False) == []
