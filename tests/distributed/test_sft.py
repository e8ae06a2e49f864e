"""Supervised fine-tuning on several processes gives the weights that one gives, sharded or not, and resumes exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launching import SCRIPTS, launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(folder: Path, way: int | str, kind: str) -> dict[str, Any]:
    result = folder / f"{way}.json"
    launch(SCRIPTS / "sft.py", str(result), str(folder / str(way)), kind, processes=way, result=result, timeout_s=280)
    outcomes: dict[str, Any] = json.loads(result.read_text())
    return outcomes


@pytest.mark.parametrize(("way", "kind"), [(2, "packing"), ("fsdp-2", "batches")])
def test_processes_train_what_one_trains_and_resume_with_equal_bits(tmp_path: Path, way: int | str, kind: str) -> None:
    alone, together = run(tmp_path, 1, kind), run(tmp_path, way, kind)
    assert alone.keys() == together.keys() == {"whole, rows", "lora, stream"}
    for name, found in together.items():
        assert found["moved"], name
        assert found["resumes"], name
        expected = alone[name]
        difference = torch.tensor(found["weights"], dtype=torch.float64) - torch.tensor(expected["weights"])
        assert difference.abs().max() < 1e-7, name  # transformers computes the loss in float32


def test_the_gradient_of_weighted_turns_and_rows_on_two_processes_is_that_of_plain_torch(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    launch(SCRIPTS / "sft_weights.py", str(result), str(tmp_path), processes=2, result=result, timeout_s=280)
    found: dict[str, float] = json.loads(result.read_text())
    assert len(found) == 6  # padded, cut by tokens or packed; with and without accumulation
    assert max(found.values()) <= 1e-6


@pytest.mark.parametrize("way", [2, "fsdp-2"])
def test_the_gradient_of_a_model_of_images_is_that_of_one_row_after_the_other(tmp_path: Path, way: int | str) -> None:
    result = tmp_path / "result.json"
    launch(SCRIPTS / "sft_images.py", str(result), str(tmp_path), processes=way, result=result, timeout_s=280)
    found: dict[str, float] = json.loads(result.read_text())
    assert len(found) == 3  # some batches of one process have no images, which hangs without a filler
    assert max(found.values()) <= 1e-6
