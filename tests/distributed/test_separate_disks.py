"""A checkpoint folder on two disks, of which each has a part of every checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.launching import SCRIPTS, launch

pytestmark = pytest.mark.feature("L112")

OF_MAIN, OF_OTHERS = ["weights-0.bin"], ["weights-1.bin", "weights-2.bin"]
WHOLE = ["manifest.json", *OF_MAIN, *OF_OTHERS]
DISKS = [OF_MAIN, OF_OTHERS, OF_OTHERS]


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


def test_the_newest_is_copied_to_each_disk(run):
    assert run["found"] == [["step-00000002", {"step": 2}, WHOLE]] * 3


def test_a_failure_leaves_the_older_checkpoints_on_each_disk(run):
    assert all("on process 2: OSError: [Errno 28] No space left on device" in failed for failed in run["failed"])
    expected = [files_of(1, ["manifest.json", *disk]) + files_of(2, WHOLE) for disk in DISKS]
    assert [[name for name in names if name != ".lock"] for names in run["names after a failure"]] == expected


def test_a_damaged_file_is_replaced_by_the_one_on_another_disk(run):
    assert run["repaired"] == [[2, *WHOLE]] * 3
    assert run["content"] == ["of process 1, in several chunks"] * 3


def test_after_a_disk_was_lost_the_newest_that_is_whole_is_used(run):
    damaged = [f"damaged-step-00000003/{file}" for file in ("manifest.json", *OF_MAIN)]
    whole = files_of(2, WHOLE)
    assert run["after a disk was lost"] == [[2, *damaged, *whole], [2, *whole], [2, *whole]]
    assert "no disk has weights-1.bin, weights-2.bin without damage" in run["printed"]


def test_a_checkpoint_may_be_named(run):
    assert run["explicit"] == ["NoCheckpointError"] * 3
    assert run["explicit, whole"] == ["step-00000002"] * 3


def test_an_earlier_run_is_moved_on_each_disk(run):
    assert run["set aside"] == [["ck.previous"]] * 3
