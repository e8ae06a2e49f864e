import copy
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
import yaml
from torch.optim import lr_scheduler

from accmt.errors import HyperParameterError
from accmt.options import HyperParameters
from tests.raising import raises_at
from tests.tables import each

CONFIG = {
    "epochs": 3,
    "batch_size": [16, 32],
    "optim": {"type": "AdamW", "lr": "1e-3", "betas": ["0.9", "0.98"], "weight_decay": 0.01},
    "scheduler": {"type": "LinearWithWarmup", "warmup_ratio": 0.1},
    "max_steps": "100",
    "step_scheduler_per_epoch": False,
    "max_micro_batch_size": 8,
}


def example() -> HyperParameters:
    return HyperParameters(
        epochs=3,
        batch_size=(16, 32),
        optim="AdamW",
        optim_kwargs={"lr": 1e-3, "betas": (0.9, 0.98), "weight_decay": 0.01},
        scheduler="LinearWithWarmup",
        scheduler_kwargs={"warmup_ratio": 0.1},
        max_steps=100,
        max_micro_batch_size=8,
    )


def write_yaml(folder: Path, text: str) -> str:
    path = folder / "x.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_are_one_epoch_of_single_samples_with_sgd():
    hps = HyperParameters()
    assert (hps.epochs, hps.batch_size, hps.optim, hps.optim_kwargs) == (1, 1, "SGD", {})
    assert (hps.scheduler, hps.scheduler_kwargs, hps.scheduler_class, hps.max_steps) == (None, {}, None, None)
    assert (hps.step_scheduler_per_epoch, hps.max_micro_batch_size) == (False, None)
    assert hps.optimizer_class is torch.optim.SGD


def test_every_form_of_one_configuration_is_equal(tmp_path):
    yaml_path, json_path = tmp_path / "a.yaml", tmp_path / "a.json"
    yaml_path.write_text(yaml.safe_dump({"hps": CONFIG}))
    json_path.write_text(json.dumps({"hps": CONFIG}, indent="\t"))
    forms = [yaml_path, str(json_path), CONFIG, {"hps": CONFIG}, example()]
    hps = [HyperParameters.from_config(form) for form in forms]
    assert all(item == hps[0] for item in hps)
    assert all(item.to_dict() == hps[0].to_dict() for item in hps)


def test_optimizer_is_another_name_of_optim(tmp_path):
    hps = HyperParameters(optim="AdamW", optim_kwargs={"lr": 0.1})
    assert hps == HyperParameters(optimizer="AdamW", optimizer_kwargs={"lr": 0.1})
    path = write_yaml(tmp_path, "epochs: 1\nbatch_size: 1\noptimizer:\n  type: AdamW\n  lr: 0.1\n")
    from_file = HyperParameters.from_config(path)
    assert hps == from_file
    assert from_file.where("optim", "lr") == f"{path}:5 optim.lr"


@each(
    ("arguments", "place"),
    [
        ({"optim": "SGD", "optimizer": "SGD"}, "optimizer"),
        ({"optim_kwargs": {}, "optimizer_kwargs": {}}, "optimizer_kwargs"),
        ({"optim_kwargs": {"type": "Adam"}}, "optim_kwargs.type"),
        ({"scheduler_kwargs": {"gamma": 1.0}}, "scheduler.type"),
    ],
)
def test_contradictory_arguments_are_refused(arguments, place):
    with raises_at(HyperParameterError, f"HyperParameters {place}"):
        HyperParameters(**arguments)


def test_a_file_without_an_optimizer_is_read_for_modules_that_bring_one():
    hps = HyperParameters.from_config({"epochs": 1, "batch_size": 1})
    assert (hps.optim, hps.optim_kwargs, hps.learning_rate) == (None, {}, None)
    assert hps.to_dict()["hps"]["optim"] is None
    assert HyperParameters.from_config(hps.to_dict()) == hps
    assert "optim" not in hps.get_config()
    with raises_at(HyperParameterError, "hps_config optim"):
        hps.optimizer_class  # noqa: B018


def test_all_faults_of_a_file_are_reported_at_once_in_the_order_of_their_lines(tmp_path):
    path = write_yaml(
        tmp_path,
        "hps:\n  epochs: 3\n  bath_size: 16\n  batch_size: 0\n  optim:\n    type: AdamW\n    lr: 1e-3\n"
        "    weigth_decay: 0.1\n    lr: 2e-3\n  scheduler:\n    type: LinearWarmup\n",
    )
    with pytest.raises(HyperParameterError) as caught:
        HyperParameters.from_config(path)
    message = str(caught.value)
    assert message.startswith(f"5 errors in {path}\n\n")
    assert re.findall(r"x\.yaml:(\d+) (\S+)", message) == [
        ("3", "bath_size"),
        ("4", "batch_size"),
        ("8", "optim.weigth_decay"),
        ("9", "optim.lr"),
        ("11", "scheduler.type"),
    ]
    assert re.findall(r"do: write `(.*)`", message) == [
        "batch_size",
        "batch_size: 16",
        "weight_decay",
        "LinearWithWarmup",
    ]


