"""A call that needs every process, and that some make without the others."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore

from accmt.failures import Board
from accmt.failures.lone_calls import LoneCalls


def make_calls(count: int) -> list[LoneCalls]:
    store = HashStore()
    return [LoneCalls(Board(store, index, count)) for index in range(count)]


def read(calls: list[LoneCalls]) -> None:
    for one in calls:
        one.read()


@pytest.mark.parametrize("caller", [0, 1])
def test_a_process_that_waits_while_another_calls_finds_out(caller: int) -> None:
    calls = make_calls(2)
    calls[caller].note("trainer.save_model")
    read(calls)
    other = calls[1 - caller]
    assert [other.find(now, waits=True) for now in range(6)] == [None] * 6
    said = str(other.find(6.0, waits=True))
    assert said.startswith("trainer.save_model\n")
    assert f"call by process {caller}, while process {1 - caller}" in said
    assert calls[caller].find(100.0, waits=True) is None


def test_calls_of_all_are_no_fault_and_a_later_one_is() -> None:
    calls = make_calls(2)
    for one in calls:
        one.note("trainer.validate")
    read(calls)
    assert not any(one.are_open() or one.find(now, waits=True) for one in calls for now in (0.0, 100.0))
    calls[0].note("trainer.save_checkpoint")
    read(calls)
    assert calls[1].find(200.0, waits=True) is None
    assert "trainer.save_checkpoint" in str(calls[1].find(206.0, waits=True))


def test_a_process_that_computes_may_still_come() -> None:
    calls = make_calls(2)
    calls[0].note("trainer.save_model")
    read(calls)
    for now in range(0, 100, 5):
        assert calls[1].find(now, waits=now % 10 == 0) is None


def test_a_process_that_waits_for_a_slow_third_one_may_still_come() -> None:
    calls = make_calls(3)
    calls[0].note("trainer.save_model")
    read(calls)
    assert [calls[1].find(now, waits=True) for now in range(100)] == [None] * 100
    assert calls[2].find(100.0, waits=True) is None
    assert calls[2].find(106.0, waits=True) is not None
