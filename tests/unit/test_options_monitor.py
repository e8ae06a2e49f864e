"""What the Trainer's `monitor` may be."""

from __future__ import annotations

import json

import pytest

from accmt import Monitor
from accmt.errors import ArgumentError
from tests.raising import raises_at
from tests.toys import make_trainer


@pytest.mark.parametrize(
    "given",
    [
        Monitor(learning_rate=True, grad_norm=True),
        {"learning_rate": True, "grad_norm": True},
        ["learning_rate", "grad_norm"],
        ("learning_rate", "grad_norm"),
    ],
)
def test_a_monitor_a_dict_and_a_list_of_names_say_the_same(given):
    assert make_trainer(monitor=given).settings.tracking.monitored == Monitor(learning_rate=True, grad_norm=True)


@pytest.mark.parametrize("name", ["monitor.yaml", "monitor.json"])
def test_a_file_says_it_too(tmp_path, name):
    path = tmp_path / name
    path.write_text(json.dumps({"epoch": True}))
    assert Monitor.from_config(path) == Monitor.from_config(str(path)) == Monitor(epoch=True)


def test_names_of_other_packages_may_be_in_a_list_too():
    assert Monitor(added=["temperature"]).has_measurements
    with raises_at(ArgumentError, "Monitor(added=...)"):
        Monitor(added=3)


def test_none_is_losses_and_metrics_only():
    assert make_trainer().settings.tracking.monitored == Monitor()
    on = {name for name, value in vars(Monitor()).items() if value}
    assert on == {"train_loss", "validation_loss", "additional_metrics"}


@pytest.mark.parametrize(
    ("given", "order"), [(False, None), (True, 2.0), (1, 1.0), (3.5, 3.5), ("inf", float("inf")), (float("inf"),) * 2]
)
def test_the_order_of_the_norm(given, order):
    assert Monitor(grad_norm=given).norm_order == order
