"""`accmt diff` names what two real runs differ in; `planted_differences.py` tries many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.planted_differences import DIFFERENCES, compare

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        "line in git",
        "gradient",
        "two processes",
        "batch of one of two processes",
        "resume",
        "resume with another rate",
    ],
)
def test_a_planted_difference_is_named(name: str, tmp_path: Path) -> None:
    assert not compare(DIFFERENCES[name], tmp_path)
