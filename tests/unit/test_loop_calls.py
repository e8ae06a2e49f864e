"""What the loop costs in calls of its own code: a bound that no busy machine can break, unlike one of time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from count_calls import CASES, count_step

BOUNDS = {
    "bare step": 73,
    "bare step, progress bar on": 73,
    "bare step, checkpoints on": 104,
    "bare step, a mixture of three sources": 87,
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_makes_few_calls_of_our_own_code(case: str) -> None:
    calls = count_step(**CASES[case])
    assert calls.total() <= BOUNDS[case], calls.most_common()


def test_the_step_snapshot_is_taken_once_a_step() -> None:
    calls = count_step(**CASES["bare step, checkpoints on"])
    assert {count for name, count in calls.items() if name.endswith(" capture")} == {1}
