"""The script for a job of the Hub: `hf jobs` accepts its command, and a run stopped by its time limit continues."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.markdown import ROOT
from tests.launching import run_script

PREEMPTED = 143
SCRIPT = ROOT / "examples" / "hf_jobs" / "train.py"


def test_the_command_of_the_script_is_one_of_hf_and_is_that_of_the_docs():
    command = re.compile(r"hf jobs uv run .*?55m", re.DOTALL)
    text = " ".join(command.findall(SCRIPT.read_text())[0].replace("\\\n", "").split())
    (in_docs,) = command.findall((ROOT / "docs" / "machines.md").read_text())
    assert text == " ".join(in_docs.replace("\\\n", "").split())
    program, *words = shlex.split(text)
    words.insert(words.index("run") + 1, "--dry-run")
    folder = Path(sys.executable).parent
    environment = {**os.environ, "HF_TOKEN": "hf_none", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [folder / program, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Job not submitted" in done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_that_reaches_its_time_limit_continues_from_its_uploaded_checkpoint(tmp_path: Path):
    url = (tmp_path / "store").as_uri()
    first = run_script(SCRIPT, "--checkpoint", url, "--limit", "120", "--time-limit", "0s")
    assert first.returncode == PREEMPTED, first.stderr
    assert list((tmp_path / "store").glob("*/manifest.json"))
    for folder in (tmp_path / "out").iterdir():  # the next job's disk is empty
        folder.rename(tmp_path / f"lost-{folder.name}")
    second = run_script(SCRIPT, "--checkpoint", url, "--limit", "120", "--time-limit", "1h")
    assert second.returncode == 0, second.stderr
    assert "accuracy" in second.stdout
    assert "continuing from" in second.stderr
