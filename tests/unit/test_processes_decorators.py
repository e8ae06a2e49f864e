"""Functions that act on one process only, before a process group is there. With one: tests/unit/test_processes.py."""

from __future__ import annotations

import pytest

import accmt
from accmt.errors import ProcessFailedError
from accmt.processes import serving


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ({}, ["on_main_process", "on_local_main_process", "on_last_process"]),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}, ["on_main_process", "on_local_main_process"]),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, []),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}, ["on_local_main_process"]),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, ["on_last_process"]),
    ],
    ids=str,
)
def test_a_function_acts_on_its_process_only(monkeypatch, place, names):
    acted = []
    decorated = {
        name: getattr(accmt, name)(lambda name=name: acted.append(name))
        for name in ("on_main_process", "on_local_main_process", "on_last_process")
    }
    with monkeypatch.context() as launched:
        for variable, value in place.items():
            launched.setenv(variable, value)  # after decorating: where a function acts is decided at the call
        for function in decorated.values():
            function()
    assert acted == names


def test_arguments_go_in_and_the_result_comes_out_or_none(monkeypatch):
    @accmt.on_main_process
    def add(a: int, *, b: int) -> int:
        """Add."""
        return a + b

    assert add(1, b=2) == 3
    assert add.__doc__ == "Add."
    with monkeypatch.context() as launched:
        launched.setenv("RANK", "1")
        assert add(1, b=2) is None


def test_a_call_that_another_process_cannot_answer_any_more_is_named(monkeypatch):
    def end(*_):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("accmt.processes.num_processes", lambda: 2)
    monkeypatch.setattr("accmt.processes._gather_bytes", end)
    said = "trainer.validate\n  got: another process has exited: Connection closed"
    with pytest.raises(ProcessFailedError, match=said), serving("trainer.validate"):
        pass
