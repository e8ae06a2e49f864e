"""Random steps of random runs are replayed bit for bit."""

from __future__ import annotations

import pytest

from tests.faults.random_replays import main as replay_runs


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, pytest.param(3, marks=pytest.mark.repeats)])
def test_steps_of_a_killed_run_are_replayed_bit_for_bit(number: int) -> None:
    """Replays a run on a stream and one with manual optimization; `random_replays.py` has the other kinds."""
    assert replay_runs(runs=1, steps=10, seed=5, first=number)
