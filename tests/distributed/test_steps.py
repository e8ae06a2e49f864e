"""What differs between processes within a step, and what must not depend on it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.distributed.scripts.steps import EPOCHS, LEAVING, Leaving, Spectrum
from tests.launching import SCRIPTS, launch
from tests.toys import make_points


@pytest.fixture(scope="module", params=[1, 3], ids=lambda r: f"{r}-processes")
def every(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("steps")
    path = folder / "result.json"
    launch(SCRIPTS / "steps.py", str(path), str(folder), processes=request.param, result=path)
    return json.loads(path.read_text())


def test_no_two_steps_draw_the_same_in_any_epoch_or_process_or_work(every) -> None:
    drawn = [number for own in every for number in own["drawn"]]
    assert len(drawn) == len(set(drawn)) == 2 * (EPOCHS + 2) * len(every)


def test_batches_of_a_manual_step_weigh_by_their_samples(every) -> None:
    samples = 2 * len(every) - 1
    for own in every:
        assert own["weight"] == pytest.approx(-6.0 if samples == 1 else -6.0 / samples)


def test_batches_of_a_manual_step_weigh_what_it_says(every) -> None:
    counted = [6.0, 3.0] + [9.0] * (len(every) - 1)
    for weight, _, error in (own["weighted"] for own in every):
        assert weight == pytest.approx(-sum(counted) / len(counted))
        assert ("self.backward(loss, weight=weight)" in error) == (len(every) > 1)
    assert every[0]["weighted"][1] == pytest.approx([(2 * 6.0 + (len(every) - 1) * 9.0) / len(counted)])


def test_a_manual_step_that_calls_backward_of_the_loss_itself_is_warned_of_once(every) -> None:
    once = int(len(every) > 1)
    assert every[0]["warnings"] == {"step": once, "own step": once, "both": 0, "as documented": 0}


def test_batches_for_which_the_step_returns_none_are_left_out_exactly(every) -> None:
    model = Leaving().model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in LEAVING * 2:
        kept = torch.tensor([float(value) for value in window if value > 0])
        if len(kept):
            optimizer.zero_grad()
            (model(kept[:, None]) - 1).square().mean().backward()
            optimizer.step()
    expected = torch.cat([weight.detach().flatten() for weight in model.parameters()]).tolist()
    for weights, *counts in (own["left_out"] for own in every):
        assert weights == pytest.approx(expected, rel=1e-5)
        assert counts[:3] == [2 * 11, 2, 2 * 22]
    assert every[0]["left_out"][4][0][1] == 2 * 11


def test_a_complex_parameter_trains_as_on_one_process(every) -> None:
    model = Spectrum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in zip(*(part.split(6) for part in make_points(12).tensors), strict=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    expected = torch.view_as_real(model.weight.detach()).flatten().tolist()
    assert [own["complex"] for own in every] == [pytest.approx(expected, rel=1e-5)] * len(every)


def test_a_row_begun_by_one_process_counts_once_on_several(every) -> None:
    expected = (2 * 1.0 + len(every) * 4.0) / (2 + len(every))
    assert [own["row"]["loss"] for own in every] == pytest.approx([expected] * len(every))


def test_samples_and_batches_a_second_are_those_of_all_processes(every) -> None:
    samples, batches = every[0]["rates"]
    assert samples == pytest.approx([4 * rate for rate in batches])
    assert len(samples) == 4
