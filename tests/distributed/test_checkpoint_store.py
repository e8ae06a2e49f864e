"""Two processes save one checkpoint, fail together, and find the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.launching import SCRIPTS, launch


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base = tmp_path_factory.mktemp("store")
    result = base / "result.json"
    printed = launch(SCRIPTS / "checkpoint_store.py", str(base / "ck"), str(result), processes=2, result=result)
    first, second = json.loads(result.read_text())
    return {"base": base, "printed": printed, "both": {name: [first[name], second[name]] for name in first}}


def test_each_process_writes_its_files_into_one_checkpoint(run):
    assert run["both"]["none"] == [True, True]
    assert run["both"]["saved"] == ["step-00000001"] * 2
    files = ["parts/0", "parts/1", "weights-0.bin", "weights-1.bin"]
    assert run["both"]["found"] == [[1, {"of": 0}, files, 2]] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_on_one_process_is_raised_on_both_and_names_it(run, rank):
    first, second = run["both"][f"failed on {rank}"]
    assert first == second
    assert first.startswith("CheckpointError: checkpoint of step 2 in ")
    assert f"on process {rank}: OSError: [Errno 28] No space left on device\n" in first


@pytest.mark.parametrize(
    ("name", "told"), [("same name", "more than one file called weights.bin"), ("unwritable info", "TypeError")]
)
def test_what_is_wrong_with_the_whole_is_raised_on_both(run, name, told):
    first, second = run["both"][name]
    assert first == second
    assert told in first


def test_failures_leave_the_older_checkpoint_and_nothing_else(run):
    assert run["both"]["names after failures"] == [["step-00000001"]] * 2
    assert run["both"]["saved again"] == ["step-00000002"] * 2


def test_both_find_the_same_and_fall_back_together(run):
    assert all("CheckpointCorruptError" in told and "weights-1.bin" in told for told in run["both"]["explicit"])
    assert run["both"]["fallback"] == [1, 1]
    assert run["printed"].count("is damaged: weights-1.bin") == 1
    assert all(told.startswith("NoCheckpointError") for told in run["both"]["nowhere"])


def test_both_learn_where_an_earlier_run_went(run):
    previous = run["base"] / "ck.previous"
    assert run["both"]["previous"] == [str(previous)] * 2
    assert sorted(path.name for path in previous.iterdir()) == ["damaged-step-00000002", "step-00000001"]
