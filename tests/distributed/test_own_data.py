"""Data that a user shares, and batches of which nothing is left on one process."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launching import SCRIPTS, launch, run_together

PROCESSES = 2


def test_a_run_on_a_distributed_sampler_resumes_within_an_epoch(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    launch(SCRIPTS / "own_data.py", str(path), str(tmp_path), "sampler", processes=PROCESSES, result=path)
    result = json.loads(path.read_text())
    assert len(result["whole"]) == PROCESSES
    assert sorted(sum((seen[: 48 // PROCESSES] for seen, _, _ in result["whole"]), [])) == list(range(48))
    for (seen, weights, count), (first, second) in zip(result["whole"], result["parts"], strict=True):
        assert count == second[2] == 96
        assert first[2] == 3 * 4 * PROCESSES
        assert first[0] + second[0] == seen
        assert second[1] == weights


def test_a_process_whose_batch_lost_all_its_samples_ends_the_run_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    forks, printed = run_together(SCRIPTS / "own_data.py", str(path), str(tmp_path), "nothing", processes=PROCESSES)
    assert not path.exists()
    assert all(fork.poll() not in (0, None) for fork in forks)
    assert "None from the collate function, which may have no `return batch`" in printed
    assert 'pass failures={"on_bad_sample": "skip"}' in printed
