"""Two processes train together while their threads publish checkpoints together."""

from __future__ import annotations

import json

import pytest

from tests.launching import SCRIPTS, launch


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    base = tmp_path_factory.mktemp("writer")
    result = base / "result.json"
    launch(SCRIPTS / "checkpoint_writer.py", str(base / "ck"), str(result), processes=2, result=result)
    return json.loads(result.read_text())


def test_a_group_of_its_own_serves_every_exchange(answers):
    assert [answer["gathered"] for answer in answers] == [[0, 1]] * 2
    assert [answer["broadcast"] for answer in answers] == [0, 0]
    assert [answer["on main"] for answer in answers] == [0, 0]


def test_training_is_right_while_threads_publish(answers):
    assert all(answer["trained"]["sums are right"] for answer in answers)
    assert [answer["trained"]["failures"] for answer in answers] == [0, 0]


def test_every_checkpoint_holds_the_moment_of_its_save(answers):
    assert [answer["trained"]["exact"] for answer in answers] == [[True] * 20] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_in_one_thread_is_told_on_both_processes_and_the_next_save_succeeds(answers, rank):
    first, second = (answer[f"failed on {rank}"] for answer in answers)
    assert len(first) == 1
    assert first == second
    assert f"on process {rank}: OSError: [Errno 28] No space left on device" in first[0]
    assert all(answer[f"saved after {rank}"] for answer in answers)
