"""The built wheel and source distribution: what they hold, and that they work where they are installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

SCRIPT = """
import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import accmt
from accmt import AcceleratorModule, Trainer

assert Path(accmt.__file__).is_relative_to(sys.prefix), accmt.__file__


class Net(AcceleratorModule):
    def __init__(self):
        self.model = torch.nn.Linear(2, 1)

    def training_step(self, batch):
        return self.model(batch[0]).square().mean()


if __name__ == "__main__":
    hps = {"epochs": 1, "batch_size": 2, "optim": {"type": "SGD", "lr": 0.1}}
    state = Trainer(hps, "out", model_saving="always").fit(Net(), TensorDataset(torch.ones(8, 2)))
    print(state.global_step, Path("out/model.safetensors").is_file())
"""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, folder: Path, *targets: str) -> None:
    chosen = [word for target in targets for word in ("-t", target)]
    run(sys.executable, "-m", "hatchling", "build", *chosen, "-d", folder, cwd=source)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "wheel", "sdist")
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a fresh environment with the wheel; what the wheel depends on it sees in the one of the tests."""
    folder = tmp_path_factory.mktemp("installed") / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    (Path(packages) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_only_the_package(wheel: Path):
    names = names_in(wheel)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"accmt"}
    held = {str(path.relative_to(ROOT)) for path in (ROOT / "accmt").rglob("*") if path.is_file()}
    assert {name for name in names if name.startswith("accmt/")} == {name for name in held if "__pycache__" not in name}
    assert {"accmt/py.typed", "accmt/loop/fit.py"} <= names


def test_the_wheel_says_what_it_is(wheel: Path):
    (path,) = [name for name in names_in(wheel) if name.endswith(".dist-info/METADATA")]
    said = HeaderParser().parsestr(zipfile.ZipFile(wheel).read(path).decode())
    assert said["Name"] == PROJECT["name"]
    assert said["License-Expression"] == "Apache-2.0"
    assert {line.split(",")[0] for line in said.get_all("Project-URL")} == set(PROJECT["urls"])
    assert set(said.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert said.get_payload().startswith("# accmt")


def test_the_source_distribution_builds_the_same_wheel_and_can_be_tested(built: Path, wheel: Path, tmp_path: Path):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert {"Makefile", "tests", "docs", "examples", "hps", "constraints.txt"} <= {p.name for p in source.iterdir()}
    build(source, tmp_path / "again", "wheel")
    (again,) = (tmp_path / "again").glob("*.whl")
    assert names_in(again) == names_in(wheel)


def test_the_installed_wheel_trains_and_has_its_command(installed: Path, tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    assert run(installed / "python", "train.py", cwd=tmp_path).split()[-2:] == ["4", "True"]
    assert "launch" in run(installed / "accmt", "--help", cwd=tmp_path)
