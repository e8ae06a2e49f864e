"""On two processes: the record names the slow one, and checkpoints by time are written by both after the same steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import SCRIPTS, launch


@pytest.mark.parametrize("where", ["data", "forward"])
def test_a_delay_names_its_process_and_what_it_did_and_both_save_after_the_same_steps(
    tmp_path: Path, where: str
) -> None:
    launch(SCRIPTS / "goodput.py", str(tmp_path), where, processes=2, result=tmp_path / "result")
    found = json.loads((tmp_path / "result").read_text())
    process, slow_in, seconds = found["slowest"]
    assert (process, slow_in) == (1, where)
    assert seconds > 0
    first, second = found["steps"]
    assert first == second
    assert len(first) >= 2  # a delay of 1.8 s in all, and the end of the run
    rows = [json.loads(line) for line in (tmp_path / "logs/model/run/history.jsonl").read_text().splitlines()]
    assert {row["values"]["slowest_process"] for row in rows if "values" in row} >= {1.0}
