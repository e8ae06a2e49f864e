"""Batch x accumulation x processes: the same gradients, losses and counts as plain torch on one big batch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.scripts import windows
from tests.launching import SCRIPTS, launch

CASES = {case.name: case for case in windows.make_cases()}


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda r: f"{r}-processes")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("windows") / "result.json"
    launch(SCRIPTS / "windows.py", str(path), processes=request.param, result=path, timeout_s=240)
    return json.loads(path.read_text())


def reference(case: Any, processes: int) -> tuple[list[torch.Tensor], list[float], torch.Tensor]:
    """Train with plain torch, one window as one batch; return gradients, losses and final weights."""
    model = windows.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=windows.LR)
    size = windows.BATCH_SIZE * processes * case.accumulation
    gradients, losses = [], []
    for _ in range(case.epochs):
        for start in range(0, case.samples, size):
            samples = [windows.make_sample(i) for i in range(start, min(start + size, case.samples))]
            batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
            loss, _ = windows.compute_loss(model, batch, weighted=case.weighted)
            loss.backward()
            if case.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return gradients, losses, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.feature(
    "A25", "L13", "L14", "P22", "P27", "P31", "P37", "A24", "A26", "A60", "L61", "L85", "T29", "T35", "N12", "P05"
)
@pytest.mark.parametrize("name", CASES)
def test_every_update_equals_that_of_one_big_batch(name: str, results: dict[str, Any]) -> None:
    case, result = CASES[name], results[name]
    gradients, losses, weights = reference(case, result["processes"])
    assert result["processes_agree"]
    assert len(result["gradients"]) == len(gradients) == result["state"]["global_step"]
    for got, expected in zip(result["gradients"], gradients, strict=True):
        difference = (torch.tensor(got) - expected).norm() / expected.norm()
        assert difference <= 1e-6
    assert result["losses"] == pytest.approx(losses, rel=1e-6)
    assert torch.tensor(result["weights"]).sub(weights).norm() / weights.norm() <= 1e-6


@pytest.mark.feature("T30", "P22", "T28")
@pytest.mark.parametrize("name", CASES)
def test_counts_do_not_depend_on_the_launch(name: str, results: dict[str, Any]) -> None:
    case, result = CASES[name], results[name]
    rounds = math.ceil(case.samples / (windows.BATCH_SIZE * result["processes"]))
    state = result["state"]
    assert state["samples_seen"] == case.samples * case.epochs
    assert state["batch_iteration"] == rounds * case.epochs
    assert state["global_step"] == math.ceil(rounds / case.accumulation) * case.epochs
    assert state["epoch"] == case.epochs
    assert state["skipped_updates"] == 0
