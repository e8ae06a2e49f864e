"""Faults in the processes that load data: the run ends at once, with an error that says where it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import run_script

SCRIPT = Path(__file__).parent / "scripts" / "loading.py"

SAID = {
    "raise": [
        "LookupError",
        "reading sample 5 of Failing",
        "got: LookupError: no such point",
        "batch 1 of epoch 1 of the training data",
    ],
    "kill": ["a data loader worker", "got: the worker exited without an error message", "do: check `dmesg`"],
    "step": ["LookupError: no third step"],
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fault", SAID)
def test_a_fault_beside_or_in_a_worker_ends_the_run_at_once(fault: str, workers: int) -> None:
    ended = run_script(SCRIPT, fault, workers)
    assert ended.returncode == 1, ended.stderr[-3000:]
    for text in SAID[fault]:
        assert text in ended.stderr
    assert "Exception ignored" not in ended.stderr