def test_epochs_are_unlimited_only_under_max_steps():
    assert HyperParameters(max_steps=9).epochs == -1
    assert HyperParameters(epochs=-1, max_steps=7).epochs == -1
    assert HyperParameters(epochs=5, max_steps=3).epochs == 5
    assert HyperParameters.from_config({"max_steps": 9, "batch_size": 1, "optim": "SGD"}).epochs == -1
    assert HyperParameters(epochs=2, max_steps=-1).max_steps is None
    with raises_at(HyperParameterError, "HyperParameters epochs"):
        HyperParameters(epochs=-1)


@each(("given", "sizes"), [(4, (4, 4, 4)), ([2, 5], (2, 5, 5)), ((2, 5, 7), (2, 5, 7)), (["8"], (8, 8, 8))])
def test_a_batch_size_that_is_left_out_equals_the_one_before_it(given, sizes):
    hps = HyperParameters(batch_size=given)
    assert (hps.train_batch_size, hps.val_batch_size, hps.test_batch_size) == sizes
    assert hps.batch_size == (given if isinstance(given, int) else tuple(map(int, given)))
    hps.set_train_batch_size(64)
    assert (hps.train_batch_size, hps.val_batch_size, hps.test_batch_size) == (64, *sizes[1:])


def test_a_whole_float_is_a_count_and_the_callers_dict_is_left_alone():
    config = {**copy.deepcopy(CONFIG), "max_steps": 1e5}
    before = copy.deepcopy(config)
    hps = HyperParameters.from_config(config)
    hps.optim_kwargs["lr"] = 5
    assert config == before
    assert (hps.max_steps, type(hps.max_steps)) == (100_000, int)


@pytest.mark.parametrize(
    "hps",
    [
        HyperParameters(),
        example(),
        HyperParameters(max_steps=9, batch_size=(1, 2, 3), step_scheduler_per_epoch=True),
        HyperParameters(optim=torch.optim.AdamW, scheduler=lr_scheduler.StepLR, scheduler_kwargs={"step_size": 2}),
        HyperParameters(optim="torch.optim.Adafactor", optim_kwargs={"eps": [None, 1e-3]}),
        HyperParameters(optim="Adafactor", scheduler="transformers.optimization.get_constant_schedule"),
    ],
    ids=repr,
)
def test_the_dict_form_survives_yaml_and_json_and_reads_back_as_an_equal(hps, tmp_path):
    content = hps.to_dict()
    assert HyperParameters.from_config(content) == hps
    assert HyperParameters.from_config(write_yaml(tmp_path, yaml.safe_dump(content))) == hps
    assert HyperParameters.from_config(json.loads(json.dumps(content))) == hps
    assert pickle.loads(pickle.dumps(hps)) == hps


def test_classes_are_written_as_their_names():
    hps = HyperParameters(
        optim=torch.optim.AdamW, scheduler=lr_scheduler.ExponentialLR, scheduler_kwargs={"gamma": 0.9}
    )
    assert hps.optim is torch.optim.AdamW
    assert hps.to_dict()["hps"]["optim"] == {"type": "AdamW"}
    assert hps.to_dict()["hps"]["scheduler"] == {"type": "ExponentialLR", "gamma": 0.9}
    assert hps == HyperParameters(optim="AdamW", scheduler="ExponentialLR", scheduler_kwargs={"gamma": 0.9})


def test_trackers_get_one_flat_level_of_plain_values():
    assert example().get_config() == {
        "epochs": 3,
        "batch_size": "[16, 32]",
        "optim.type": "AdamW",
        "optim.lr": 0.001,
        "optim.betas": "[0.9, 0.98]",
        "optim.weight_decay": 0.01,
        "scheduler.type": "LinearWithWarmup",
        "scheduler.warmup_ratio": 0.1,
        "max_steps": 100,
        "step_scheduler_per_epoch": False,
        "max_micro_batch_size": 8,
    }
    assert "scheduler.type" not in HyperParameters().get_config()


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "hps").glob("*.yaml")), ids=lambda path: path.name)
def test_the_shipped_files_are_right(path):
    hps = HyperParameters.from_config(path)
    assert HyperParameters.from_config(hps.to_dict()) == hps


@each(
    ("limit", "largest", "expected"),
    [(None, None, 12), (None, 4, 4), (8, None, 6), (8, 4, 4), (4, 8, 4), (2, 3, 2), (3, 2, 2), (5, 5, 4), (99, 99, 12)],
)
def test_a_micro_batch_is_within_both_limits_and_an_even_part(limit, largest, expected):
    """One limit is that of what was found out, such as where memory ends; the other is the hyper-parameters'."""
    hps = {"epochs": 1, "batch_size": 12, "optim": "SGD"} | (
        {} if largest is None else {"max_micro_batch_size": largest}
    )
    assert HyperParameters.from_config(hps).micro_batch_size_within(limit) == expected
