"""The recipes of the page of hyper-parameters do what the page says."""

from __future__ import annotations

from typing import Any

import pytest

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


@pytest.mark.parametrize(("processes", "rate"), [(None, 0.1), ("1", 0.1), ("2", 0.2), ("8", 0.8)])
def test_the_learning_rate_grows_with_the_processes(processes, rate, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("os.environ", {} if processes is None else {"WORLD_SIZE": processes})
        hps = run(block_with("WORLD_SIZE"))["hps"]
    assert Trainer(hps, "out/model").hps.optim_kwargs["lr"] == pytest.approx(rate)
