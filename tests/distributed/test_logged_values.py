"""Logged values and gradient norms are those of all processes together."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from tests.distributed.scripts.logged_values import GLOBAL_BATCH, SAMPLES, Logging, make_numbers
from tests.launching import SCRIPTS, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logged")
    path = folder / "result.json"
    launch(SCRIPTS / "logged_values.py", str(path), str(folder), processes=3, result=path)
    return json.loads(path.read_text())


def windows():
    return make_numbers().tensors[0].split(GLOBAL_BATCH)


def test_means_and_sums_are_those_over_all_processes(outcome):
    training = [values for _, values in outcome["rows"] if "train_loss" in values]
    assert [row["mean"] for row in training] == pytest.approx([window.mean().item() for window in windows()])
    assert [row["samples"] for row in training] == [len(window) for window in windows()]


def test_the_loss_of_the_epoch_is_the_mean_over_all_samples_of_all_processes(outcome):
    rows = [values["train_loss"] for _, values in outcome["rows"] if "train_loss" in values]
    expected = sum(loss * len(window) for loss, window in zip(rows, windows(), strict=True)) / SAMPLES
    assert outcome["epoch_losses"] == pytest.approx([expected] * len(outcome["epoch_losses"]))


def test_a_value_of_some_processes_is_the_mean_over_those(outcome):
    assert [values["of_the_last"] for _, values in outcome["rows"] if "train_loss" in values][0] == 5.0


def test_validation_values_are_the_same_everywhere(outcome):
    expected = {"val_loss", "validated", "of_the_first"}
    assert all(set(metrics) == expected for metrics in outcome["metrics"])
    assert all(metrics == outcome["metrics"][0] for metrics in outcome["metrics"])
    assert outcome["metrics"][0]["validated"] == pytest.approx((SAMPLES - 1) / 2 / SAMPLES)


def test_the_gradient_norm_is_that_of_the_global_batch_before_clipping(outcome):
    model = Logging().model
    ((model(windows()[0]) - 1) ** 2).mean().backward()
    norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert outcome["rows"][0][1]["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert torch.isfinite(norm)


def test_the_use_of_the_machine_is_measured_by_the_main_process_alone(outcome):
    names = {name for _, values in outcome["rows"] for name in values if name.startswith("CPU")}
    assert names == {"CPU", "CPU_PROCESS_0"}
