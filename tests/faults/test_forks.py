"""Random forks are their parents up to their step, bit for bit, also if they are killed."""

from __future__ import annotations

import pytest

from tests.faults.random_forks import main


@pytest.mark.slow
def test_forks_of_a_sharded_run_are_the_run_bit_for_bit() -> None:
    """Two forks of one run; `random_forks.py --forks 30` has the other kinds."""
    assert main(forks=2, seed=2, first=0)
