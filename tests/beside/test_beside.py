"""The built wheel, installed beside trl, peft and lightning: `make beside`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_types import RIGHT

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("trl", "peft", "lightning")

SCRIPT = """
import sys
from pathlib import Path

import lightning, peft, torch, trl
from lightning import LightningModule
from torch.utils.data import TensorDataset
from trl import SFTTrainer

import accmt
from accmt import AcceleratorModule, Trainer

assert Path(accmt.__file__).is_relative_to(sys.prefix), accmt.__file__


class Theirs(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def forward(self, inputs):
        return self.net(inputs)


class Ours(AcceleratorModule):
    def __init__(self):
        self.model = Theirs().net

    def training_step(self, batch):
        return self.model(batch[0]).square().mean()


if __name__ == "__main__":
    hps = {"epochs": 1, "batch_size": 2, "optim": {"type": "SGD", "lr": 0.1}}
    state = Trainer(hps, "out", model_saving="always").fit(Ours(), TensorDataset(torch.ones(8, 2)))
    print(state.global_step, "steps")
"""

MYPY = """
[mypy]
strict = true
follow_imports = silent
error_summary = false

# What is checked is the surface of accmt: following torch and numpy too would take a minute.
[mypy-torch.*,numpy.*,accelerate.*,transformers.*,pydantic.*,yaml.*,tqdm.*]
follow_imports = skip
ignore_missing_imports = true
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.fixture(scope="module", autouse=True)
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, which is also installed into this environment, in front of the one below it."""
    folder = tmp_path_factory.mktemp("dist")
    built = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("*.whl")
    install = ["install", "--quiet", "--no-deps", "--ignore-installed", "--force-reinstall", "--no-index", found]
    done = run(sys.executable, "-m", "pip", *install, cwd=folder)
    assert done.returncode == 0, done.stderr
    return found


def test_a_resolver_finds_versions_of_all_of_them_together(wheel: Path, tmp_path: Path):
    wanted = tmp_path / "wanted.txt"
    wanted.write_text("\n".join([f"accmt-trainer[transformers] @ {wheel.as_uri()}", *OTHERS]) + "\n")
    command = ["uv", "pip", "compile", wanted, "--quiet", "--no-header", "--no-annotate", "--python-version", "3.12"]
    done = run(Path(sysconfig.get_path("scripts")) / command[0], *command[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)
    assert found.keys() >= {*OTHERS, "torch", "transformers", "accelerate"}


def test_what_is_installed_here_is_what_each_of_them_requires(tmp_path: Path):
    done = run(sys.executable, "-m", "pip", "check", cwd=tmp_path)
    said = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("accmt-trainer ", *(f"{name} " for name in OTHERS)))
    ]
    assert said == []
    for name in ("accmt-trainer", *OTHERS):
        assert metadata.version(name)


def test_a_run_trains_with_all_of_them_imported(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(sys.executable, "-W", "ignore", "train.py", cwd=tmp_path)
    assert done.stdout.splitlines()[-1:] == ["4 steps"], done.stdout + done.stderr


def test_a_users_strict_mypy_reads_the_types_of_the_installed_wheel(tmp_path: Path):
    (tmp_path / "mypy.ini").write_text(MYPY)
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text('from accmt import set_seed\n\nset_seed("a")\n')
    done = run(sys.executable, "-m", "mypy", "right.py", "wrong.py", cwd=tmp_path)
    assert done.stderr == ""
    (said,) = done.stdout.splitlines()
    assert said.startswith('wrong.py:3: error: Argument 1 to "set_seed" has incompatible type "str"')


def test_an_example_runs_in_an_empty_environment_that_uv_makes_of_its_header(tmp_path: Path):
    script = ROOT / "examples" / "digits.py"
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    done = run(uv, "run", "--quiet", script, "--limit", "24", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "digits" / "model.safetensors").is_file()


def test_workers_of_ray_train_that_are_killed_continue_from_a_checkpoint(tmp_path: Path):
    storage = tmp_path / "storage"
    command = [sys.executable, ROOT / "examples" / "ray" / "train.py", "--storage", storage, "--epochs", "60"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"}
    log = tmp_path / "log"
    with log.open("w") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file) as running:
        while not list(storage.glob("checkpoint-model/*/manifest.json")) and running.poll() is None:
            time.sleep(0.2)
        names = {process: process.name() for process in psutil.Process(running.pid).children(recursive=True)}
        workers = [process for process, name in names.items() if name.startswith("ray::RayTrainWo")]
        assert workers, log.read_text()
        for worker in workers:
            worker.kill()
    text = log.read_text()
    assert running.returncode == 0, text
    assert "continuing from" in text
    assert re.search(r"accuracy +9\d", text), text
