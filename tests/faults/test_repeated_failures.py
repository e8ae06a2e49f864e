"""A run that is started again and again, and fails at the same place: its fourth start says so, and goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import run_script

SCRIPT = Path(__file__).parent / "scripts" / "dying.py"
CODES = {"raise": 1, "exit": 3, "SIGKILL": -9, "SIGTERM": 143, "none": 0}


def start(how: str, resume: str = "auto", every: str = "3 steps") -> str:
    ended = run_script(SCRIPT, how, resume, every)
    assert ended.returncode == CODES[how], ended.stderr[-3000:]
    return ended.stderr


@pytest.mark.parametrize(
    ("how", "every", "said"),
    [
        ("raise", "3 steps", "the last 3 starts all ended after step 7, most recently with ValueError: a batch that"),
        ("SIGKILL", "3 steps", "the last 3 starts all ended somewhere after step 6, before the next checkpoint"),
        ("exit", "100 epochs", "the last 3 starts all ended somewhere after step 0, before the next checkpoint"),
    ],
)
def test_the_fourth_start_says_where_the_run_dies(how: str, every: str, said: str) -> None:
    assert all("its last" not in start(how, every=every) for _ in range(3))
    assert said in start(how, every=every)
    assert "the last 4 starts" in start("none", every=every)
    assert not Path("out/checkpoint-model/starts.json").exists()


def test_a_run_that_is_asked_to_end_or_to_begin_anew_has_a_clean_record() -> None:
    start("raise")
    start("raise")
    start("SIGTERM")  # it ends at update 8, and is continued from there
    assert not Path("out/checkpoint-model/starts.json").exists()
    for _ in range(4):
        assert "its last" not in start("raise", resume="False")
