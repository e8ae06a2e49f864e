"""With `same_bits`, a run on two GPUs of one model has the bits of a run on one.

Where there is one GPU, the run on it is repeated: it shows only that its kernels are deterministic.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "same_bits.py"


def run(folder: Path, processes: int, *arguments: str) -> dict[str, str]:
    """Run the script, and return its result."""
    folder.mkdir()
    command = [sys.executable, str(SCRIPT), str(folder), *arguments]
    if processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    threads = {} if torch.cuda.is_available() else {"OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **threads, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    path = folder / "result.json"
    assert path.exists(), ended.stderr
    result: dict[str, str] = json.loads(path.read_text())
    return result


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_two_processes_have_the_bits_of_one(tmp_path: Path, device: torch.device, precision: str, engine: str) -> None:
    others = 2 if device.type == "cpu" or torch.cuda.device_count() > 1 else 1
    expected = run(tmp_path / "one", 1, device.type, precision, engine)
    assert run(tmp_path / "two", others, device.type, precision, engine) == expected
