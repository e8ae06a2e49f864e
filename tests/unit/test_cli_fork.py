"""`accmt fork`: starts the program of a run again, for a run that continues it with changed settings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accmt.addons.flight_recorder.ledger import read_ledger
from accmt.addons.fork.lineage import read_origin
from accmt.cli.main import main
from accmt.tracking import read_history
from tests.launching import ROOT

PROGRAM = """
import os
import sys

import torch
from torch import nn

from accmt import AcceleratorModule, Trainer


class Linear(AcceleratorModule):
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)

    def step(self, batch):
        if self.state.global_step == int(os.environ.get("STOP", -1)):
            raise KeyboardInterrupt
        return (self.model(batch) - 3 * batch).square().mean()


hps = {"epochs": 4, "batch_size": 2, "optim": {"type": "SGD", "lr": 0.01}}
often = {"checkpoint_every": "3 steps", "checkpoint_options": {"max_checkpoints": 9}}
trainer = Trainer(hps, sys.argv[1], run_name="run", seed=0, ledger={"every": 1}, model_saving="last", **often)
print("rate", trainer.hps.optim_kwargs["lr"], "clip", trainer.settings.optimization.clip_grad)
trainer.fit(Linear(), torch.arange(8.0).reshape(8, 1) / 8)
"""


def start(*command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=own, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that has made a run of 16 steps."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "program.py").write_text(PROGRAM)
    assert start("program.py", "out/model", folder=folder).returncode == 0
    return folder


def losses_of(run: Path) -> dict[int, str]:
    return {
        line["step"]: line["loss"] for _, line in read_ledger(run / "ledger.jsonl").effective() if "batches" in line
    }


@pytest.mark.slow
def test_a_fork_a_fork_of_it_and_a_replay_of_that(project: Path, tmp_path: Path) -> None:
    logs = project / "logs" / "model"
    command = ("-m", "accmt.cli.main", "fork", "logs/model/run", "--at", "5", "--hps.optim.lr=0.05", "--clip_grad", "1")
    stopped = start(*command, folder=project, STOP="6")
    assert "resume: run `accmt fork logs/model/run --at 5 --hps.optim.lr=0.05 --clip_grad 1` to continue from" in (
        stopped.stdout + stopped.stderr
    )
    made = start(*command, folder=project)
    assert made.returncode == 0, made.stderr
    assert "rate 0.05 clip 1" in made.stdout  # when the program creates its Trainer
    recorded, own = losses_of(logs / "run"), losses_of(logs / "run-at-5")
    assert [own[step] == recorded[step] for step in range(4, 17)] == [True] * 3 + [False] * 10
    assert (project / "out" / "model-run-at-5" / "last" / "model.safetensors").is_file()
    # The changes of a fork stay in a fork of it.
    command = ("-m", "accmt.cli.main", "fork", "logs/model/run-at-5", "--at", "9", "--run-name", "longer")
    made = start(*command, "--hps.epochs=5", folder=project)
    assert made.returncode == 0, made.stderr
    assert "rate 0.05 clip 1" in made.stdout
    origin = read_origin(logs / "longer")
    assert origin is not None
    assert origin.changes == ["epochs: 4 -> 5"]
    assert max(row["step"] for row in read_history(logs / "longer") if "step" in row) == 20
    # A step before the fork, in a project that was moved.
    moved = Path(shutil.copytree(project, tmp_path / "moved"))
    replayed = start("-m", "accmt.cli.main", "replay", "logs/model/run-at-5", "--step", "5", folder=moved)
    assert "bit-for-bit identical" in replayed.stdout, replayed.stdout + replayed.stderr


def test_another_training_of_the_program_is_not_taken_for_the_run(project: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(project, tmp_path / "moved"))
    (moved / "program.py").write_text(PROGRAM.replace("sys.argv[1]", '"out/other"'))
    made = start("-m", "accmt.cli.main", "fork", "logs/model/run", "--at", "6", folder=moved)
    assert made.returncode != 0
    assert f"got: a training of {moved}/out/other" in made.stderr
    assert "only the first fit of a program can be forked" in made.stderr
    assert not (moved / "out" / "other").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["s3://bucket/run", "--at", "5"], "got: a URL"),
        (["logs/model", "--at", "5"], "accmt fork logs/model/run"),
        (["logs/model/run", "--at", "5", "--hps.optim.lrr=1"], "write `lr`"),
        (["logs/model/run", "--at", "5", "--hps.optim.lr=fast"], "--hps.optim.lr"),
        (["logs/model/run", "--at", "5", "--seed", "3"], "unrecognized arguments: --seed"),
    ],
)
def test_what_cannot_be_forked_is_said_before_the_program_starts(
    project: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["fork", *arguments]))  # argparse ends the program itself
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"machines": 2}, "got: a run on 2 machines"),
        ({"argv": ["python", "-c", "..."]}, "a run in a notebook or an interactive session"),
        ({"argv": ["python", "program.py", "--password=***"]}, "a command with values that were not recorded"),
        ({"cwd": "/nowhere"}, "its working directory no longer exists: /nowhere"),
    ],
)
def test_a_program_that_cannot_be_started_again(
    project: Path, tmp_path: Path, changes: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(project, tmp_path / "copy")) / "logs" / "model" / "run"
    path = run / "launches.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}) + "\n")
    assert main(["fork", str(run), "--at", "6"]) == 2
    assert said in capsys.readouterr().err
