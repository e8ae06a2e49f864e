"""Keywords of the Trainer that are none of its arguments: each mistake is named, and all at once."""

from __future__ import annotations

import re

import pytest

from accmt import Trainer
from accmt.addons.hints.table import FOREIGN
from accmt.errors import ArgumentError, CombinedError, HyperParameterError, UnknownArgumentError
from tests.raising import raises_at
from tests.toys import HPS

FOREIGN_NAMES = [name for names in FOREIGN.values() for name in names]


@pytest.mark.parametrize("tracker", [None, "tensorboard"])
def test_arguments_of_other_trainers_are_told_what_to_write_here(tracker):
    with pytest.raises(UnknownArgumentError) as caught:
        Trainer(HPS, "out", log_with=tracker, **dict.fromkeys(FOREIGN_NAMES, 1))
    assert str(caught.value).startswith(f"{len(FOREIGN_NAMES)} arguments that Trainer does not have\n\n")
    for name in FOREIGN_NAMES:
        part = rf"Trainer\({name}=\.\.\.\)\n  got: an argument of .*\n  expected: an argument of Trainer\n  do: \w+[ .]"
        assert re.search(part, str(caught.value)), name


def test_faults_in_arguments_and_hyper_parameters_are_told_together():
    with pytest.raises(CombinedError) as caught:
        Trainer({**HPS, "epochs": -2, "batch_size": 0}, "out", max_epochs=3, log_every=0, seed="x")
    assert isinstance(caught.value, HyperParameterError)
    assert isinstance(caught.value, ArgumentError)
    wheres = re.findall(r"(?m)^(.*)\n  got: ", str(caught.value))
    arguments = ["Trainer(max_epochs=...)", "Trainer(log_every=...)", "Trainer(seed=...)"]
    assert wheres == [*arguments, "hps_config epochs", "hps_config batch_size"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("num_workers", "dataloader_num_workers"), ("pin_memory", "dataloader_pin_memory")],
)
def test_the_end_of_a_name_is_known_where_no_tracker_could_be_meant(name, meant):
    with raises_at(UnknownArgumentError, f"Trainer({name}=", do=f"did you mean {meant}?"):
        Trainer(HPS, "out", **{name: 1})
    Trainer(HPS, "out", log_with="mlflow", workers=1)
