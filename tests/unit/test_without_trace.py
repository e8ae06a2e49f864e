"""What is computed without a trace leaves a model, and the random generators, as they were."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from accmt.without_trace import without_trace


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_given_back_also_after_an_error(fails: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    model[2].eval()
    model[2].register_buffer("mask", None)
    model[0].weight.grad = torch.full((2, 2), 3.0)
    gradient, mean = model[0].weight.grad, model[1].running_mean
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = draw()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    try:
        with without_trace(model):
            assert model[0].weight.grad is None
            model.eval().train()
            model(torch.randn(4, 2)).sum().backward()
            model[1].running_mean = torch.ones(2)
            model[2].mask = torch.ones(3)
            model[2].register_buffer("made", torch.ones(3))
            draw()
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert draw() == expected
    assert [layer.training for layer in model] == [True, True, False]
    assert model[0].weight.grad is gradient
    assert gradient.tolist() == [[3.0, 3.0]] * 2
    assert model[0].bias.grad is None
    assert model[1].running_mean is mean
    assert model[2].mask is None
    assert not hasattr(model[2], "made")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
