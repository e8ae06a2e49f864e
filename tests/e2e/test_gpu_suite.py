"""The suite that needs a GPU runs from a plain checkout, and its tests on a CPU as far as that goes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.e2e.markdown import ROOT

# Each of the grids is run here once, or elsewhere: `make gpu DEVICE=cpu` runs all of it.
SLOW = (
    "every_update",
    "killed",
    "group_of_one",
    "asked_to_shard",
    "no_step_that_logs",
    "interrupted_run",
    "5000_steps",
    "no-fsdp",
    "bf16-ddp",
    "bf16-fsdp",
)


def run_suite(*arguments: str) -> str:
    """Run what `make gpu` runs, with this Python and further arguments, and return its output."""
    plan = subprocess.run(["make", "--dry-run", "gpu"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    command = next(shlex.split(line) for line in plan.splitlines() if "-m pytest" in line)
    options = command[command.index("-m") :]
    run = subprocess.run(
        [sys.executable, *options, *arguments, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.slow
def test_it_passes_on_a_cpu_as_far_as_that_goes():
    out = run_suite("--device=cpu", "-k", " and ".join(f"not {name}" for name in SLOW))
    passed = int(re.search(r"(\d+) passed", out)[1])
    skipped = re.findall(r"^SKIPPED \[\d+\] [^:]+:\d+: (.*)", out, re.MULTILINE)
    assert passed >= 25
    assert all(reason.startswith("needs a CUDA device: ") for reason in skipped)


@pytest.mark.slow
def test_without_a_gpu_it_says_why_nothing_is_run():
    out = run_suite("--device=cuda")
    if "passed" not in out:
        assert len(re.findall(r"^SKIPPED", out, re.MULTILINE)) == 1
        assert "torch finds no CUDA device" in out
