"""A checkpoint folder on two disks, of which each has a part of every checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.launching import SCRIPTS, launch

OF_MAIN, OF_OTHERS = ["others-0.bin", "weights-0.safetensors"], ["others-1.bin", "others-2.bin"]
OF_OTHERS += ["weights-1.safetensors", "weights-2.safetensors"]
WHOLE = ["manifest.json", *sorted([*OF_MAIN, *OF_OTHERS])]
DISKS = [OF_MAIN, OF_OTHERS, OF_OTHERS]
FOUND = [[name for name in WHOLE if name in disk or not name.endswith(".safetensors")] for disk in DISKS]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base = tmp_path_factory.mktemp("disks")
    result = base / "result.json"
    printed = launch(SCRIPTS / "separate_disks.py", str(base), str(result), processes=3, result=result)
    of_all = json.loads(result.read_text())
    return {"printed": printed} | {name: [one[name] for one in of_all] for name in of_all[0]}


def files_of(step: int, files: list[str]) -> list[str]:
    return [f"step-{step:08d}/{file}" for file in files]


def test_each_disk_has_the_files_of_its_processes(run):
    assert run["none"] == [True] * 3
    expected = [[f for step in (1, 2) for f in files_of(step, ["manifest.json", *disk])] for disk in DISKS]
    assert [[name for name in names if name != ".lock"] for names in run["saved"]] == expected
    assert [".lock" in names for names in run["saved"]] == [True] * 3


def test_the_newest_is_copied_to_each_disk_without_its_tensors(run):
    assert run["found"] == [["step-00000002", {"step": 2}, found] for found in FOUND]


def test_a_failure_leaves_the_older_checkpoints_on_each_disk(run):
    assert all("on process 2: OSError: [Errno 28] No space left on device" in failed for failed in run["failed"])
    expected = [
        files_of(1, ["manifest.json", *disk]) + files_of(2, found) for disk, found in zip(DISKS, FOUND, strict=True)
    ]
    assert [[name for name in names if name != ".lock"] for names in run["names after a failure"]] == expected


def test_a_damaged_file_is_replaced_by_the_one_on_another_disk(run):
    assert run["repaired"] == [[2, *found] for found in FOUND]
    assert run["content"] == ["of process 1, in several chunks"] * 3


def test_after_a_disk_was_lost_the_newest_that_is_whole_is_used(run):
    damaged = [f"damaged-step-00000003/{file}" for file in ("manifest.json", *OF_MAIN)]
    whole = files_of(2, WHOLE)
    rest = files_of(2, [name for name in WHOLE if not name.endswith(".safetensors")])
    assert run["after a disk was lost"] == [[2, *damaged, *whole], [2, *rest], [2, *rest]]
    assert f"no disk has {', '.join(OF_OTHERS)} without damage" in run["printed"]


def test_a_checkpoint_may_be_named(run):
    assert run["explicit"] == ["NoCheckpointError"] * 3
    assert run["explicit, whole"] == ["step-00000002"] * 3


def test_an_earlier_run_is_moved_on_each_disk(run):
    assert run["set aside"] == [["ck.previous"]] * 3


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base = tmp_path_factory.mktemp("tensors")
    result = base / "result.json"
    launch(SCRIPTS / "spread_tensors.py", str(base), str(result), processes=3, result=result)
    of_all = json.loads(result.read_text())
    return {name: [one[name] for one in of_all] for name in of_all[0]}


@pytest.mark.parametrize("layout", ["as written", "by columns", "whole"])
def test_tensors_are_read_from_the_files_on_both_disks(tensors, layout):
    assert [one["are shapes right"] for one in tensors[layout]] == [True] * 3
    assert [one["is right"] for one in tensors[layout]] == [True] * 3
    file = "tensors-0000{}-of-00003.safetensors".format
    assert tensors["files"] == [[file(1)], [file(2), file(3)], [file(2), file(3)]]


def test_only_what_is_on_no_disk_of_a_process_is_sent(tensors):
    replicated = 4 + 4 * 8
    assert {one["sent"] for one in tensors["as written"]} <= {4, 32, replicated}
    assert [one["sent"] > 100 for one in tensors["by columns"]] == [True] * 3


def test_a_file_that_is_on_no_disk_is_an_error_on_each_process(tensors):
    assert all("no disk has tensors-00003-of-00003.safetensors" in error for error in tensors["without a file"])
