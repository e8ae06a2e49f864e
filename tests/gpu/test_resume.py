"""A run that was interrupted or killed ends with the bits of one that was not, with deterministic kernels."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accmt import read_history
from tests.gpu.toys import AtStep, Classifier, InterruptionError, assert_same_bits, interrupt, make_data, train

ROOT = Path(__file__).parents[2]
FP16 = pytest.mark.cuda_only("a CPU has no fp16 arithmetic worth using")
SCRIPT = Path(__file__).parent / "scripts" / "killed.py"


def rows(trainer: Any) -> list[Any]:
    return [(row["step"], row["values"]) for row in read_history(trainer.log_dir) if "values" in row]


@pytest.mark.parametrize("step", [3, 16, 21])
@pytest.mark.parametrize("precision", ["no", "bf16", pytest.param("fp16", marks=FP16)])
def test_an_interrupted_run_ends_with_the_same_bits(precision: str, step: int, settings: dict[str, Any]) -> None:
    others = {
        **settings,
        "mixed_precision": precision,
        "torch_flags": {"deterministic": True},
        "checkpoint_every": "2 steps",
        "log_every": 3,
        "metrics": ["accuracy"],
        "clip_grad": 1.0,
    }
    data, validation = make_data(), make_data(24)
    unbroken = Classifier("device")
    expected = train(unbroken, data, others, folder="unbroken", val=validation)
    with contextlib.suppress(InterruptionError):
        train(Classifier("device"), data, others, folder="broken", val=validation, callbacks=AtStep(step, interrupt))
    resumed = Classifier("device")
    trainer = train(resumed, data, others, folder="broken", val=validation, resume=True)
    assert_same_bits(resumed, unbroken)
    assert rows(trainer) == rows(expected)
    assert trainer.state == expected.state


def run_script(folder: Path, device: torch.device, *, dies_at: int | None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(folder), device.type, str(dies_at)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path, device: torch.device) -> None:
    unbroken = run_script(tmp_path / "unbroken", device, dies_at=None)
    assert unbroken.returncode == 0, unbroken.stderr
    killed = run_script(tmp_path / "killed", device, dies_at=23)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run_script(tmp_path / "killed", device, dies_at=None)
    assert resumed.returncode == 0, resumed.stderr
    expected, got = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("unbroken", "killed"))
    assert got["digest"] == expected["digest"]
    assert expected["first_step"] == 0
    assert 0 < got["first_step"] < 23


@pytest.mark.cuda_only("the generator is that of a device")
def test_a_run_leaves_the_generator_of_the_device_where_it_was(settings: dict[str, Any]) -> None:
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    train(Classifier(), make_data(), settings)
    assert torch.equal(torch.cuda.get_rng_state(), before)
