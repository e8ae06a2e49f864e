"""A mixture is the same on one and three processes: its samples, steps, and the loss of each source."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.scripts import mixtures
from tests.launching import SCRIPTS, launch


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return mixtures.train(tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module")
def alone_with_a_stream(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return mixtures.train(tmp_path_factory.mktemp("alone"), 1, streams=True)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("mixtures")
    path = folder / "result.json"
    launch(SCRIPTS / "mixtures.py", str(path), str(folder), processes=3, result=path)
    return json.loads(path.read_text())


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for ours, theirs in zip(one["weights"], other["weights"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    for of_one, of_other in zip(one["rows"], other["rows"], strict=True):
        assert of_one == pytest.approx(of_other, rel=1e-9)


def test_it_is_the_run_of_one_process(alone: dict[str, Any], together: dict[str, Any]) -> None:
    seen = [sorted(chain.from_iterable(chain(*run["seen"]))) for run in (together["plain"], alone)]
    assert seen[0] == seen[1]
    assert len(alone["rows"]) > 3
    for name in ("plain", "cut"):
        assert_same(together[name], alone)
    assert {"train_loss__chat", "samples_seen__code", "target_tokens_seen__news"} <= set(alone["rows"][0])


def test_with_a_stream_it_is_the_run_of_one_process(
    alone_with_a_stream: dict[str, Any], together: dict[str, Any]
) -> None:
    for name in ("streams", "cut streams"):
        assert_same(together[name], alone_with_a_stream)
    assert {"train_loss__chat", "samples_seen__code"} <= set(alone_with_a_stream["rows"][0])


def test_the_loss_of_each_source_is_that_of_its_samples(alone: dict[str, Any]) -> None:
    """Compute the first row by hand: two steps of two batches, at weights that plain torch reaches."""
    module, ends = mixtures.Points(), np.cumsum(list(mixtures.SIZES.values()))
    optimizer = torch.optim.SGD(module.model.parameters(), lr=0.1)
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in mixtures.SIZES}
    for step in range(2):
        samples = list(chain(*alone["seen"][0][2 * step : 2 * step + 2]))
        output = module.training_step(torch.tensor(samples, dtype=torch.float32)[:, None])
        for sample, loss, weight in zip(samples, output["losses"].tolist(), output["weights"].tolist(), strict=True):
            found[list(mixtures.SIZES)[int(np.searchsorted(ends, sample, side="right"))]].append((loss, weight))
        output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    row = alone["rows"][0]
    for name, pairs in found.items():
        weight = sum(weight for _, weight in pairs)
        assert row[f"train_loss__{name}"] == pytest.approx(sum(loss * weight for loss, weight in pairs) / weight)
        assert row[f"target_tokens_seen__{name}"] == weight
        assert row[f"samples_seen__{name}"] == len(pairs)


def test_an_interrupted_run_ends_with_the_same_bits(together: dict[str, Any]) -> None:
    assert together["resumed"]["weights"] == together["plain"]["weights"]
    assert together["resumed"]["rows"] == together["plain"]["rows"]
