"""When a process ends itself because another one failed: where it waits, but not while it computes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from accmt.addons.watch import ProcessWatch
from accmt.errors import Preempted
from accmt.failures import Board, Interruption, record_for_launcher
from tests.tables import each


@contextmanager
def main_thread_in(file: str) -> Iterator[int]:
    """Let a thread stand in code of a file, below a frame of the wrapper as in a forward; give its identity."""
    held = threading.Lock()
    held.acquire()
    names = {"wait": held.acquire}  # a C function has no frame
    exec(compile("def inner(): wait()", file, "exec"), names)  # noqa: S102 - so that its frame has this file
    exec(compile("def outer(): inner()", "site-packages/torch/nn/parallel/distributed.py", "exec"), names)  # noqa: S102
    thread = threading.Thread(target=names["outer"])
    thread.start()
    try:
        assert thread.ident is not None
        yield thread.ident
    finally:
        held.release()
        thread.join()


def end_of_waiting(main_thread: int) -> tuple[int | None, str]:
    """Return after which second a process ends itself that has seen another one fail, and what it says."""
    store, ends = HashStore(), []
    interruption = Interruption(is_listening=True)
    watch = ProcessWatch(Board(store, 0, 2), interruption, hang_timeout_s=None, progress=lambda: 0)
    note = {"text": "broke", "is_consequence": False, "ticket": 1, "progress": "", "kind": None, "was_asked": False}
    Board(store, 1, 2).post("failed", note)
    watch._main_thread, watch._end = main_thread, ends.append
    watch._look_for_failures(0.0)
    try:
        for now in range(100):
            watch._end_if_stuck(now)
            if ends:
                return now, ends[0]
    finally:
        watch._receiver.close()
        watch._sender.close()
    return None, ""


WAITING = ["site-packages/torch/distributed/distributed_c10d.py", "accmt/processes.py", "torch/autograd/graph.py"]


@each("file", [*WAITING, "site-packages/torch/nn/parallel/distributed.py"])
def test_a_process_that_waits_for_one_that_failed_ends_soon(file: str) -> None:
    with main_thread_in(file) as thread:
        second, said = end_of_waiting(thread)
    assert second in (12, 13)  # in a backward the first look has nothing to compare with
    assert "process 1 failed" in said


@pytest.mark.parametrize("file", ["user/model.py", "site-packages/torch/nn/functional.py"])
def test_a_process_that_computes_comes_to_the_end_of_its_step(file: str) -> None:
    with main_thread_in(file) as thread:
        assert end_of_waiting(thread)[0] == 60


def test_the_launcher_is_told_of_the_error_that_came_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    record_for_launcher(ValueError("without a launcher"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    record_for_launcher(KeyboardInterrupt())
    assert not file.exists()
    record_for_launcher(ValueError("broke"))
    assert json.loads(file.read_text())["message"]["message"] == "ValueError: broke"
    monkeypatch.undo()


@each(
    ("consequences", "tickets", "order"),
    [
        ([False, False, False], [3, 1, 2], [1, 2, 0]),
        ([True, False, True], [1, 3, 2], [1, 0, 2]),
        ([False, True, False], [3, 1, 2], [2, 0, 1]),
        ([True, True, True], [2, 3, 1], [2, 0, 1]),
    ],
)
def test_the_first_failure_is_blamed_and_none_that_followed_from_another(
    consequences: list[bool], tickets: list[int], order: list[int]
) -> None:
    store = HashStore()
    watch = ProcessWatch(Board(store, 0, 3), Interruption(is_listening=True), hang_timeout_s=None, progress=lambda: 0)
    for index, (is_consequence, ticket) in enumerate(zip(consequences, tickets, strict=True)):
        Board(store, index, 3).post("failed", {"is_consequence": is_consequence, "ticket": ticket})
    assert list(watch.failures()) == order
    watch._receiver.close()
    watch._sender.close()


@pytest.fixture
def two_watches() -> Iterator[list[ProcessWatch]]:
    store = HashStore()
    interruptions = [Interruption(is_listening=True) for _ in range(2)]
    watches = [
        ProcessWatch(Board(store, index, 2), one, hang_timeout_s=None, progress=lambda: 0)
        for index, one in enumerate(interruptions)
    ]
    yield watches
    for watch in watches:
        watch._receiver.close()
        watch._sender.close()


def test_a_process_that_was_killed_is_found_at_once_and_one_that_left_is_not(two_watches: list[ProcessWatch]) -> None:
    first, second = two_watches
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = {"machine": "here", "pid": os.getpid(), "created": psutil.Process().create_time()}
    first.board.post("process", own)
    second.board.post("process", {**own, "pid": process.pid, "created": psutil.Process(process.pid).create_time()})
    assert first.find_lost() == []
    error = dist.DistBackendError("the connection was reset")
    assert first.find_cause(error) is None
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the list of processes
    assert first.find_lost() == [1]
    assert first.find_cause(error) == (1, "")
    assert first.find_cause(Preempted(143)) == (1, ""), "a launcher ends those that are left"
    assert first.find_cause(ValueError("of this process")) is None
    process.communicate()
    assert first.find_lost() == [1]
    second.board.post("left", note=True)
    assert first.find_lost() == []


def test_an_error_is_explained_only_by_a_failure_that_came_before(two_watches: list[ProcessWatch]) -> None:
    first, second = two_watches
    connection = dist.DistBackendError("the connection was reset")
    first.post_error(connection)
    assert first.find_cause(connection) is None
    second.post_error(ValueError("broke"))
    index, report = first.find_cause(connection) or (None, "")
    assert (index, "ValueError: broke" in report) == (1, True)
    assert second.find_cause(ValueError("broke")) is None


def test_only_errors_of_one_kind_at_one_place_are_alike(two_watches: list[ProcessWatch]) -> None:
    first, second = two_watches
    for kinds, expected in [
        ((False, False), True),
        ((None, None), True),
        ((None, False), False),
        ((True, True), False),
    ]:
        for watch, kind in zip((first, second), kinds, strict=True):
            watch._post_failure("broke", is_consequence=kind)
        assert first.all_failed_alike(1.0) is expected


def test_one_that_was_asked_to_end_explains_no_signal(two_watches: list[ProcessWatch]) -> None:
    first, second = two_watches
    second.post_error(Preempted(143))
    assert first.find_cause(Preempted(143)) is None


def test_a_process_shows_that_it_is_there_before_its_thread_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(HashStore(), 0, 2)
    watch = ProcessWatch(board, Interruption(is_listening=False), hang_timeout_s=None, progress=lambda: 0)
    seen: list[int] = []
    monkeypatch.setattr(watch._thread, "start", lambda: seen.append(board.beats_of(0)))
    monkeypatch.setattr(watch._thread, "join", lambda timeout: None)
    watch.start()
    watch.stop()
    assert seen == [1]
