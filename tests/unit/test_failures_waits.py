"""Processes that wait for one another: which can never meet, and what is said of a long wait."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from torch._C._distributed_c10d import HashStore

from accmt.addons.watch import Stand, Waits
from accmt.failures import Board

COMPUTING = Stand(waits=False, begun={"all": 3, "host": 2})
IN_STEP = Stand(waits=True, begun={"all": 4, "host": 2})
IN_CALL = Stand(waits=True, begun={"all": 3, "host": 3})
BEHIND = Stand(waits=True, begun={"all": 3, "host": 2})


class Processes:
    """Some processes that look once a second at what they wait for."""

    def __init__(self, count: int = 2) -> None:
        store = HashStore()
        self.doing = [f"what {index} does" for index in range(count)]
        self.all = [
            Waits(Board(store, index, count), lambda index=index: self.doing[index])  # type: ignore[misc]
            for index in range(count)
        ]
        self.now = 0

    def pass_time(self, seconds: int, *stands: Stand) -> str:
        """Return the first error that one of them finds."""
        for _ in range(seconds):
            self.now += 1
            for one, stand in zip(self.all, stands, strict=True):
                if error := one.look(self.now, stand):
                    return str(error)
        return ""


def test_two_that_are_ahead_of_one_another_are_an_error_that_says_what_both_do() -> None:
    processes = Processes()
    said = processes.pass_time(12, IN_STEP, IN_CALL)
    assert "process 0: what 0 does; process 1: what 1 does" in said
    assert processes.now <= 8


def test_what_was_seen_before_a_process_went_on_does_not_count() -> None:
    processes = Processes()
    assert processes.pass_time(12, IN_CALL, IN_STEP)
    seconds = processes.now - 1
    again = Processes()
    assert again.pass_time(seconds, IN_CALL, IN_STEP) == ""
    assert again.pass_time(3, IN_CALL, COMPUTING) == ""
    assert again.pass_time(seconds, IN_CALL, IN_STEP) == ""


@pytest.mark.parametrize("other", [COMPUTING, BEHIND, IN_STEP])
def test_one_that_may_still_come_is_waited_for(other: Stand) -> None:
    assert Processes().pass_time(4000, IN_STEP, other) == ""
    assert Processes(3).pass_time(4000, IN_STEP, other, BEHIND) == ""


def test_one_that_goes_on_is_waited_for() -> None:
    processes = Processes()
    for step in range(20):
        begun = {"all": 3 + step, "host": 2}
        assert processes.pass_time(4, Stand(waits=True, begun=begun), IN_CALL) == ""
    assert processes.pass_time(3, IN_STEP, IN_CALL) == ""
    assert processes.pass_time(20, COMPUTING, IN_CALL) == ""


def test_one_collective_that_is_another_function_on_each_is_an_error() -> None:
    stands = [Stand(waits=True, begun={"all": 3}, function=name) for name in ("all_gather", "all_reduce")]
    assert "what 1 does" in Processes().pass_time(12, *stands)
    assert Processes().pass_time(100, stands[0], stands[0]) == ""
    assert Processes().pass_time(100, stands[0], Stand(waits=True, begun={"all": 3})) == "", "one in a backward, say"


def test_collectives_of_groups_to_which_one_process_belongs_say_nothing_of_the_others() -> None:
    mine, others = Stand(waits=True, begun={"all": 3, "0-1": 9}), Stand(waits=True, begun={"all": 4, "2-3": 1})
    assert Processes().pass_time(100, mine, others) == ""


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("stands", "said"),
    [
        (
            [COMPUTING, IN_STEP, IN_STEP],
            "for process 0 in what 0 does: process 1 in what 1 does, process 2 in what 2 does",
        ),
        (
            [IN_STEP, COMPUTING, IN_STEP],
            "for process 1 in what 1 does: process 0 in what 0 does, process 2 in what 2 does",
        ),
        ([IN_STEP, IN_STEP, IN_STEP], "for one another, or for the network: process 0 in what 0 does"),
    ],
)
def test_a_long_wait_is_one_line_after_30_seconds_and_few_more(
    stands: Sequence[Stand], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "accmt")
    processes = Processes(3)
    assert processes.pass_time(29, *stands) == ""
    assert warnings_of(caplog) == []
    assert processes.pass_time(4, *stands) == ""
    [line] = warnings_of(caplog)
    assert line.startswith("waiting for 30 s ")
    assert said in line
    assert processes.pass_time(3000, *stands) == ""
    assert len(warnings_of(caplog)) == 3
