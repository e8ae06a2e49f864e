"""A fork of a run that nothing changes is its parent, bit for bit, also if it is killed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.random_forks import content_of, try_unchanged
from tests.faults.random_replays import TIMEOUT_S, Variant, start


@pytest.mark.slow
@pytest.mark.repeats
def test_a_killed_fork_of_a_sharded_run_is_the_run_bit_for_bit(tmp_path: Path) -> None:
    """`random_forks.py --forks 30` has the other kinds, and forks with another learning rate."""
    variant = Variant("dataset", "fsdp-2", "no", accumulation=3, seed=1248)
    assert start(variant, tmp_path).wait(TIMEOUT_S) == 0, (tmp_path / "log").read_text()
    before = content_of(tmp_path)
    rng = random.Random(17)  # kills the fork after it has made steps of its own
    assert not try_unchanged(tmp_path / "logs" / "model" / "run", 16, rng)
    assert content_of(tmp_path) == before
