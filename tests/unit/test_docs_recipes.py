"""The recipes of the page of hyper-parameters do what the page says."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file

from accmt import Trainer
from tests.e2e.markdown import ROOT, Block, read_blocks

PAGE = ROOT / "docs" / "hyper-parameters.md"


def run(*blocks: Block) -> dict[str, Any]:
    """Run blocks in one namespace, and return it."""
    names: dict[str, Any] = {"__name__": "recipe"}
    for block in blocks:
        exec(compile(block.text, PAGE.name, "exec"), names)  # noqa: S102 - the page is ours
    return names


def block_with(text: str) -> Block:
    (block,) = [block for block in read_blocks(PAGE, "python") if text in block.text]
    return block


@pytest.mark.feature("N48")
@pytest.mark.parametrize(("processes", "rate"), [(None, 0.1), ("1", 0.1), ("2", 0.2), ("8", 0.8)])
def test_the_learning_rate_grows_with_the_processes(processes, rate, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("os.environ", {} if processes is None else {"WORLD_SIZE": processes})
        hps = run(block_with("WORLD_SIZE"))["hps"]
    assert Trainer(hps, "out/model").hps.optim_kwargs["lr"] == pytest.approx(rate)


@pytest.mark.feature("N32")
def test_the_search_tries_what_it_draws_and_names_the_best(tmp_path):
    names = run(block_with("trainer.tune("), block_with("rng = random.Random(0)"))
    scores, best = names["scores"], names["best"]
    assert len(set(scores.values())) == 4
    assert scores[best] == min(scores.values())
    model = names["Judged"]()
    model.model.load_state_dict(load_file(tmp_path / "out" / "search" / best / "model.safetensors"))
    assert names["nn"].functional.mse_loss(model.model(names["points"]), names["data"].tensors[1]).item() == (
        pytest.approx(scores[best], rel=1e-4)
    )
    assert names["score"](best, *redraw(int(best[-1]))) == scores[best], "the same trial has the same score"


def redraw(trial: int) -> tuple[dict[str, float], int]:
    """Return what the recipe tries in a trial."""
    import random

    rng = random.Random(0)
    for _ in range(trial + 1):
        optim = {"lr": 10 ** rng.uniform(-4, -1), "weight_decay": rng.choice([0.0, 0.01])}
        batch_size = rng.choice([8, 16, 32])
    return optim, batch_size
