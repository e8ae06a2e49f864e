"""The job files for machines that vanish: they are well-formed, and what they start continues on an empty disk."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.e2e.markdown import ROOT, read_blocks

FOLDER = ROOT / "examples" / "spot"
JOB, SKY, SBATCH = FOLDER / "digits-job.yaml", FOLDER / "digits.sky.yaml", FOLDER / "digits.sbatch"
PAGE = ROOT / "docs" / "machines.md"
SRUN = '#!/bin/bash\nshift\nexec "$@"\n'


def read(path: Path) -> dict[str, object]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def scripts(bucket: str) -> dict[str, str]:
    """Return what each job file runs, as a shell script for this machine."""
    [container] = read(JOB)["spec"]["template"]["spec"]["containers"]  # type: ignore[index]
    of_job = shlex.join(container["command"]).replace("/app/", f"{ROOT}/").replace("s3://my-bucket/digits", bucket)
    of_sky = str(read(SKY)["run"]).replace("examples/", f"{ROOT}/examples/")
    return {"job": of_job, "sky": of_sky, "sbatch": f"bash {SBATCH}"}


def start(kind: str, disk: Path, bucket: str) -> subprocess.Popen[str]:
    """Start a job on an empty disk."""
    tools = disk / "bin"
    tools.mkdir(parents=True)
    (tools / "srun").write_text(SRUN)
    (tools / "srun").chmod(0o755)
    (tools / "python").symlink_to(sys.executable)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{':'.join(path for path in sys.path if 'site-packages' in path)}",
        "CHECKPOINT": bucket,
        "TMPDIR": str(disk),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    script = f"{scripts(bucket)[kind]}".replace("train.py", "train.py --epochs 12", 1) if kind != "sbatch" else ""
    command = ["bash", "-c", script] if script else ["bash", str(SBATCH), "--epochs", "12"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=disk, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def weights_in(printed: str) -> str:
    found = re.search(r"finished  684 updates, weights (\w+)", printed)
    assert found, printed[-3000:]
    return found[1]


def lose_machine(job: subprocess.Popen[str], bucket: Path) -> None:
    """Kill a job once it has written a checkpoint."""
    before = set(bucket.glob("step-*/manifest.json"))
    deadline = time.monotonic() + 200
    while not set(bucket.glob("step-*/manifest.json")) - before:
        assert time.monotonic() < deadline
        assert job.poll() is None, job.communicate()[0][-3000:]
        time.sleep(0.02)
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate()


@pytest.mark.slow
@pytest.mark.repeats
def test_jobs_that_lose_their_machines_are_continued_on_others_by_each_file_and_end_with_the_same_bits(
    tmp_path: Path,
) -> None:
    unbroken = start("sky", tmp_path / "unbroken", f"file://{tmp_path}/other").communicate(timeout=200)[0]
    bucket = tmp_path / "bucket"
    for kind in ("sky", "job"):
        lose_machine(start(kind, tmp_path / kind, f"file://{bucket}"), bucket)
    printed = start("sbatch", tmp_path / "sbatch", f"file://{bucket}").communicate(timeout=200)[0]
    assert "continuing from" in printed
    assert weights_in(printed) == weights_in(unbroken)


def test_a_job_that_stopped_at_a_checkpoint_is_started_again() -> None:
    rules = read(JOB)["spec"]["podFailurePolicy"]["rules"]  # type: ignore[index]
    assert rules[0] == {
        "action": "Ignore",
        "onExitCodes": {"containerName": "train", "operator": "In", "values": [143]},
    }
    assert read(SKY)["resources"]["job_recovery"]["recover_on_exit_codes"] == [143]  # type: ignore[index]
    assert '[ "$code" -eq 143 ]' in SBATCH.read_text()
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)


def test_the_page_shows_the_file_as_it_is() -> None:
    lines = SKY.read_text(encoding="utf-8").splitlines()
    shown = [block.text.splitlines() for block in read_blocks(PAGE, "yaml")]
    assert any(set(block) <= set(lines) for block in shown)
