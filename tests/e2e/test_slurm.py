"""The script of the SLURM recipe, with stand-ins for `srun` and `scontrol` that do what SLURM does."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.e2e.markdown import read_blocks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
MANIFEST = SCRIPT.parents[1] / "kubernetes" / "one-machine.yaml"
PAGE = ROOT / "docs" / "machines.md"

SRUN = f"""#!{sys.executable}
# Starts the tasks, hands SIGUSR1 to each of them, and ends with the highest code.
import os, signal, subprocess, sys
command = [part for part in sys.argv[1:] if not part.startswith("--kill-on-bad-exit")]
count = int(os.environ["SLURM_NTASKS"])
tasks = []
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
for index in range(count):
    env = {{**os.environ, "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}}
    tasks.append(subprocess.Popen(command, env=env))
open("srun.pid", "w").write(str(os.getpid()))
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$*" >> scontrol.log; fi
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Put the stand-ins on the path, and return the environment of a job of two tasks."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node1", "SLURM_NTASKS": "2"}
    path = f"{folder}:{os.environ['PATH']}"
    return {**os.environ, **job, "SLURM_CPUS_PER_TASK": "1", "PATH": path, "PYTHON": sys.executable}


def start(env: dict[str, str], output: str, log: Path) -> subprocess.Popen[str]:
    command = ["bash", str(SCRIPT), "--epochs", "3", "--output", output]
    with log.open("a") as file:  # as --open-mode=append
        return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, text=True)


def wait_for(text: str, log: Path, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)


def weights_in(log: Path) -> str:
    found = re.search(r"finished  87 updates, weights (\w+)", log.read_text())
    assert found, log.read_text()[-3000:]
    return found[1]


@pytest.mark.slow
def test_a_job_that_gets_the_signal_is_requeued_and_goes_on_with_the_same_bits(cluster, tmp_path):
    unbroken, broken = tmp_path / "unbroken.log", tmp_path / "broken.log"
    assert start(cluster, "out/unbroken", unbroken).wait(120) == 0
    job = start(cluster, "out/broken", broken)
    wait_for("epoch 1", broken)
    os.kill(int(Path("srun.pid").read_text()), signal.SIGUSR1)
    assert job.wait(120) == 143
    assert "SIGUSR1: the run stops at step" in broken.read_text()
    assert Path("scontrol.log").read_text() == f"requeue {cluster['SLURM_JOB_ID']}\n"
    assert start(cluster, "out/broken", broken).wait(120) == 0
    assert "continuing from" in broken.read_text()
    assert weights_in(broken) == weights_in(unbroken)
    assert Path("scontrol.log").read_text().count("requeue") == 1


@pytest.mark.slow
def test_a_job_that_fails_is_not_requeued(cluster, tmp_path):
    job = subprocess.run(["bash", str(SCRIPT), "--epochs", "no"], env=cluster, check=False, capture_output=True)
    assert job.returncode == 2
    assert not Path("scontrol.log").exists()


def test_the_page_shows_the_script_as_it_is():
    script = SCRIPT.read_text().splitlines()
    shown = next(block for block in read_blocks(PAGE, "text") if "#SBATCH" in block.text).text.splitlines()
    assert [line for line in shown if line not in script] == []


def test_the_job_of_the_page_does_not_count_a_pre_emption_as_a_failure():
    manifest = MANIFEST.read_text(encoding="utf-8")
    (block,) = [block for block in read_blocks(PAGE, "yaml") if "backoffLimit" in block.text]
    assert [line for line in block.text.splitlines() if line not in manifest.splitlines()] == []
    (job,) = (part for part in yaml.safe_load_all(manifest) if part["kind"] == "Job")
    pod = job["spec"]["template"]["spec"]
    codes = [rule["onExitCodes"] for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert codes == [{"containerName": pod["containers"][0]["name"], "operator": "In", "values": [143]}]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] > 30
