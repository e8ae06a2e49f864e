"""Faults in the processes that load data: the run ends in seconds, with an error that says where it was."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.launching import run_script

SCRIPT = Path(__file__).parent / "scripts" / "loading.py"
ENDS_S = 15.0
"""Most of it is Python's own exit; a worker that is waited for takes 30 more."""

SAID = {
    "raise": [
        "LookupError",
        "reading sample 5 of Failing",
        "got: LookupError: no such point",
        "for batch 1 of epoch 1",
    ],
    "kill": ["a process that loads data", "got: it is gone without a word", "do: look at `dmesg`"],
    "step": ["LookupError: no third step"],
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fault", SAID)
def test_a_fault_beside_or_in_a_worker_ends_the_run_in_seconds(fault: str, workers: int) -> None:
    ended = run_script(SCRIPT, fault, workers)
    seconds = time.time() - float(Path("failed").read_text())
    assert ended.returncode == 1, ended.stderr[-3000:]
    for text in SAID[fault]:
        assert text in ended.stderr
    assert seconds < ENDS_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert "Exception ignored" not in ended.stderr
