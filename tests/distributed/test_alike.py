"""Processes that were given different data or settings: every one of them says so before the first batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import SCRIPTS, launch

_OTHER = "different samples on process 1 and process 0"
REFUSED = {
    "training data": ("the training data", "process 0: 8 samples; process 1: 12 samples"),
    "validation data": ("the validation data", "process 0: 4 samples; process 1: 5 samples"),
    "a named set": ("the validation data 'b'", "process 0: 4 samples; process 1: 5 samples"),
    "names of sets": (
        "the validation data 'set0'",
        "process 0: 4 samples; process 1: none",
        "the validation data 'set1'",
    ),
    "validation on one": ("the validation data", "process 0: none; process 1: 4 samples"),
    "none on one": ("no training data",),
    "kinds": ("the training data", "process 0: 8 samples; process 1: a DataLoader of 4 batches from 8 samples"),
    "loaders": ("the training data", "4 batches", "2 batches"),
    "streams": ("the training data", "iterator without a length"),
    "an error on one": ("OSError: no such file on this machine",),
    "an order of sets": ("the names of the sets to evaluate", "process 0: 'a', 'b'; process 1: 'b', 'a'"),
    "two mistakes on one": (
        "CombinedError",
        "Trainer(sampler=...)",
        "neither training_step nor step",
        "Only on process 1",
    ),
    "batch size": ("batch_size", "process 0: 2; process 1: 3"),
    "accumulation": ("grad_accumulation_steps", "process 0: 1; process 1: 2"),
    "when to save": ("checkpoint_every",),
    "test data": ("DataError", "process 0: 4 samples; process 1: 5 samples"),
    "a part of each": ("the training data", _OTHER, 'data_options={"shard": False}'),
    "a part of each, with workers": ("the training data", _OTHER),
    "a part of each to validate": ("the validation data", _OTHER),
    "a loader of a part of each": ("the training data", _OTHER),
    "a stream of every other": ("the training data", _OTHER, 'data_options={"shard": False}'),
    "a stream of every other, with a worker": ("the training data", _OTHER),
    "a loader of a stream of every other": ("the training data", _OTHER),
    "a sampler function of each": ("in different orders on process 1",),
    "orders": ("the training data", "6 batches, in different orders on process 1"),
    "orders to validate": ("the validation data", "6 batches, in different orders on process 1"),
    "growing data": ("12 samples in batches of 2 on process 0, 16 samples in batches of 2 on process 1",),
    "other rows at a resume": ("of a resumed epoch", "different samples at the same indices"),
}
MAY_DIFFER = [
    "seeds",
    "data of their own",
    "the same",
    "every other on purpose",
    "split by datasets",
    "split by datasets, in a loader",
    "a stream that uses the model",
    "augmented",
    "augmented without a seed",
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("alike")
    path = folder / "result.json"
    launch(SCRIPTS / "alike.py", str(path), str(folder), processes=2, result=path)
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_between_processes_is_refused_on_all_of_them(name: str, outcomes: dict[str, Any]) -> None:
    for message in outcomes[name]:
        assert all(part in message for part in REFUSED[name]), message


@pytest.mark.parametrize("name", MAY_DIFFER)
def test_what_may_differ_is_trained_with(name: str, outcomes: dict[str, Any]) -> None:
    assert set(outcomes[name]) == {""}
