"""Two processes evaluate the checkpoints and the last model of a run, with the values of evaluations in the run."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launching import SCRIPTS, launch


def test_two_processes_evaluate_what_they_have_trained(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    launch(SCRIPTS / "evaluate_beside.py", str(result), str(tmp_path), processes=2, result=result)
    found = json.loads(result.read_text())
    assert found["beside"] == found["inside"]
    assert [step for step, _ in found["beside"]] == [2, 4, 6]
    assert found["saved"]
