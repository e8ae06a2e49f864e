"""Batch x accumulation x processes: the same gradients, losses and counts as plain torch on one big batch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler
from transformers import get_linear_schedule_with_warmup

from tests.distributed.scripts import windows
from tests.launching import SCRIPTS, launch

WITH_BAD = {case.name: case for case in windows.make_cases_with_bad_samples()}
CASES = {case.name: case for case in windows.make_cases()} | WITH_BAD


@pytest.fixture(scope="module", params=[1, 3], ids=lambda r: f"{r}-processes")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_grid(tmp_path_factory.mktemp("windows"), request.param)


def run_grid(folder: Path, processes: int | str) -> dict[str, Any]:
    path = folder / "result.json"
    launch(SCRIPTS / "windows.py", str(path), processes=processes, result=path, timeout_s=240)
    outcomes: dict[str, Any] = json.loads(path.read_text())
    return outcomes


def windows_of(case: Any, processes: int) -> list[list[int]]:
    """Return the samples of each update of an epoch that can be read."""
    bad = windows.BAD.get(case.bad, ())
    return [[index for index in window if index not in bad] for window in planned_windows_of(case, processes)]


def planned_windows_of(case: Any, processes: int) -> list[list[int]]:
    size = windows.BATCH_SIZE * case.accumulation
    if case.data not in windows.OF_EACH:
        size *= processes
        read = [range(start, min(start + size, case.samples)) for start in range(0, case.samples, size)]
        return [[index for one in window for index in windows.samples_of(case.data, one)] for window in read]
    own = [list(DistributedSampler(range(case.samples), processes, i, shuffle=False)) for i in range(processes)]
    if case.data == "unshared":
        own = [windows.own_samples(case.samples, process, processes) for process in range(processes)]
    starts = range(0, max(map(len, own)), size)
    return [[index for samples in own for index in samples[start : start + size]] for start in starts]


def reference(case: Any, processes: int) -> dict[str, Any]:
    """Train with plain torch, each window as one batch."""
    model = windows.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=windows.LR)
    epoch = windows_of(case, processes)
    schedule = None
    if "stream" not in case.data and not case.bad:
        total = len(epoch) * case.epochs
        schedule = get_linear_schedule_with_warmup(optimizer, math.ceil(windows.WARMUP * total), total)
    gradients, losses, rates = [], [], []
    for indices in filter(None, epoch * case.epochs):
        loss = loss_on(model, indices, weighted=case.weighted)
        loss.backward()
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
    assert schedule is None or optimizer.param_groups[0]["lr"] == 0
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    expected = {"gradients": gradients, "losses": losses, "weights": weights, "learning_rates": rates}
    with torch.no_grad():
        readable = sorted(set(range(case.samples)) - set(windows.BAD.get(case.bad, ())))
        return {**expected, "validation": loss_on(model, readable, weighted=False).item()}


def loss_on(model: torch.nn.Module, indices: list[int], *, weighted: bool) -> torch.Tensor:
    samples = [windows.make_sample(index) for index in indices]
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    return windows.compute_loss(model, batch, weighted=weighted)[0]


@pytest.mark.parametrize("name", CASES)
def test_every_update_equals_that_of_one_big_batch(name: str, results: dict[str, Any]) -> None:
    check(CASES[name], results[name])


@pytest.mark.parametrize(
    "way",
    [
        "fsdp-2",
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("hsdp-4", "tpfsdp-4")),
        pytest.param("tp-2", marks=[pytest.mark.slow, pytest.mark.repeats]),
    ],
)
def test_every_update_of_a_sharded_or_split_model_equals_that_of_one_big_batch(way: str, tmp_path: Path) -> None:
    results = run_grid(tmp_path, way)
    cases = windows.make_sharded_cases() if way == "fsdp-2" else windows.make_cases_of_mesh(is_split=way != "hsdp-4")
    assert results.keys() == {case.name for case in cases}
    for case in cases:
        check(case, results[case.name])


def check(case: windows.Case, result: dict[str, Any]) -> None:
    """Compare a run with plain torch, and its counters with what its samples give."""
    expected = reference(case, result["processes"])
    assert result["processes_agree"], case.name
    assert len(result["gradients"]) == len(expected["gradients"]) == result["state"]["global_step"]
    for got, gradient in zip(result["gradients"], expected["gradients"], strict=True):
        assert (torch.tensor(got) - gradient).norm() / gradient.norm() <= 1e-6, case.name
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6), case.name
    assert result["learning_rates"] == expected["learning_rates"], case.name
    assert (torch.tensor(result["weights"]) - expected["weights"]).norm() / expected["weights"].norm() <= 1e-6
    state = result["state"]
    num_trained = sum(map(len, windows_of(case, result["processes"])))
    assert state["samples_seen"] == num_trained * case.epochs
    assert state["global_step"] + state["skipped_steps"] == len(windows_of(case, result["processes"])) * case.epochs
    assert state["epoch"] == case.epochs
    assert state["skipped_steps"] == windows_of(case, result["processes"]).count([]) * case.epochs


@pytest.mark.parametrize("name", WITH_BAD)
def test_samples_that_cannot_be_read_are_counted_logged_and_not_validated(name: str, results: dict[str, Any]) -> None:
    case, result = WITH_BAD[name], results[name]
    planned, read = (sum(map(len, f(case, result["processes"]))) for f in (planned_windows_of, windows_of))
    bad = planned - read
    assert result["state"]["bad_samples"] == bad * case.epochs
    logged = [row["bad_samples"] for row in result["rows"] if "bad_samples" in row]
    assert logged == sorted(logged)
    assert logged[-1] <= bad * case.epochs
    if case.data not in windows.OF_EACH:
        expected = pytest.approx(reference(case, result["processes"])["validation"], rel=1e-6)
        assert [row["val_loss"] for row in result["rows"] if "val_loss" in row][-1] == expected
        assert [row["val_bad_samples"] for row in result["rows"] if "val_bad_samples" in row] == [bad] * case.epochs
