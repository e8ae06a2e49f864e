"""Samples that cannot be read are left out: the rest is trained on as plain torch would, with its own weights."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest
import torch

from tests.distributed.scripts import bad_samples, windows
from tests.launching import SCRIPTS, launch

CASES = {case.name: case for case in bad_samples.make_cases()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("bad_samples") / "result.json"
    launch(SCRIPTS / "bad_samples.py", str(path), processes=3, result=path, timeout_s=240)
    return json.loads(path.read_text())


def windows_of(case: Any, processes: int) -> list[list[int]]:
    """Return the samples of each window of an epoch that can be read."""
    size = windows.BATCH_SIZE * case.accumulation
    bad = set(bad_samples.BAD[case.bad])
    if case.data not in bad_samples.OF_EACH:
        size *= processes
        parts = [range(start, min(start + size, bad_samples.SAMPLES)) for start in range(0, bad_samples.SAMPLES, size)]
    else:
        own = [bad_samples.samples_of(case, process, processes) for process in range(processes)]
        starts = range(0, max(map(len, own)), size)
        parts = [[index for samples in own for index in samples[start : start + size]] for start in starts]
    return [[index for index in part if index not in bad] for part in parts]


def loss_on(model: torch.nn.Module, indices: list[int], *, weighted: bool) -> torch.Tensor:
    samples = [windows.make_sample(index) for index in indices]
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    return windows.compute_loss(model, batch, weighted=weighted)[0]


def reference(case: Any, processes: int) -> dict[str, Any]:
    """Train with plain torch, each window as one batch, on what can be read."""
    model = windows.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=windows.LR)
    gradients, losses = [], []
    for indices in filter(None, windows_of(case, processes) * case.epochs):
        loss = loss_on(model, indices, weighted=case.weighted)
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    readable = sorted(set(range(bad_samples.SAMPLES)) - set(bad_samples.BAD[case.bad]))
    with torch.no_grad():
        validation = loss_on(model, readable, weighted=False).item()
    return {"gradients": gradients, "losses": losses, "weights": weights, "validation": validation}


@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_the_samples_that_can_be_read(name: str, results: dict[str, Any]) -> None:
    case, result = CASES[name], results[name]
    expected = reference(case, result["processes"])
    assert result["processes_agree"]
    assert len(result["gradients"]) == len(expected["gradients"]) == result["state"]["global_step"]
    for got, gradient in zip(result["gradients"], expected["gradients"], strict=True):
        assert (torch.tensor(got) - gradient).norm() / gradient.norm() <= 1e-6
    losses = [row["train_loss"] for row in result["rows"] if "train_loss" in row]
    assert losses == pytest.approx(expected["losses"], rel=1e-6)
    assert (torch.tensor(result["weights"]) - expected["weights"]).norm() / expected["weights"].norm() <= 1e-6
    if case.data not in bad_samples.OF_EACH:
        assert result["metrics"] == {"val_loss": pytest.approx(expected["validation"], rel=1e-6)}


@pytest.mark.parametrize("name", CASES)
def test_what_was_left_out_is_counted_and_logged(name: str, results: dict[str, Any]) -> None:
    case, result = CASES[name], results[name]
    state, rows, processes = result["state"], result["rows"], result["processes"]
    each = [bad_samples.samples_of(case, process, processes) for process in range(processes)]
    every = list(chain(*each)) if case.data in bad_samples.OF_EACH else list(range(bad_samples.SAMPLES))
    bad = sum(index in bad_samples.BAD[case.bad] for index in every)
    assert state["bad_samples"] == bad * case.epochs
    assert state["samples_seen"] == (len(every) - bad) * case.epochs
    empty = [window for window in windows_of(case, processes) if not window]
    assert state["skipped_steps"] == len(empty) * case.epochs
    logged = [row["bad_samples"] for row in rows if "bad_samples" in row]
    assert logged == sorted(logged)
    assert logged[-1] <= bad * case.epochs
    if case.data not in bad_samples.OF_EACH:
        assert [row["val_bad_samples"] for row in rows if "val_bad_samples" in row] == [bad] * case.epochs
