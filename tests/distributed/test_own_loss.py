"""A step that returns a model's own loss gives the gradient of one big batch on any number of processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.scripts.own_loss import CASES
from tests.launching import SCRIPTS, launch
from tests.unit.test_features_own_loss import LENGTHS, make_rows, of_plain_torch


@pytest.mark.parametrize("way", ["ddp-2", "fsdp-2"])
def test_the_gradient_is_that_of_one_big_batch(tmp_path: Path, way: str) -> None:
    path = tmp_path / "result.json"
    launch(SCRIPTS / "own_loss.py", str(path), str(tmp_path), processes=way, result=path)
    found = json.loads(path.read_text())
    gradient, loss = of_plain_torch(make_rows())
    assert found.keys() == CASES.keys()
    for one in found.values():
        assert (torch.tensor(one["gradient"]) - gradient).norm() <= 1e-6 * gradient.norm()
        assert one["val_loss"] == pytest.approx(loss, rel=1e-5)
        assert one["targets"] == sum(length - 1 for length in LENGTHS)  # each text's first token is no target
