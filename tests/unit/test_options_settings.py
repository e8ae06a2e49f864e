"""All settings together: one argument in one group, and the way there and back."""

from __future__ import annotations

import json

import pytest
import yaml

from accmt import Accuracy, Trainer
from accmt.metrics import F1, MSE, build_metrics
from accmt.options import Settings
from accmt.run.model_saver import describe_trainer
from accmt.saving import write_trainer_config

HPS = {"epochs": 2, "batch_size": [4, 8], "optim": {"type": "AdamW", "lr": 0.1, "betas": [0.9, 0.99]}}
GROUPS = list(Settings.GROUPS.values())


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
        {"parallelism": {"fsdp": True}},
    ],
    ids=lambda arguments: ",".join(arguments) or "defaults",
)
def test_config_makes_an_equal_trainer_again(arguments):
    trainer = Trainer(HPS, "out", **arguments)
    again = round_trip(trainer)
    assert again.settings == trainer.settings
    assert again.config() == trainer.config()
    assert set(trainer.config()) == {"hps_config", "model_path", *arguments}


def test_config_of_paths_can_be_written_as_yaml(tmp_path):
    trainer = Trainer(HPS, tmp_path / "out", logging_dir=tmp_path / "logs", log_every=5)
    file = tmp_path / "trainer.yaml"
    file.write_text(yaml.safe_dump(trainer.config()))
    assert Trainer.from_config(file).settings == trainer.settings
    assert Trainer(HPS, str(tmp_path / "out"), logging_dir=str(tmp_path / "logs"), log_every=5).settings == (
        trainer.settings
    )


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
