"""What a model writes in evaluations does not depend on the number of processes or on how its weights are sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import SCRIPTS, launch

NUM_EVALUATIONS = 3  # of ten rows in steps of four


def run(folder: Path, processes: int | str, batch_size: int) -> Any:
    result = folder / f"{processes}.json"
    own = folder / str(processes)
    own.mkdir()
    launch(
        SCRIPTS / "generation.py",
        str(result),
        str(own),
        str(batch_size),
        processes=processes,
        result=result,
        timeout_s=200,
    )
    return json.loads(result.read_text())


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_texts_and_scores_are_those_of_one_process(tmp_path: Path) -> None:
    one = run(tmp_path, 1, 4)
    assert [len(table) for _, table in one["tables"]] == [7] * NUM_EVALUATIONS
    for processes, batch_size in ((2, 2), ("fsdp-2", 2), ("tp-2", 4)):
        several = run(tmp_path, processes, batch_size)
        assert several["tables"] == one["tables"], processes
        assert several["rouge"] == pytest.approx(one["rouge"]), processes
