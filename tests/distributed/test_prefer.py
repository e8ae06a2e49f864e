"""Preference tuning on several processes, whole, sharded or split, gives the weights of one, and resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_sharded import HAS_PLANS
from tests.launching import SCRIPTS, launch

SHARDED = ("fsdp-2", "tp-2") if HAS_PLANS else ("fsdp-2",)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("prefer"), 1)


def run(folder: Path, processes: int | str) -> dict[str, Any]:
    result = folder / "result.json"
    launch(SCRIPTS / "prefer.py", str(result), str(folder), processes=processes, result=result, timeout_s=280)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.mark.parametrize("way", [2, *(pytest.param(way, marks=pytest.mark.repeats) for way in SHARDED)])
def test_processes_train_what_one_trains_and_resume_with_equal_bits(one: Any, way: int | str, tmp_path: Path) -> None:
    found_in_all = run(tmp_path, way)
    for outcomes in (one, found_in_all) if "kto" in found_in_all else ():  # its baseline is that of the whole step
        assert outcomes["kto, accumulated"]["weights"] == pytest.approx(outcomes["kto"]["weights"], abs=1e-9)
    for packed, padded in (("packed", "whole"), ("kto, packed", "kto"), ("reward, packed", "reward")):
        assert one[packed]["weights"] == pytest.approx(one[padded]["weights"], abs=1e-7), packed
    for name, found in found_in_all.items():
        expected = one[name]
        assert found["moved"] > 1e-4, name
        assert found["resumes"], name
        difference = torch.tensor(found["weights"], dtype=torch.float64) - torch.tensor(expected["weights"])
        assert difference.abs().max() < 1e-7, name
        for metric, value in expected["metrics"].items():
            assert found["metrics"][metric] == pytest.approx(value, rel=3e-6, abs=1e-7), (name, metric)
