"""Losses that are not finite, and memory that runs out, on one of several processes: all react alike."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from tests.launching import SCRIPTS, launch

SAMPLES, WINDOW, BAD_WINDOW, BAD_SAMPLE = 48, 12, 2, 29


def train_by_hand(*, left_out: bool) -> list[float]:
    """Train in plain torch and one process, and leave out the window with the bad sample or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    inputs = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
    targets = inputs.sum(1, keepdim=True)
    for _ in range(2):
        for number, begin in enumerate(range(0, SAMPLES, WINDOW)):
            if left_out and number == BAD_WINDOW:
                continue
            part = slice(begin, begin + WINDOW)
            nn.functional.mse_loss(model(inputs[part]), targets[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: Any) -> list[dict[str, Any]]:
    """Run everything on three processes."""
    folder = tmp_path_factory.mktemp("recovery")
    result = folder / "result.json"
    launch(SCRIPTS / "recovery.py", str(result), str(folder), processes=3, result=result)
    outcomes: list[dict[str, Any]] = json.loads(result.read_text())
    return outcomes


def test_all_processes_stop_with_the_same_message_that_names_the_culprit(everywhere: list[dict[str, Any]]) -> None:
    messages = {outcomes["stop"]["error"] for outcomes in everywhere}
    assert len(messages) == 1
    (message,) = messages
    per_process = WINDOW // len(everywhere)
    process = (BAD_SAMPLE - 24) // per_process
    first = 24 + process * per_process
    samples = ", ".join(map(str, range(first, first + per_process)))
    assert f"loss nan at step 3 (epoch 1, batch 2) on process {process}, samples [{samples}]" in message


@pytest.mark.parametrize("reaction", ["skip", "rollback"])
def test_all_processes_leave_the_update_out(everywhere: list[dict[str, Any]], reaction: str) -> None:
    expected = torch.tensor(train_by_hand(left_out=True))
    for outcomes in everywhere:
        outcome = outcomes[reaction]
        torch.testing.assert_close(torch.tensor(outcome["weights"]), expected, rtol=0, atol=1e-6)
        assert (outcome["global_step"], outcome["skipped_steps"], outcome["samples_seen"]) == (6, 2, 96)
        assert outcome["weights"] == everywhere[0][reaction]["weights"]


@pytest.mark.parametrize("begins", [0, 1, 5])
def test_all_processes_halve_their_micro_batches(everywhere: list[dict[str, Any]], begins: int) -> None:
    expected = torch.tensor(train_by_hand(left_out=False))
    for outcomes in everywhere:
        outcome = outcomes[f"memory {begins}"]
        torch.testing.assert_close(torch.tensor(outcome["weights"]), expected, rtol=0, atol=1e-6)
        assert (outcome["global_step"], outcome["skipped_steps"], outcome["samples_seen"]) == (8, 0, 96)
        assert outcome["micro_batch"] == WINDOW // len(everywhere) // 2
        assert outcome["weights"] == everywhere[0][f"memory {begins}"]["weights"]
