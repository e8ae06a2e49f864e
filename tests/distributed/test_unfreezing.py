"""Layers that are frozen and unfrozen during a run: plain torch's weights, and resumed without a bit of difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.scripts import unfreezing
from tests.launching import SCRIPTS, launch, run_together

pytestmark = pytest.mark.slow

SCRIPT = SCRIPTS / "unfreezing.py"


PROCESSES = 3


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("unfreezing")
    path = folder / "result.json"
    launch(SCRIPT, str(path), str(folder), processes=PROCESSES, result=path)
    return json.loads(path.read_text())


def reference(name: str) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    """Train with plain torch, each optimizer step on one batch."""
    plan, trained = unfreezing.PLANS[name], []
    model = unfreezing.Regression(plan.get(0, {})).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=unfreezing.LR)
    inputs, targets = unfreezing.make_points().tensors
    size = unfreezing.BATCH_SIZE * unfreezing.ACCUMULATION * PROCESSES
    done = 0

    for _ in range(unfreezing.EPOCHS):
        for layer, is_trained in plan.get(done, {}).items() if done else ():
            model[layer].requires_grad_(is_trained)
        for start in range(0, unfreezing.SAMPLES, size):
            chosen = slice(start, start + size)
            torch.nn.functional.mse_loss(model(inputs[chosen]), targets[chosen]).backward()
            trained.append([layer for layer in (0, 2, 4) if model[layer].weight.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
            done += 1
    return model.state_dict(), trained


@pytest.mark.parametrize("name", unfreezing.PLANS)
def test_what_is_trained_at_a_step_is_averaged_over_processes(name: str, results) -> None:
    unbroken = results[name]["unbroken"]
    expected, trained = reference(name)
    assert unbroken["trained"] == trained
    assert all(weights == unbroken["every"][0] for weights in unbroken["every"])
    for layer, weight in expected.items():
        torch.testing.assert_close(torch.tensor(unbroken["every"][0][layer]), weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", unfreezing.PLANS)
def test_a_run_continued_after_layers_were_unfrozen_is_the_unbroken_one(name: str, results) -> None:
    unbroken, continued = results[name]["unbroken"], results[name]["continued"]
    assert continued["every"] == unbroken["every"]
    assert continued["averages"] == unbroken["averages"]
    assert continued["trained"] == unbroken["trained"][unfreezing.STOP :]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("one-process", "the same change on all processes"),
        ("in-a-step", "0.weight, which was unfrozen after the epoch began"),
    ],
)
def test_a_change_that_cannot_be_averaged_is_refused(how: str, said: str, tmp_path: Path) -> None:
    forks, printed = run_together(SCRIPT, how, str(tmp_path), processes=2)
    assert all(fork.poll() for fork in forks)
    assert "freezing or unfreezing parameters" in printed
    assert said in printed


def test_a_communication_hook_averages_what_is_unfrozen_too(tmp_path: Path) -> None:
    forks, printed = run_together(SCRIPT, "hooked", str(tmp_path), processes=2)
    assert not any(fork.poll() for fork in forks), printed
    assert "averaged at [0, 1, 2, 3, 4, 5]" in printed
