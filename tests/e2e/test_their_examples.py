"""The modules of examples/well-known-scripts.md train on two processes as their originals do on one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed.scripts.their_examples import EXAMPLES, PAGE, Example, in_plain_torch
from tests.e2e.markdown import read_blocks
from tests.launching import SCRIPTS, launch


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp("their_examples")
    path = folder / "result.json"
    launch(SCRIPTS / "their_examples.py", str(path), str(folder), processes=2, result=path)
    found: dict[str, list[float]] = json.loads(path.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("example", [pytest.param(example, id=example.title) for example in EXAMPLES])
def test_two_processes_have_the_losses_of_one_batch_in_plain_torch(losses: Any, example: Example) -> None:
    assert losses[example.title] == pytest.approx(in_plain_torch(example), rel=2e-6, abs=1e-6)


def test_each_example_of_the_page_is_trained() -> None:
    page = PAGE.read_text()
    titles = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert titles == [example.title for example in EXAMPLES]
    classes = [block for block in read_blocks(PAGE, "python") if "(AcceleratorModule):" in block.text]
    assert len(classes) == len(EXAMPLES)
