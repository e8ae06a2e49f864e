"""Settings that are unusual, but that people choose on purpose: training runs, with a warning at most."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from torch.utils.data import DataLoader

from accmt import HyperParameters, Trainer
from tests.tables import each
from tests.toys import HPS, Linear, make_points


def train(tmp_path, hps=None, val=None, **arguments):
    trainer = Trainer({**HPS, **(hps or {})}, tmp_path / "model", logging_dir=tmp_path / "logs", **arguments)
    trainer.fit(Linear(), make_points(), val)
    return trainer


def test_a_learning_rate_of_0_is_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="accmt"):
        trainer = train(tmp_path, {"optim": {"type": "SGD", "lr": 0}})
    assert trainer.state.global_step == 4
    (message,) = [record.message for record in caplog.records if "optim.lr" in record.message]
    assert message == "hps_config optim.lr is 0, and no scheduler raises it: the weights will not change"


@pytest.mark.parametrize(
    "hps",
    [
        {"optim": {"type": "SGD", "lr": 0.1, "groups": [{"match": "bias", "lr": 0}]}},
        {"optim": {"type": "SGD", "lr": 0}, "scheduler": {"type": "OneCycleLR", "max_lr": 0.1}},
    ],
    ids=["group", "scheduler"],
)
def test_a_learning_rate_of_0_for_a_part_of_the_run_or_model_is_silent(tmp_path, caplog, hps):
    with caplog.at_level(logging.WARNING, logger="accmt"):
        train(tmp_path, {**hps, "scheduler": hps.get("scheduler", {"type": "LinearWithWarmup", "warmup_ratio": 0.5})})
    assert not [record.message for record in caplog.records if "optim.lr" in record.message]


@pytest.mark.parametrize("arguments", [{"callbacks": []}, {"metrics": []}, {"log_with": []}, {"handlers": []}])
def test_an_empty_list_is_none(tmp_path, arguments):
    assert train(tmp_path, val=make_points(2), **arguments).state.global_step == 4


def settings_with(**arguments):
    return Trainer(HPS, "out/model", **arguments).settings


@each(
    "argument, value, meant",
    [
        *[("model_saving", value, None) for value in (False, [], (), [None], "none")],
        ("model_saving", ["best_train_loss", None, "best_train_loss"], ["best_train_loss"]),
        *[("model_saving_below", value, None) for value in (False, {})],
        *[("patience", value, None) for value in (False, {}, [], {"valid_loss": None}, {"valid_loss": {}})],
        ("patience", np.int64(3), 3),
        *[("checkpoint_every", value, None) for value in (False, [], "none")],
        *[("clip_grad", value, None) for value in (False, {}, [])],
        *[("profiler", value, None) for value in (False, {}, "none")],
        *[("parallelism", value, None) for value in (False, {}, {"fsdp": False}, {"fsdp": None})],
        *[("limit_batches", value, 1.0) for value in (None, False)],
        ("limit_batches", np.float64(0.5), 0.5),
        *[("compile", value, False) for value in (None, 0)],
        ("compile", 1, True),
        *[("gradient_checkpointing", value, False) for value in (None, 0)],
        *[("fast_dev_run", value, False) for value in (None, False)],
        ("overfit_batches", False, 0),
        ("overfit_batches", None, 0.0),
        *[("num_sanity_val_steps", value, meant) for value, meant in ((None, 2), (False, 0), (np.int64(1), 1))],
        *[("reload_dataloaders_every_n_epochs", value, 0) for value in (None, False)],
        *[("callbacks", value, None) for value in (False, [], [None], {})],
        *[("collate_fn", value, None) for value in (False, [], [None])],
        *[("log_with", value, None) for value in (False, [], [None], "none")],
        ("log_with", ["tensorboard", None, "tensorboard"], ["tensorboard"]),
        *[("handlers", value, None) for value in (False, [], [None], "none")],
        *[("metrics", value, None) for value in (False, [], [None])],
        *[(name, False, None) for name in ("accelerator", "max_time", "min_length", "checkpointer")],
        ("mixed_precision", False, "no"),
        ("seed", np.int64(3), 3),
        ("max_shard_size", None, "10GB"),
        ("logging_dir", None, "logs"),
        ("log_every", None, 1),
        *[("eval_when_start", value, False) for value in (None, 0, np.bool_(0))],
        *[("shuffle_train", value, True) for value in (None, 1)],
    ],
)
def test_an_unusual_value_with_one_meaning_is_read_as_that(argument, value, meant):
    settings = settings_with(**{argument: value})
    (read,) = [vars(group)[argument] for group in vars(settings).values() if argument in getattr(group, "__dict__", ())]
    assert read == meant
    assert type(read) is type(meant)


@each(
    "argument, value, entry, meant",
    [
        ("failures", {"on_nonfinite": False}, "on_nonfinite", None),
        *[("failures", {"spike_guard": value}, "spike_guard", None) for value in (0, False, None)],
        *[("failures", {"hang_timeout_s": value}, "hang_timeout_s", None) for value in (0, False)],
        ("failures", {"machine_timeout_s": 0}, "machine_timeout_s", None),
        ("failures", {"preflight": None}, "preflight", True),
        ("metric_options", False, "averages", None),
        ("torch_flags", False, "benchmark", None),
        ("torch_flags", {"benchmark": False}, "benchmark", False),
        ("tracker_options", {"flush_s": None}, "flush_s", 30),
        ("limit_batches", {"val": None}, "val", 1.0),
        ("clip_grad", {"norm": None}, "norm", None),
    ],
)
def test_an_entry_of_an_options_object_may_be_off_too(argument, value, entry, meant):
    settings = settings_with(**{argument: value})
    groups = [vars(group) for group in vars(settings).values() if argument in getattr(group, "__dict__", ())]
    assert getattr(groups[0][argument], entry) is meant or getattr(groups[0][argument], entry) == meant


SGD = {"epochs": 1, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.1}}
WARMING = {"type": "LinearWithWarmup", "warmup_ratio": 0.1}


@each(
    "changes, meant",
    [
        *[({"optim": {**SGD["optim"], "groups": value}}, {}) for value in ([], {}, False)],
        *[({"optim": {**SGD["optim"], "no_decay": value}}, {}) for value in ([], False, "none")],
        ({"optim": {**SGD["optim"], "layer_decay": False}}, {}),
        *[({"scheduler": value}, {}) for value in ({}, False, [], "none", None)],
        ({"scheduler": {**WARMING, "num_warmup_steps": 0}}, {"scheduler": WARMING}),
        ({"scheduler": {**WARMING, "num_warmup_steps": None}}, {"scheduler": WARMING}),
        ({"scheduler": {"type": "Constant", "warmup_ratio": 0}}, {"scheduler": {"type": "Constant"}}),
        *[({key: -1}, {}) for key in ("max_samples", "max_target_tokens", "max_tokens", "max_micro_batch_size")],
        ({"max_tokens": False}, {}),
        *[({key: value}, {}) for key in ("model", "sft") for value in (False, {}, "none")],
        ({"model": {"path": "m", "lora": False, "quantization": {}, "freeze": []}}, {"model": {"path": "m"}}),
        ({"batch_size": [4, None]}, {"batch_size": [4]}),
    ],
)
def test_an_unusual_hyper_parameter_with_one_meaning_is_read_as_that(changes, meant):
    read, usual = HyperParameters.from_config({**SGD, **changes}), HyperParameters.from_config({**SGD, **meant})
    assert read.section("model") == usual.section("model")
    assert read.batch_size == usual.batch_size
    assert read.scheduler_class is usual.scheduler_class
    assert read.scheduler_kwargs == usual.scheduler_kwargs
    assert (read.max_tokens, read.max_samples, read.sft) == (usual.max_tokens, usual.max_samples, usual.sft)


def test_one_group_need_not_be_in_a_list(tmp_path):
    hps = {"optim": {"type": "SGD", "lr": 0.1, "groups": {"match": "bias", "lr": 0.5}}}
    optimizer = train(tmp_path, hps).run.stepper.optimizer
    assert sorted(group["lr"] for group in optimizer.param_groups) == [0.1, 0.5]


def test_what_has_no_effect_is_a_warning(tmp_path, caplog):
    arguments = {"data_options": {"group_by_length": True}, "reload_dataloaders_every_n_epochs": 1}
    failures = {"spike_guard": 6, "on_nonfinite": None}
    hps = {"optim": {"type": "Rprop", "lr": 0.1, "no_decay": "bias"}}
    trainer = Trainer({**HPS, **hps}, tmp_path / "model", logging_dir=tmp_path, failures=failures, **arguments)
    trainer.fit(Linear(), DataLoader(make_points(), batch_size=4))
    assert trainer.state.global_step == 2
    for name in ("group_by_length", "reload_dataloaders_every_n_epochs", "spike_guard", "no_decay"):
        assert len([one for one in caplog.messages if name in one and "no effect" in one]) >= 1, name
