import json

import pytest

from tests.launching import SCRIPTS, launch


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    path = tmp_path_factory.mktemp("processes") / "result.json"
    launch(SCRIPTS / "processes.py", str(path), processes=2, result=path)
    return json.loads(path.read_text())


def of_both(answers, name):
    return [answer[name] for answer in answers]


def test_two_processes_know_their_places(answers):
    assert of_both(answers, "num_processes") == [2, 2]
    assert of_both(answers, "process_index") == [0, 1]
    assert of_both(answers, "is_main_process") == [True, False]


def test_sums_are_those_of_all_in_double_precision(answers):
    assert of_both(answers, "sums") == [[3.0, 0.2, 2e15 + 1]] * 2
    assert of_both(answers, "no_sums") == [[], []]


def test_objects_are_gathered_in_the_order_of_ranks_and_handed_on_from_the_main_process(answers):
    assert of_both(answers, "gathered") == [[{"rank": 0}, {"rank": 1}]] * 2
    assert of_both(answers, "broadcast") == [["of", 0]] * 2


def test_tensors_of_unequal_length_are_gathered_whole_or_in_chunks(answers):
    rows = [[0.0], [1.0], [2.0], [10.0], [11.0], [12.0], [13.0], [14.0]]
    assert of_both(answers, "rows") == [[rows] * 4] * 2


def test_the_main_process_acts_alone_and_all_get_the_result(answers):
    assert of_both(answers, "on_main") == ["done", "done"]
    assert of_both(answers, "acted") == [["acted"], []]


def test_an_error_of_the_main_process_is_raised_on_both(answers):
    assert of_both(answers, "plain_error") == ["ValueError: wrong"] * 2


@pytest.mark.parametrize(
    ("name", "own"), [("awkward_error", "AwkwardError: wrong 3"), ("unpicklable_error", "OSError: the disk is full")]
)
def test_an_error_that_cannot_travel_is_raised_on_both_all_the_same(answers, name, own):
    assert of_both(answers, name) == [own, f"RuntimeError: on the main process: {own}"]


def test_each_process_acts_and_all_get_every_result(answers):
    assert of_both(answers, "on_every") == [[0, 10], [0, 10]]


def test_an_error_of_one_process_is_raised_on_both(answers):
    own = "AwkwardError: wrong 3"
    assert of_both(answers, "error_of_the_second") == ["ValueError: wrong"] * 2
    assert of_both(answers, "awkward_error_of_the_second") == [f"RuntimeError: on process 1: {own}", own]


def test_a_result_that_cannot_travel_is_an_error_on_both(answers):
    assert of_both(answers, "has_unpicklable_value_error") == [True, True]


def test_after_errors_the_processes_are_still_in_step(answers):
    assert of_both(answers, "in_step_afterwards") == [[0, 1]] * 2


@pytest.mark.parametrize("name", ["sampler", "loader"])
def test_generators_with_another_seed_on_each_process_neither_repeat_nor_lose_a_sample(answers, name):
    first, second = (answer["read"][name] for answer in answers)
    assert sorted(first + second) == list(range(13))


@pytest.fixture(scope="module")
def answers_on_gpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("host_numbers") / "result.json"
    launch(SCRIPTS / "host_numbers.py", str(path), processes=2, result=path)
    return json.loads(path.read_text())


def test_what_is_in_host_memory_does_not_go_through_a_group_of_gpus(answers_on_gpus):
    first, second = answers_on_gpus["first"]
    assert "No backend type associated with device type cpu" in first["refusal"]
    assert first["devices"] == second["devices"] == ["cpu"]
    same = {"sums": [3.0, 0.2], "gathered": [0, 1], "broadcast": ["of", 0], "on_main": 0, "on_every": [0, 1]}
    for own in (first, second):
        assert {name: own[name] for name in same} == same
        # Weights of 3 + 4 and of 4 + 5; the reference is 1, then the mean weight of the four batches before.
        assert own["windows"] == [[2 * 1.0 / 7, 12], [2 * (7 / 4) / 9, 12]]


def test_a_group_that_ended_is_not_used_for_the_next(answers_on_gpus):
    assert answers_on_gpus["next"] == [[2.0], [2.0]]
