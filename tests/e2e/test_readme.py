"""What the README says beside its code, which test_docs.py runs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.e2e.markdown import ROOT, read_blocks, write_files
from tests.launching import python

README = ROOT / "README.md"


def test_the_yaml_is_the_file_of_the_repository():
    block = next(block for block in read_blocks(README, "yaml"))
    assert yaml.safe_load(block.text) == yaml.safe_load((ROOT / "hps" / "digits.yaml").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_script_runs_as_a_script(tmp_path: Path):
    write_files(README, tmp_path)
    (tmp_path / "hps").mkdir(exist_ok=True)
    (tmp_path / "hps" / "digits.yaml").write_text((ROOT / "hps" / "digits.yaml").read_text(encoding="utf-8"))
    run = python("train.py", env={"PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, run.stderr
    accuracy = float(re.search(r"best accuracy ([\d.]+)%", run.stdout)[1])
    assert accuracy > 90
    assert (tmp_path / "out" / "digits" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("demo", "accelerate launch"),
        ("test", "-m pytest -m 'not slow'"),
        ("test-all", "-m pytest\n"),
        ("bench", "bench_loop.py"),
    ],
)
def test_the_commands_do_what_is_written(target: str, command: str):
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "SELECT"}
    command_line = ["make", "--dry-run", target]
    plan = subprocess.run(command_line, cwd=ROOT, env=outside, capture_output=True, text=True, check=True).stdout
    assert command in plan
    assert target != "demo" or "examples/finetune_text_classifier.py" in plan
