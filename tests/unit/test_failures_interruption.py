"""The wish that a run ends: where it is heard, and how processes agree on the point."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
import torch.distributed as dist

from accmt.errors import ProcessFailedError
from accmt.failures import Board, Clock, Interruption, Reason, is_consequence
from tests.tables import each

PREEMPT, FINISH = Reason("SIGTERM", "preempt"), Reason("max_time", "finish")


def test_a_wish_to_finish_ends_training_once_and_a_signal_counts_more():
    interruption = Interruption(is_listening=True)
    interruption.request(FINISH)
    assert interruption.pass_point() is None
    assert (interruption.ends_training, interruption.ended_by) == (True, "max_time")
    interruption.request(FINISH)
    interruption.request(PREEMPT)
    assert interruption.pass_point() == PREEMPT


class Process(threading.Thread):
    """Passes points in step with others, as training does, and takes part in the agreement in another thread."""

    def __init__(self, board: Board, barrier: threading.Barrier, rng: random.Random) -> None:
        super().__init__(name="ThreadPoolExecutor-process")
        self.interruption = Interruption(is_listening=True, board=board)
        self.barrier, self.delays = barrier, [rng.uniform(0, 0.002) for _ in range(400)]
        self.left_at: int | None = None
        self.agent = threading.Thread(target=self.agree, name="ThreadPoolExecutor-agent")

    def agree(self) -> None:
        while self.is_alive() and self.left_at is None:
            self.interruption.agree()
            time.sleep(0.001)

    def run(self) -> None:
        self.agent.start()
        for point, delay in enumerate(self.delays):
            self.barrier.wait(10)  # as gradients are reduced: nobody gets ahead by a whole update
            time.sleep(delay)
            if self.interruption.pass_point() is not None:
                self.left_at = point
                return
        self.left_at = -1


@each("seed", range(5))
def test_processes_in_step_leave_at_the_same_point_whenever_one_is_asked(seed):
    rng, store = random.Random(seed), dist.HashStore()
    barrier = threading.Barrier(3)
    processes = [Process(Board(store, index, 3), barrier, rng) for index in range(3)]
    for process in processes:
        process.start()
    time.sleep(rng.uniform(0, 0.1))
    rng.choice(processes).interruption.request(PREEMPT)
    for process in processes:
        process.join(20)
        process.agent.join(5)
    assert len({process.left_at for process in processes}) == 1
    assert processes[0].left_at not in (None, -1)


def test_where_all_ask_at_the_same_point_all_end_there_however_late_they_agree():
    store = dist.HashStore()
    processes = [Interruption(is_listening=True, board=Board(store, index, 2)) for index in range(2)]
    for one in processes:
        assert one.pass_point() is None
        one.request(FINISH)
    passing = [threading.Thread(target=one.pass_point) for one in processes]
    for thread in passing:
        thread.start()
    for one in processes * 2:
        one.agree()
    for thread in passing:
        thread.join()
    assert [one.ends_training for one in processes] == [True, True]


def test_a_signal_after_the_agreement_to_finish_is_not_lost():
    store = dist.HashStore()
    first, second = (Interruption(is_listening=True, board=Board(store, index, 2)) for index in range(2))
    first.request(FINISH)
    for one in (first, second, first):
        one.agree()
    first.request(PREEMPT)
    assert [one.pass_point() for one in (first, second)] == [None, None]
    assert (first.ends_training, second.ends_training) == (True, True)
    for one in (first, second, first):
        one.agree()
    assert [one.pass_point() for one in (first, second)] == [PREEMPT, PREEMPT]


def test_a_process_that_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setattr("accmt.failures.interruption.ANSWER_S", 0.05)
    interruption = Interruption(is_listening=True, board=Board(dist.HashStore(), 0, 2))
    interruption.request(PREEMPT)
    interruption.agree()
    with pytest.raises(ProcessFailedError, match="did not answer within"):
        interruption.pass_point()


def test_the_board_shows_notes_news_and_who_lives():
    store = dist.HashStore()
    first, second = Board(store, 0, 2), Board(store, 1, 2)
    assert not first.has_news()
    second.post("topic", {"a": [1, None]})
    assert first.has_news()
    assert not first.has_news()
    assert first.read("topic") == {1: {"a": [1, None]}}
    first.beat()
    assert [second.beats_of(0), second.beats_of(1)] == [1, 0]
    assert [first.draw_ticket(), second.draw_ticket()] == [1, 2]


def raised_by(action):
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever it raises
        return error
    raise AssertionError("nothing was raised")


def user_code(text):
    raise RuntimeError(text)


def wrapped(action):
    try:
        action()
    except RuntimeError as error:
        raise ValueError("what the user makes of it") from error


@pytest.fixture
def of_collective():
    """Return a function whose code lies where torch.distributed's does, and in which C++ raises."""
    names = {"torch": torch}
    exec(compile("def f(): torch.ones(2) @ torch.ones(3)", "site-packages/torch/distributed/x.py", "exec"), names)  # noqa: S102
    return names["f"]


def test_what_an_error_says_does_not_make_it_the_consequence_of_another(of_collective):
    texts = ["gloo: Connection closed by peer", "the feature server closed the socket", "NCCL error", "broken pipe"]
    assert not any(is_consequence(raised_by(lambda text=text: user_code(text))) for text in texts)
    assert is_consequence(RuntimeError("gloo: never raised")) is None
    assert is_consequence(ValueError("of the user")) is False
    assert is_consequence(raised_by(of_collective)) is True
    assert is_consequence(raised_by(lambda: wrapped(of_collective))) is True
    assert is_consequence(dist.DistBackendError("NCCL error")) is True
    assert is_consequence(raised_by(lambda: torch.ones(2) @ torch.ones(3))) is None


def test_a_clock_counts_on_from_where_it_was():
    clock = Clock(limit_s=10)
    assert not clock.is_used_up
    clock.load_state_dict({"elapsed_s": 11.0})
    assert clock.is_used_up
    assert clock.state_dict()["elapsed_s"] >= 11
    assert not Clock().is_used_up
