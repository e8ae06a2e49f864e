"""Whole runs on 1 and 3 processes: the same results, files written once, and errors that reach everybody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launching import SCRIPTS, launch


@pytest.fixture(scope="module", params=[1, 3], ids=lambda r: f"{r}-processes")
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("runs")
    path = folder / "result.json"
    launch(SCRIPTS / "runs.py", str(path), str(folder), processes=request.param, result=path)
    return request.param, json.loads(path.read_text()), folder


def test_processes_agree_and_files_are_written_once(outcome) -> None:
    processes, results, folder = outcome
    training = results["training"]
    weights, evaluations, on_main, is_main, is_distributed, folders, values = zip(*training["every"], strict=True)
    assert len(weights) == processes
    assert all(other == weights[0] for other in weights)
    assert evaluations == (2,) * processes
    assert on_main == (2,) + (0,) * (processes - 1)
    assert is_main == (True,) + (False,) * (processes - 1)
    assert is_distributed == (processes > 1,) * processes
    assert len(set(folders)) == 1
    assert {"on_main": -2.0, "process": 0.0}.items() <= values[0].items()
    assert all(other == values[0] for other in values), "what a hook adds is the main process's on all"
    assert len(list((folder / "logs" / "model").iterdir())) == 1
    assert training["rows"] == training["state"]["global_step"] + 2
    assert (folder / "model" / "model.safetensors").exists()
    assert training["state"]["samples_seen"] == 58


def test_statistics_of_averaged_weights_are_the_mean_over_all_processes(outcome) -> None:
    averages = outcome[1]["averages"]
    means = torch.tensor([mean for own, _ in averages for mean in own], dtype=torch.float64)
    for _, statistics in averages:
        assert statistics == pytest.approx(means.mean(0).tolist(), rel=1e-5, abs=1e-6)


def test_the_schedule_ends_with_the_last_update_whatever_the_processes(outcome) -> None:
    assert outcome[1]["training"]["lr"] == pytest.approx(0.0, abs=1e-12)


def test_a_save_that_fails_on_the_main_process_stops_every_process(outcome) -> None:
    processes, results, _ = outcome
    assert len(results["failure"]) == processes
    assert set(results["failure"]) != {"nothing"}
    assert "nothing" not in results["failure"]


def test_gradients_are_reduced_once_an_update(outcome) -> None:
    processes, results, _ = outcome
    reductions, updates = results["reductions"]
    assert updates == {1: 6, 3: 2}[processes]
    assert reductions == updates or processes == 1  # where there is nobody to reduce with


def test_a_step_that_evades_the_reduction_of_gradients_is_refused(outcome) -> None:
    processes, results, _ = outcome
    assert len(results["evasion"]) == processes
    for message in results["evasion"] if processes > 1 else ():
        assert "self.model was not called" in message


@pytest.mark.parametrize("what", ["type", "shape", "name"])
def test_models_that_differ_in_their_tensors_are_named(outcome, what: str) -> None:
    processes, results, _ = outcome
    assert len(results["models"][what]) == processes
    for message in results["models"][what]:
        assert ("and " in message and " on process 1" in message) if processes > 1 else message == "nothing"


def test_after_closing_each_process_is_alone_keeps_its_place_and_trains_no_more(outcome) -> None:
    processes, _, folder = outcome
    for index in range(processes):
        seen = json.loads((folder / f"parted-{index}.json").read_text())
        assert (seen["group"], seen["is_main"], seen["acted"]) == (False, index == 0, 2 if index == 0 else 0)
        assert seen["updates"] == 6 // processes  # after all the runs before it, in the same group
        assert "left its process group" in seen["again"]  # torchrun makes a group of one process, too
