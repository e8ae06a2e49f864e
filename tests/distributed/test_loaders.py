"""Batch norm over processes, datamodules and reloaded loaders, on two processes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.distributed.scripts import loaders
from tests.launching import SCRIPTS, launch


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("loaders")
    path = folder / "result.json"
    launch(SCRIPTS / "loaders.py", str(path), str(folder), processes=2, result=path)
    return json.loads(path.read_text())


def train_alone(accumulation: int) -> torch.nn.Module:
    """Train with plain torch and plain batch norm, each micro-batch as one batch."""
    model, data = loaders.build_model(), loaders.make_series()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    micro_batches = [data[0:4], data[4:8], data[8:9]]
    windows = [micro_batches[:2], micro_batches[2:]] if accumulation == 2 else [[one] for one in micro_batches]
    for window in windows * loaders.HPS["epochs"]:
        samples = sum(len(targets) for _, targets in window)
        for inputs, targets in window:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            (loss * len(targets) / samples).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("accumulation", [1, 2])
def test_synchronized_batch_norm_trains_as_one_process_on_the_whole_batch(results, accumulation):
    expected = train_alone(accumulation)
    for result in results:
        got = result["normed"][str(accumulation)]
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(torch.tensor(got["weights"][name]), tensor, atol=1e-5, rtol=1e-4)
        assert got["updates"] == 2 * (3 if accumulation == 1 else 2)
    expected.eval()
    inputs, targets = loaders.make_series(3)[:]
    val_loss = torch.nn.functional.mse_loss(expected(inputs), targets).item()
    assert results[0]["normed"][str(accumulation)]["val_loss"] == pytest.approx(val_loss, rel=1e-4)


def test_in_a_round_that_has_no_batch_for_every_process_nobody_waits(results):
    first, second = (result["normed"]["1"] for result in results)
    assert first["kinds"] == ["SyncBatchNorm", "SyncBatchNorm", "SyncBatchNorm"] * 2
    assert second["kinds"] == ["SyncBatchNorm", "SyncBatchNorm", "_Borrowing"] * 2
    assert first["kind_after"] == second["kind_after"] == "BatchNorm1d"


def test_processes_on_cpus_are_refused(results):
    for result in results:
        assert result["refusal"].startswith("Trainer(sync_batchnorm=True)\n  got: processes on CPUs")


def test_one_process_prepares_the_data_and_the_others_wait(results):
    first, second = (result["given"] for result in results)
    assert first["calls"] == ["prepare", "setup fit 8", "teardown fit"]
    assert second["calls"] == ["setup fit 8", "teardown fit"]
    assert first["samples"] == second["samples"] == 16
    assert first["error"] == second["error"] == "no room for the data"


def test_loaders_of_unequal_length_are_reloaded(results):
    assert [result["reloaded"] for result in results] == [[5, 16], [5, 16]]
