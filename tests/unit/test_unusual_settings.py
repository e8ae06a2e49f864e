"""Settings that are unusual, but that people choose on purpose: training runs, with a warning at most."""

from __future__ import annotations

import logging

import pytest

from accmt import Trainer
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


def test_a_validation_set_may_have_one_sample(tmp_path):
    assert train(tmp_path, val=make_points(1)).state.evaluations_done == 1


@pytest.mark.parametrize("arguments", [{"callbacks": []}, {"metrics": []}, {"log_with": []}, {"handlers": []}])
def test_an_empty_list_is_none(tmp_path, arguments):
    assert train(tmp_path, val=make_points(2), **arguments).state.global_step == 4
