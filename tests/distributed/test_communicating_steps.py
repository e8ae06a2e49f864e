"""Steps that communicate: the maths of one big batch on any number of processes, and nobody waits for ever."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.scripts.communicating_steps import (
    GLOBAL_BATCH,
    LOSSES,
    LR,
    LR_OF_DETECTION,
    SIZES,
    Encoders,
    collate,
    make_detector,
    make_images,
    make_rows,
)
from tests.launching import SCRIPTS, launch

PROCESSES = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("communicating_steps")
    path = folder / "result.json"
    launch(SCRIPTS / "communicating_steps.py", str(path), str(folder), processes=PROCESSES, result=path)
    return json.loads(path.read_text())


def train(model: nn.Module, rows: list[Any], loss_of: Callable[[list[Any]], Tensor], lr: float) -> Tensor:
    """Train with plain torch on whole batches, in the order of the data, and return the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for first in range(0, len(rows), GLOBAL_BATCH):
        optimizer.zero_grad()
        loss_of(rows[first : first + GLOBAL_BATCH]).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def assert_close_after_training(weights: list[float], expected: Tensor, before: nn.Module) -> None:
    """Compare weights to 1e-6 of their norm, and see that training changed them by more."""
    begun = torch.cat([parameter.detach().flatten() for parameter in before.parameters()])
    assert (torch.tensor(weights) - expected).norm() <= 1e-6 * expected.norm()
    assert (expected - begun).norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("name", LOSSES)
def test_in_batch_negatives_of_all_processes_give_the_steps_of_one_big_batch(found, name: str, count: int) -> None:
    model = Encoders()
    of_batch = lambda rows: LOSSES[name](*model(torch.stack(rows)), lambda own: (own, 0))  # noqa: E731
    assert_close_after_training(found[f"{name} {count}"], train(model, make_rows(count), of_batch, LR), Encoders())


def test_a_detection_loss_of_transformers_gives_the_steps_of_one_big_batch(found) -> None:
    model = make_detector()
    model.train()
    weights, results = found["detection"]
    expected = train(model, make_images(), lambda images: model(**collate(images)).loss, LR_OF_DETECTION)
    assert_close_after_training(weights, expected, make_detector())
    with torch.no_grad():
        loss = model.eval()(**collate(make_images())).loss.item()
    assert results["val_loss"] == pytest.approx(loss, rel=1e-5)


def test_terms_divided_by_means_over_processes_give_the_steps_of_one_big_batch(found) -> None:
    model = Encoders()

    def of_batch(rows: list[Tensor]) -> Tensor:
        batch = torch.stack(rows)
        left, right = model(batch)
        positive = (batch[:, 0, 0] > 0).float()
        return (left.square().sum(1) * positive).sum() / positive.sum().clamp(min=1e-6) + right.square().sum(1).mean()

    assert_close_after_training(found["reduced"], train(model, make_rows(7), of_batch, LR), Encoders())


def test_a_sum_over_processes_holds_nothing_of_a_borrowed_batch(found) -> None:
    assert found["divided"] == [[6.0, 1.0]] * PROCESSES
    assert found["late"] == [[1.0]] * PROCESSES  # the first call is in the last micro-batch


def test_gathered_rows_hold_those_of_a_borrowed_batch_once(found) -> None:
    share = GLOBAL_BATCH // PROCESSES
    assert found["recorded"] == [[[GLOBAL_BATCH, True], [1, True]]] * PROCESSES
    assert found["unequal"] == [[[GLOBAL_BATCH, True], [GLOBAL_BATCH - share, True]]] * PROCESSES


@pytest.mark.parametrize("count", SIZES)
def test_gather_for_metrics_gives_each_sample_once_in_order(found, count: int) -> None:
    seen, objects, results = found[f"gathered {count}"]
    rows = torch.stack(make_rows(count))
    assert seen == pytest.approx(rows[:, 0, 0].tolist())
    assert objects == [f"{value:.4f}" for value in rows[:, 0, 0]]
    means = [batch[:, 0, 0].mean() for batch in rows.split(GLOBAL_BATCH)]
    sizes = [len(batch) for batch in rows.split(GLOBAL_BATCH)]
    expected = sum(mean * size for mean, size in zip(means, sizes, strict=True)) / count
    assert results["same"] == pytest.approx(expected.item())


def test_gathering_in_predictions_gives_each_sample_once(found) -> None:
    expected = torch.stack(make_rows(7))[:, 0, 0].tolist()
    assert found["predicted"] == [pytest.approx(expected)] * 2
