"""Weights that a run itself lets be drawn are those of its seed."""

from __future__ import annotations

import torch
from torch import nn

from tests.toys import Linear, make_points, make_trainer


class Drawn(Linear):
    """Draws its weights inside `fit`, and keeps them as they were drawn."""

    def __init__(self) -> None:
        self.drawn = torch.zeros(1)

    def configure_model(self) -> None:
        self.model = nn.Linear(3, 1)
        self.drawn = self.model.weight.detach().clone()


def draw(random_before: int, **settings: object) -> torch.Tensor:
    torch.manual_seed(random_before)
    module = Drawn()
    make_trainer({"epochs": 1, "batch_size": 2}, f"out/{random_before}", **settings).fit(module, make_points(4))
    return module.drawn


def test_what_configure_model_draws_depends_on_the_seed_of_the_run_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert torch.equal(draw(1, seed=5), draw(2, seed=5))
    assert not torch.equal(draw(1, seed=5), draw(2, seed=6))
