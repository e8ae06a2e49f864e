"""13 samples in batches of 4: processes without samples, and steps that processes do not finish alike."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.distributed.scripts.uneven_windows import LR, SAMPLES, Heads, make_data
from tests.launching import SCRIPTS, launch


@pytest.fixture(scope="module", params=[3, "fsdp-2"], ids=lambda name: f"{name}-processes")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("uneven_windows")
    path = folder / "result.json"
    launch(SCRIPTS / "uneven_windows.py", str(path), str(folder), processes=request.param, result=path)
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", ["leaving", "choosing", "manual"])
def test_every_step_equals_that_of_one_big_batch_and_counts_each_sample_once(found, name: str) -> None:
    if name not in found:
        pytest.skip("a sharded model needs every part in every step")
    model, data = Heads(), make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for window in found[name]["windows"]:
        losses = [(model(data[number][0][None], head) - number).square().mean() for number, head in window]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    expected = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    assert (torch.tensor(found[name]["weights"]) - expected).norm() <= 1e-6 * expected.norm()
    assert found[name]["samples"] == 2 * SAMPLES
    if name != "leaving":
        assert sum(map(len, found[name]["windows"])) == 2 * SAMPLES
