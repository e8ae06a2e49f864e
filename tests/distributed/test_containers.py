"""Models whose parts are called one by one, and others that DDP treats apart: the weights of plain torch."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.distributed.scripts import containers
from tests.launching import SCRIPTS, launch

PROCESSES = 3


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("containers")
    path = folder / "result.json"
    launch(SCRIPTS / "containers.py", str(path), str(folder), processes=PROCESSES, result=path)
    return json.loads(path.read_text())


def batches(samples: int, size: int) -> list[Any]:
    tensors = containers.make_points(samples).tensors
    return [[tensor[start : start + size] for tensor in tensors] for start in range(0, samples, size)]


def assert_equal_weights(every: list[dict[str, Any]], model: torch.nn.Module) -> None:
    assert all(weights == every[0] for weights in every)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(torch.tensor(every[0][name]), weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", containers.CASES)
def test_gradients_of_parts_are_averaged_as_those_of_one_big_batch(name: str, results) -> None:
    case = containers.CASES[name]
    model = containers.Module(case).model
    optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), lr=0.1)
    for batch in batches(case.samples, containers.BATCH_SIZE * case.accumulation * PROCESSES) * containers.EPOCHS:
        case.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_weights(results[name], model)


def test_two_networks_with_an_optimizer_each_are_trained_as_by_hand(results) -> None:
    module = containers.Adversarial()
    critic, generator = module.optimizer_of_critic, module.get_optimizer()
    for batch in batches(12 * PROCESSES, containers.BATCH_SIZE * PROCESSES) * containers.EPOCHS:
        for loss, factor, optimizer in (
            (containers.critic_loss, 2, critic),
            (containers.generator_loss, 1, generator),
        ):
            critic.zero_grad(), generator.zero_grad()
            (factor * loss(module.model, batch)).backward()
            optimizer.step()
    assert_equal_weights(results["adversarial"], module.model)


def test_buffers_of_parts_are_those_of_the_main_process(results) -> None:
    every = results["normalized"]
    assert every[0]["body.2.num_batches_tracked"] > 0
    assert all(weights == every[0] for weights in every)


def test_frozen_weights_that_are_made_of_other_tensors_are_those_of_the_main_process(results) -> None:
    main, *others = results["around quantized"]
    assert all(other == main for other in others)
    assert main["ignored"] is None


def test_a_step_around_the_wrapper_is_refused(results) -> None:
    assert len(results["refusals"]) == 2
    for text in results["refusals"]:
        assert "self.model was not called" in text
        assert "nn.ModuleDict" in text


def test_a_static_graph_is_refused_where_gradients_are_accumulated(results) -> None:
    assert "static_graph=True, and 2 micro-batches per optimizer step" in results["static"]
