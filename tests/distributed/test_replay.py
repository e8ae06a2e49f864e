"""`accmt replay` makes steps again as they were, changes nothing, and says why where it cannot."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accmt.cli.main import main
from tests.launching import ENGINES, SCRIPTS, python, torchrun

pytestmark = pytest.mark.slow


def train(folder: Path, processes: int = 1, mode: str = "") -> Path:
    script = Path(shutil.copy(SCRIPTS / "replayed_run.py", folder / "program.py"))
    if processes == 1:  # a real start: forks would record the command of the process that forks
        assert python(script, folder, mode).returncode == 0
    else:
        torchrun(script, str(folder), mode, processes=2)
    return folder / "logs" / "model" / "run"


def content_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("engine", "mode"), [("ddp", "bf16"), pytest.param("fsdp", "", marks=pytest.mark.repeats)])
def test_a_replayed_step_of_two_processes_is_identical_and_nothing_changes(
    engine: str, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:  # of the launch only: a replay reads it from the ledger
        for name, value in ENGINES[engine].items():
            patch.setenv(name, value)
        run = train(tmp_path, 2, mode)
    before = content_of(tmp_path)
    assert main(["replay", str(run), "--step", "10"]) == 0
    printed = capsys.readouterr().out
    assert "bit-for-bit identical" in printed
    assert "of 8 samples" in printed
    assert "cannot be separated" not in printed
    assert content_of(tmp_path) == before


PROBE = """
from pathlib import Path
from accmt import Callback

class Watch(Callback):
    def on_before_optimizer_step(self):
        print("watched", self.state.global_step + 1)

def look(trainer):
    print("looked at", trainer.state.global_step + 1, float(trainer.model[0].weight.grad.norm()) > 0)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one process, which is no longer where it was; tests copy it."""
    folder = tmp_path_factory.mktemp("before")
    train(folder)
    return folder.rename(folder.with_name("project"))


def test_a_replay_is_identical_with_probe_and_export_and_leaves_samples_out_in_a_project_that_was_moved(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = shutil.copytree(project, tmp_path / "moved")
    run = moved / "logs" / "model" / "run"
    (tmp_path / "probe.py").write_text(PROBE)
    before = content_of(moved)
    monkeypatch.chdir(tmp_path)
    command = ["replay", str(run), "--step", "19", "--to", "20"]
    assert main([*command, "--probe", "probe.py:look", "--export", "step.pt", "--top", "2"]) == 0
    printed = capsys.readouterr().out
    assert "replayed from the checkpoint of step-" in printed
    assert "bit-for-bit identical" in printed
    assert "of 4 samples" in printed
    assert "looked at 19 True" in printed
    assert "looked at 20 True" in printed
    assert "looked at 18" not in printed
    exported = torch.load("step.pt", weights_only=True)
    assert exported["step"] == 19
    assert set(exported["gradients"]) == set(exported["weights"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    [sample] = [line.split()[0] for line in printed.splitlines() if line.startswith("  ")][1:2]
    assert main([*command, "--without", sample, "--probe", "probe.py:Watch"]) == 0
    printed = capsys.readouterr().out
    assert "watched 20" in printed
    rows = [line.split() for line in printed.splitlines() if line.startswith(("  19 ", "  20 "))]
    assert [row[0] for row in rows] == ["19", "20"]
    assert all(row[1] != row[2] for row in rows)
    assert content_of(moved) == before
    for wrong, said in (
        (["--probe", "missing.py:look"], "there is no file"),
        (["--probe", "probe.py:nothing"], "no such name"),
        (["--without", "9999"], "not among the samples"),
        (["--export", "no/folder/step.pt"], "a folder that exists"),
    ):
        assert main([*command, *wrong]) == 2
        assert said in capsys.readouterr().err


def test_what_differs_and_why_a_step_cannot_be_made_again_are_said(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = shutil.copytree(project, tmp_path / "moved")
    run, program = moved / "logs" / "model" / "run", moved / "program.py"
    original = program.read_text()
    program.write_text(original.replace("torch.randn(40", "torch.randn(44"))
    assert main(["replay", str(run), "--step", "20"]) == 2
    said = capsys.readouterr().err
    assert "44 samples" in said
    assert "40 samples, as when the epoch began" in said
    program.write_text(original)
    program.write_text(program.read_text().replace("SCALE = 1.0", "SCALE = 1.5"))
    assert main(["replay", str(run), "--step", "2", "--to", "3"]) == 1
    printed = capsys.readouterr().out
    assert "changed since: " in printed
    assert "different: step 1: the loss" in printed
    assert main(["replay", str(run), "--step", "99"]) == 2
    assert "1 to 20" in capsys.readouterr().err
    program.unlink()
    assert main(["replay", str(run), "--step", "2"]) == 2
    assert "did not reach step 2" in capsys.readouterr().err
    ledger = run / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join([*lines[:4], *lines[5:]]))
    assert main(["replay", str(run), "--step", "2"]) == 2
    assert "line 5" in capsys.readouterr().err
    ledger.unlink()
    assert main(["replay", str(run), "--step", "2"]) == 2
    assert "no ledger.jsonl" in capsys.readouterr().err


def test_a_program_that_changes_its_working_folder_and_trains_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    Path("replayed_run.py").write_text((SCRIPTS / "replayed_run.py").read_text())
    Path("program.py").write_text(TWICE)
    assert subprocess.run([sys.executable, "program.py"], check=False).returncode == 0
    run = tmp_path / "sub" / "logs" / "model" / "run"
    assert main(["replay", str(run), "--step", "20"]) == 0
    assert "bit-for-bit identical" in capsys.readouterr().out
    assert main(["replay", str(run), "--step", "30"]) == 2
    said = capsys.readouterr().err
    assert "nothing left to train after step 27" in said
    assert "only the first fit of a program can be replayed" in said


TWICE = """
import os

from replayed_run import main

os.chdir("sub")
main(".")
main(".", epochs=3, resume=True)
"""


UNSEEDED = """
import torch
from torch import nn
from accmt import AcceleratorModule, Trainer

class Linear(AcceleratorModule):
    def __init__(self):
        self.model = nn.Linear(1, 1)

    def step(self, batch):
        return self.model(batch).square().mean()

hps = {"epochs": 1, "batch_size": 2, "optim": {"type": "SGD", "lr": 0.1}}
often = {"checkpoint_every": "2 steps", "checkpoint_options": {"max_checkpoints": 9}}
trainer = Trainer(hps, "out/model", ledger=True, run_name="run", seed=0, **often)
trainer.fit(Linear(), torch.ones(8, 1))
"""


@pytest.mark.repeats
def test_a_model_that_was_not_seeded_is_the_told_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "program.py"
    script.write_text(UNSEEDED)
    monkeypatch.chdir(tmp_path)
    assert python(script).returncode == 0
    assert main(["replay", "logs/model/run", "--step", "1"]) == 1
    printed = capsys.readouterr().out
    assert "different: step 0: the weights of weight" in printed
    assert "seed it before that: accmt.set_seed(0)" in printed
    assert "gradient" not in printed  # of the other model
    assert main(["replay", "logs/model/run", "--step", "4"]) == 0  # from a checkpoint
    assert "bit-for-bit identical" in capsys.readouterr().out
    assert main(["replay", "logs/model/other", "--step", "1"]) == 2
    assert "no such folder; the working directory is" in capsys.readouterr().err
