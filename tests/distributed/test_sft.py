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


@pytest.mark.parametrize(
    ("way", "kind"), [(2, "packing"), pytest.param("fsdp-2", "batches", marks=pytest.mark.repeats)]
)
def test_processes_train_what_one_trains_and_resume_with_equal_bits(tmp_path: Path, way: int | str, kind: str) -> None:
    alone, together = run(tmp_path, 1, kind), run(tmp_path, way, kind)
    assert alone.keys() == together.keys() == {"whole, rows", "lora, stream"}
    for name, found in together.items():
        assert found["moved"], name
        assert found["resumes"], name
        expected = alone[name]
        difference = torch.tensor(found["weights"], dtype=torch.float64) - torch.tensor(expected["weights"])
        assert difference.abs().max() < 1e-7, name  # transformers computes the loss in float32


# Images: whole, accumulated and cut by tokens, with batches of one process that have none, which hang without a filler.
# Weights: padded, cut by tokens or packed; with and without accumulation.
@pytest.mark.parametrize(("way", "number"), [(2, 3 + 6), pytest.param("fsdp-2", 3, marks=pytest.mark.repeats)])
def test_the_gradient_of_images_and_of_weighted_turns_and_rows_is_that_of_plain_torch(
    tmp_path: Path, way: int | str, number: int
) -> None:
    result = tmp_path / "result.json"
    launch(SCRIPTS / "sft_gradients.py", str(result), str(tmp_path), processes=way, result=result, timeout_s=280)
    differences: dict[str, float] = json.loads(result.read_text())
    assert len(differences) == number
    assert max(differences.values()) <= 1e-6, differences
