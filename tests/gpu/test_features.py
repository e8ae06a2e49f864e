"""Compiling, what the monitor measures of a GPU, and groups of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accmt import read_history
from tests.gpu.toys import AtStep, Classifier, InterruptionError, assert_same_bits, interrupt, make_data, train

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "one_process.py"


def test_a_compiled_model_keeps_its_names_resumes_and_is_compiled_once(
    settings: dict[str, Any], device: torch.device
) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiling: Any = True if device.type == "cuda" else {"backend": "eager"}
    others = {
        **settings,
        "compile": compiling,
        "checkpoint_every": "3 steps",
        "torch_flags": {"deterministic": True},
        "model_saving": "best_valid_loss",
        "metrics": ["accuracy"],
    }
    data, validation = make_data(68), make_data(24)  # 17 batches of 4
    unbroken = Classifier()
    trainer = train(unbroken, data, others, folder="unbroken", val=validation)
    num_graphs = counters["stats"]["unique_graphs"]
    assert 2 <= num_graphs <= 4, "for training and for evaluation, each perhaps again for another size"
    with pytest.raises(InterruptionError):
        train(Classifier(), data, others, folder="broken", val=validation, callbacks=AtStep(11, interrupt))
    resumed = Classifier()
    train(resumed, data, others, folder="broken", val=validation, resume=True)
    assert_same_bits(resumed, unbroken)
    from safetensors.torch import load_file

    saved = load_file(trainer.settings.model_folder / "model.safetensors")
    assert saved.keys() == unbroken.model.state_dict().keys() == Classifier().model.state_dict().keys()


def values(trainer: Any, name: str) -> list[float]:
    rows = [row["values"] for row in read_history(trainer.log_dir) if "values" in row]
    return [row[name] for row in rows if name in row]


@pytest.mark.cuda_only("the fields are of a GPU")
def test_the_monitor_tells_the_memory_and_use_of_the_gpu(settings: dict[str, Any]) -> None:
    trainer = train(Classifier(), make_data(), settings, monitor=["gpu_utilization"], log_every=4)
    own = torch.cuda.current_device()
    allocated, held = values(trainer, f"GPU_{own}_allocated"), values(trainer, f"GPU_{own}")
    assert len(allocated) == len(held) == 8
    assert all(0 < one <= other < 80 for one, other in zip(allocated, held, strict=True))
    assert all(used > 0 for used in values(trainer, "GPU_0_used"))
    assert all(0 <= share <= 100 for share in values(trainer, "GPU_0_utilization"))


def test_the_operations_are_those_counted_by_hand(settings: dict[str, Any]) -> None:
    peak, width, batch_size = 1e12, 64, 16

    class Products(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 5))

    hps = {"batch_size": batch_size, "epochs": 1}
    monitor = {"mfu": peak, "throughput": True}
    trainer = train(Products(), make_data(160), settings, hps=hps, monitor=monitor, log_every=2)
    first, second = 2 * 8 * width, 2 * width * 5
    by_hand = 2 * first + 3 * second  # the inputs need no gradient
    pairs = list(zip(values(trainer, "mfu"), values(trainer, "samples_per_s"), strict=True))
    assert len(pairs) == 5
    for share, samples_per_s in pairs:
        assert share * peak / samples_per_s == pytest.approx(by_hand, rel=1e-9)


@pytest.mark.cuda_only("its peak is looked up by its name")
def test_the_peak_of_this_gpu_is_known_or_said_not_to_be(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = train(Classifier(), make_data(), settings, monitor=["mfu"], log_every=4, verbose=True)
    assert values(trainer, "mfu") or "the peak FLOPS of" in caplog.text


def run_script(folder: Path, device: torch.device, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), str(folder), device.type, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def test_a_group_of_one_process_trains_saves_and_resumes_as_none_does(tmp_path: Path, device: torch.device) -> None:
    alone = run_script(tmp_path / "alone", device, "none")
    grouped = run_script(tmp_path / "grouped", device, "group")
    assert (alone["backend"], grouped["backend"]) == (None, "nccl" if device.type == "cuda" else "gloo")
    assert grouped["digest"] == alone["digest"]
    assert grouped["resumed"] == alone["resumed"] == alone["digest"]


def test_one_process_that_is_asked_to_shard_trains_saves_and_resumes_as_none_does(
    tmp_path: Path, device: torch.device
) -> None:
    alone = run_script(tmp_path / "alone", device, "none")
    sharded = run_script(tmp_path / "sharded", device, "fsdp2")
    assert sharded["digest"] == sharded["resumed"] == alone["digest"]
