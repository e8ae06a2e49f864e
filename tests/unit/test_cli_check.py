"""`accmt check`: what it says of whole, damaged, alien and missing checkpoints, and that it only looks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from accmt.checkpoint.contents import StateCollector, write_state
from accmt.checkpoint.retention import PIN_NAME
from accmt.checkpoint.store import CheckpointStore
from accmt.cli.main import main
from tests.checkpoints import delete, empty, flip, grow, save_with, truncate, write_version

INFO = {"epoch": 1, "samples_seen": 960, "best": {"loss": 0.25}, "run_name": "quick", "global_step": 7, "is_odd": True}
TENSORS = "tensors-00001-of-00001.safetensors"


def build_state():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return StateCollector(model, [optimizer]).collect({"window": torch.zeros(2)})


def save(folder, *steps):
    store = CheckpointStore(folder, max_checkpoints=9)
    collected = build_state()
    for step in steps:
        save_with(store, step, lambda files: write_state(collected, files), INFO)
    return folder / f"step-{steps[-1]:08d}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 3, 7)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """Give checkpoints of steps 3 and 7 that were copied elsewhere."""
    return Path(shutil.copytree(saved, tmp_path / "ck"))


def check(capsys, *arguments):
    """Run the command; return its exit code and what it printed."""
    exit_code = main(["check", *map(str, arguments)])
    return exit_code, capsys.readouterr().out


def check_json(capsys, path):
    exit_code, printed = check(capsys, path, "--json")
    return exit_code, json.loads(printed)


def all_times(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_numbers_are_those_of_the_state(folder, capsys):
    exit_code, found = check_json(capsys, folder / "step-00000007")
    (one,) = found["checkpoints"]
    tensors = build_state().pieces.tensors
    assert one["num_tensors"] == len(tensors)
    assert one["num_model_values"] == sum(t.numel() for name, t in tensors.items() if name.startswith("model."))
    assert (exit_code, one["is_complete"], one["faults"], one["step"], one["info"]) == (0, True, [], 7, INFO)
    assert found["resume_from"] == str(folder / "step-00000007")


def test_all_checkpoints_of_a_folder_are_checked_and_the_one_for_a_resume_is_named(folder, capsys):
    exit_code, printed = check(capsys, folder)
    assert exit_code == 0
    assert printed.index("step-00000003: complete") < printed.index("step-00000007: complete")
    assert printed.endswith("\nresume uses step-00000007\n")


def test_the_newest_is_the_last_saved_and_not_the_one_of_the_largest_step(folder, capsys):
    save(folder, 5)
    _, found = check_json(capsys, folder)
    assert [one["step"] for one in found["checkpoints"]] == [3, 7, 5]
    assert found["resume_from"].endswith("step-00000005")


DAMAGES = {
    "cut": (truncate, "bytes instead of"),
    "flipped": (flip, "its digest differs"),
    "deleted": (delete, "is missing"),
    "emptied": (empty, "has 0 bytes instead of"),
    "grown": (grow, "bytes instead of"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [TENSORS, "state.json"])
def test_a_damaged_file_is_named_with_what_is_wrong(name, damage, folder, capsys):
    act, told = DAMAGES[damage]
    act(folder / "step-00000007" / name)
    exit_code, printed = check(capsys, folder)
    assert exit_code == 1
    assert "step-00000003: complete" in printed
    assert "step-00000007: DAMAGED" in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("  ! ")]
    assert name in line
    assert told in line
    assert printed.endswith("resume uses step-00000003\n")


@pytest.mark.parametrize(
    ("act", "told"), [(delete, "is missing"), (empty, "is not JSON"), (lambda path: flip(path, 40), "has changed")]
)
def test_a_damaged_manifest_is_named(act, told, folder, capsys):
    act(folder / "step-00000003" / "manifest.json")
    exit_code, printed = check(capsys, folder)
    assert exit_code == 1
    assert f"  ! manifest.json {told}" in printed
    assert printed.endswith("resume uses step-00000007\n")


def test_where_nothing_is_complete_a_resume_takes_nothing(folder, capsys):
    for step in (3, 7):
        empty(folder / f"step-{step:08d}" / "state.json")
    exit_code, printed = check(capsys, folder)
    assert exit_code == 1
    assert printed.endswith("resume uses none of them\n")


def test_a_format_of_the_future_is_no_success_and_stops_a_resume(folder, capsys):
    write_version(folder / "step-00000003", 99)
    exit_code, found = check_json(capsys, folder)
    assert exit_code == 1
    assert found["resume_from"] is None
    (fault,) = next(one["faults"] for one in found["checkpoints"] if not one["is_complete"])
    assert "format 99" in fault


def test_a_file_of_tensors_that_is_not_part_of_it_is_a_fault_and_other_files_are_none(folder, capsys):
    one = folder / "step-00000007"
    (one / "notes.txt").write_text("mine")
    (one / PIN_NAME).touch()
    exit_code, printed = check(capsys, one)
    assert (exit_code, printed.splitlines()[0]) == (0, f"{one}: complete, pinned")
    shutil.copy(one / TENSORS, one / "other.safetensors")
    exit_code, printed = check(capsys, one)
    assert exit_code == 1
    assert "  ! other.safetensors does not belong to it" in printed


@pytest.mark.parametrize("target", ["nowhere", "a file", "an empty folder"])
def test_what_is_no_checkpoint_is_wrong_use(target, tmp_path, capsys):
    path = tmp_path / "x"
    if target == "a file":
        path.write_text("x")
    elif target == "an empty folder":
        path.mkdir()
    assert main(["check", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"checkpoint {path}\n  got: ")


def test_nothing_is_written_renamed_or_removed(folder, capsys):
    flip(folder / "step-00000007" / "state.json")
    (folder / ".tmp-step-00000009-elsewhere-1-1-aaaaaaaa").mkdir()
    before = all_times(folder)
    check(capsys, folder)
    check(capsys, folder / "step-00000007", "--json")
    assert all_times(folder) == before


def test_the_installed_command_checks_a_read_only_copy_without_loading_transformers(folder):
    code = (
        "import sys; from accmt.cli.main import main; r = main(); assert 'transformers' not in sys.modules; sys.exit(r)"
    )
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        run = subprocess.run(
            [sys.executable, "-c", code, "check", str(folder)], capture_output=True, text=True, check=False, cwd="/"
        )
    finally:
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.endswith("resume uses step-00000007\n")
