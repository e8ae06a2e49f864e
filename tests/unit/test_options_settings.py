"""All settings together: one argument in one group, and the way there and back."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from accmt import Accuracy, HyperParameters, Trainer
from accmt.metrics import F1, MSE, build_metrics
from accmt.options import Settings
from accmt.run.model_saver import describe_trainer
from accmt.saving import write_trainer_config
from tests.raising import raises_at

HPS = {"epochs": 2, "batch_size": [4, 8], "optim": {"type": "AdamW", "lr": 0.1, "betas": [0.9, 0.99]}}
GROUPS = list(Settings.GROUPS.values())


def test_every_argument_stands_in_one_group_only():
    counts = Counter(field.name for group in GROUPS for field in fields(group))
    assert [name for name, count in counts.items() if count > 1] == []


def test_groups_and_attributes_are_the_same():
    assert set(Settings.GROUPS) | {"hps", "home"} == {field.name for field in fields(Settings)}


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_setting_is_documented_in_its_class_and_nothing_else_is(group):
    section = inspect.getdoc(group).partition("Args:\n")[2]
    documented = re.findall(r"^ {4}(\w+): \S", section, re.MULTILINE)
    assert documented == [field.name for field in fields(group)]


def round_trip(trainer):
    return Trainer.from_config(trainer.config())


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"limit_batches": {"train": 1}},
        {"limit_batches": {"train": 0.5, "val": 0}, "clip_grad": 1},
        {"evaluate_every_n_steps": 1.0, "seed": 0, "log_every": -1},
        {"grad_accumulation_steps": {0: 2}, "collate_fn": [len], "sampler": [1, 0]},
        {"log_with": "tensorboard", "tensorboard": {"flush_secs": 1}, "tags": ["a"]},
        {"checkpoint_every": None, "verbose": False, "tracker_options": {"config": {"a": 1}}},
    ],
    ids=lambda arguments: ",".join(arguments) or "defaults",
)
def test_config_makes_an_equal_trainer_again(arguments):
    trainer = Trainer(HPS, "out", **arguments)
    again = round_trip(trainer)
    assert again.settings == trainer.settings
    assert again.config() == trainer.config()
    assert set(trainer.config()) == {"hps_config", "model_path", *arguments}


def test_config_keeps_a_limit_of_one_batch_apart_from_all_batches():
    again = round_trip(Trainer(HPS, "out", limit_batches={"train": 1}))
    assert isinstance(again.settings.data.limits.train, int)


def test_config_of_paths_can_be_written_as_yaml(tmp_path):
    trainer = Trainer(HPS, tmp_path / "out", logging_dir=tmp_path / "logs", log_every=5)
    file = tmp_path / "trainer.yaml"
    file.write_text(yaml.safe_dump(trainer.config()))
    assert Trainer.from_config(file).settings == trainer.settings
    assert Trainer(HPS, str(tmp_path / "out"), logging_dir=str(tmp_path / "logs"), log_every=5).settings == (
        trainer.settings
    )


def test_a_trainer_of_a_file_takes_objects_beside_it(tmp_path):
    (tmp_path / "hps.yaml").write_text(yaml.safe_dump({"hps": HPS}))
    file = tmp_path / "trainer.yaml"
    file.write_text("hps_config: hps.yaml\nmodel_path: out\nlog_every: 5\nclip_grad: 1.0\n")
    trainer = Trainer.from_config(file, collate_fn=list, log_every=7)
    assert trainer.settings == Trainer("hps.yaml", "out", log_every=7, clip_grad=1.0, collate_fn=list).settings


def test_a_json_file_of_arguments_is_read_too(tmp_path):
    file = tmp_path / "trainer.json"
    file.write_text('{"hps_config": {"epochs": 1, "batch_size": 2, "optim": {"type": "SGD"}}, "model_path": "out"}')
    assert Trainer.from_config(str(file)).hps.epochs == 1


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "3"])
def test_a_file_without_arguments_by_name_is_refused(tmp_path, text):
    file = tmp_path / "trainer.yaml"
    file.write_text(text)
    with raises_at(ValueError, "Trainer.from_config(PosixPath('"):
        Trainer.from_config(file)


def test_a_missing_file_of_arguments_is_said_so():
    with raises_at(FileNotFoundError, "Trainer.from_config('nowhere.yaml')", "no such file"):
        Trainer.from_config("nowhere.yaml")


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ({"grad_accumulation_steps": {0: 2, 4: 8}}, {"grad_accumulation_steps": {"0": 2, "4": 8}}),
        ({"metrics": Accuracy()}, {"metrics": "accuracy"}),
        ({"metrics": [MSE(), "f1"]}, {"metrics": ["mse", "f1"]}),
        ({"metrics": {"en": [Accuracy()], "de": ["f1"]}}, {"metrics": {"en": ["accuracy"], "de": ["f1"]}}),
        ({"metrics": [Accuracy(), F1(num_classes=4)]}, {}),
        ({"metrics": Accuracy("mse")}, {}),
        ({"metrics": type("Own", (Accuracy,), {})()}, {}),
    ],
    ids=["numbers as keys", "a metric", "a list", "by set", "one with an argument", "one renamed", "one of a user"],
)
def test_the_file_beside_the_model_holds_what_text_can_say(tmp_path, arguments, written):
    given = Trainer(HPS, "out", **arguments)
    write_trainer_config(tmp_path, describe_trainer(given.settings))
    file = tmp_path / "trainer_config.json"
    held = json.loads(file.read_text())
    assert {name: held[name] for name in held.keys() - {"hps_config", "model_path"}} == written
    again = Trainer.from_config(file).settings
    assert again.optimization == given.settings.optimization
    assert kinds_of(again.evaluation.metrics) == kinds_of(given.settings.evaluation.metrics if written else None)


def kinds_of(metrics):
    groups = metrics.values() if isinstance(metrics, dict) else [metrics]
    return [(type(metric), metric.name) for group in groups for metric in build_metrics(group)]


def test_a_misspelt_argument_in_a_file_is_named_with_the_nearest():
    with raises_at(TypeError, "Trainer(log_evry=...)"):
        Trainer.from_config({"hps_config": HPS, "model_path": "out", "log_evry": 5})


def test_five_forms_of_hyper_parameters_are_equal(tmp_path):
    (tmp_path / "hps.yaml").write_text(yaml.safe_dump({"hps": HPS}))
    (tmp_path / "hps.json").write_text(json.dumps({"hps": HPS}))
    forms = ["hps.yaml", Path("hps.yaml"), "hps.json", HPS, {"hps": HPS}, HyperParameters.from_config(HPS)]
    dicts = [Trainer(form, "out").hps.to_dict() for form in forms]
    assert all(one == dicts[0] for one in dicts)
    assert dicts[0]["hps"]["optim"]["lr"] == 0.1


def test_other_forms_of_hyper_parameters_are_refused():
    with raises_at(TypeError, "hps_config", "3 (int)"):
        Trainer(3, "out")
    with raises_at(FileNotFoundError, "hps_config='nowhere.yaml'"):
        Trainer("nowhere.yaml", "out")
