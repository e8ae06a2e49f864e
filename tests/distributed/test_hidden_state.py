"""State that each of two processes has for itself, buffers that share memory, and closures of optimizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from accmt import CheckpointError
from tests.distributed.scripts.hidden_state import ByLBFGS, Carried, Counting, train
from tests.launching import SCRIPTS, launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hidden_state")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Any]:
    path = folder / "result.json"
    launch(SCRIPTS / "hidden_state.py", str(path), str(folder), processes=2, result=path)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_what_each_process_carries_over_its_batches_is_there_after_a_resume(outcomes: dict[str, Any]) -> None:
    first, second = outcomes["carried"]["whole"]
    assert first[0] != second[0]
    assert (first[2], second[2]) == (6, 12)
    assert outcomes["carried"]["resumed"] == outcomes["carried"]["whole"]


def test_what_differs_and_is_not_declared_is_named(outcomes: dict[str, Any]) -> None:
    assert len(outcomes["carried"]["said"]) == 1
    assert "Counting.losses differs between processes" in outcomes["carried"]["said"][0]
    assert "process_state = ('losses',)" in outcomes["carried"]["said"][0]


def test_on_another_number_of_processes_such_a_run_cannot_go_on(outcomes: dict[str, Any], folder: Path) -> None:
    with pytest.raises(CheckpointError, match="1 processes, and a checkpoint with a separate state for each of 2"):
        train(Carried(), folder / "part", 3, resume=True, callbacks=Counting())


def test_replicas_that_differ_on_purpose_are_saved_for_each_process(outcomes: dict[str, Any]) -> None:
    first, second = outcomes["replicas"]["whole"]
    assert first != second
    assert outcomes["replicas"]["resumed"] == outcomes["replicas"]["whole"]


@pytest.mark.parametrize("kind", ["same", "view", "expanded"])
def test_buffers_that_share_memory_stay_so_on_two_processes_and_after_a_resume(
    outcomes: dict[str, Any], kind: str
) -> None:
    found = outcomes["views"][kind]
    assert all(is_shared for of_one in found for is_shared, *_ in of_one)
    assert found[0][0] == found[0][1] == found[1][0] == found[1][1]


def test_a_line_search_decides_alike_on_all_processes_and_as_one_process_does(
    outcomes: dict[str, Any], folder: Path
) -> None:
    first, second = outcomes["lbfgs"]
    assert first == second
    alone = train(ByLBFGS(), folder / "alone", 1, shuffle_train=False).model.weight
    torch.testing.assert_close(torch.tensor(first), alone.detach(), rtol=1e-5, atol=1e-6)
