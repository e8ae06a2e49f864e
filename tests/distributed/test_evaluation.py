"""`validate`, `test` and `predict` over several processes: the values of one process, each sample once and in order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed.scripts.evaluation import BATCH_SIZE, LENGTHS, OTHER_LENGTH
from tests.launching import SCRIPTS, launch

REPEATS = [pytest.mark.slow, pytest.mark.repeats]
SHARING = ("tpfsdp-4",)  # processes that share each batch
SEVERAL = (3, "fsdp-2", *(pytest.param(way, marks=REPEATS) for way in SHARING))
LAUNCHES = (1, *SEVERAL)

Answers = dict[int | str, list[dict[str, Any]]]


def count_of(launch: int | str) -> int:
    return int(str(launch)[-1])


def num_data_of(launch: int | str) -> int:
    """Return over how many processes the data of a launch are divided."""
    return count_of(launch) // 2 if launch in SHARING else count_of(launch)


class Launches(dict[int | str, list[dict[str, Any]]]):
    """What each process got, by the number of processes; a launch is made when it is asked for."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders

    def __missing__(self, processes: int | str) -> list[dict[str, Any]]:
        folder = self._folders.mktemp("evaluation")
        path = folder / "result.json"
        launch(SCRIPTS / "evaluation.py", str(path), str(folder), processes=processes, result=path)
        self[processes] = json.loads(path.read_text())
        assert len(self[processes]) == count_of(processes)
        return self[processes]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return Launches(tmp_path_factory)


@pytest.mark.parametrize("processes", SEVERAL)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("function", ["validate", "test"])
def test_every_value_is_that_of_one_process(answers: Answers, function: str, length: int, processes: int | str):
    expected = answers[1][0]["lengths"][str(length)][function]
    assert len(expected) == (10 if function == "validate" else 5)
    for answer in answers[processes]:
        assert answer["lengths"][str(length)][function] == pytest.approx(expected, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("processes", LAUNCHES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("function", ["validate", "test"])
def test_every_value_is_the_same_with_a_budget_of_tokens(
    answers: Answers, function: str, length: int, processes: int | str
):
    expected = answers[1][0]["lengths"][str(length)][function]
    for answer in answers[processes]:
        assert answer["lengths"][f"{length} cut"][function] == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("cut", ["", " cut"])
@pytest.mark.parametrize("processes", LAUNCHES)
@pytest.mark.parametrize("length", LENGTHS)
def test_metrics_see_the_samples_in_their_order(answers: Answers, length: int, processes: int | str, cut: str):
    for answer in answers[processes]:
        values = answer["lengths"][f"{length}{cut}"]["validate"]
        for name, count in (("a", length), ("b", OTHER_LENGTH)):
            assert values[f"in_order__{name}"] == sum((place + 1) * place for place in range(count))


@pytest.mark.parametrize("cut", ["", " cut"])
@pytest.mark.parametrize("processes", LAUNCHES)
@pytest.mark.parametrize("length", LENGTHS)
def test_predictions_are_in_the_order_of_the_data_on_the_main_process_alone(
    answers: Answers, length: int, processes: int | str, cut: str
):
    main, *others = [answer["lengths"][f"{length}{cut}"] for answer in answers[processes]]
    assert main["predict"]["index"] == list(range(length))
    assert main["predict"]["text"] == [f"text {index}" for index in range(length)]
    assert [row[0] for row in main["predict"]["ragged"]] == list(range(length))
    assert [len(part["text"]) for part in main["predict_sets"].values()] == [length, OTHER_LENGTH]
    for other in others:
        assert other["predict"] is None
        assert other["predict_sets"] == {"a": None, "b": None}


@pytest.mark.parametrize("processes", SEVERAL)
def test_every_process_uses_the_main_processs_weights(answers: Answers, processes: int | str):
    for length in map(str, LENGTHS):
        expected = answers[1][0]["lengths"][length]["predict"]["scores"]
        for name in (length, f"{length} cut"):
            scores = answers[processes][0]["lengths"][name]["predict"]["scores"]
            assert sum(scores, []) == pytest.approx(sum(expected, []), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("processes", LAUNCHES)
def test_the_values_of_training_come_again_bit_for_bit_and_from_every_place(answers: Answers, processes: int | str):
    for answer in answers[processes]:
        trained = answer["trained"]
        assert len(trained["again"]) == 4
        assert all(values == trained["logged"] for values in trained["again"].values())
        assert trained["written"] == trained["logged"] == answers[processes][0]["trained"]["logged"]
        assert trained["is_same"]


@pytest.mark.parametrize("processes", LAUNCHES)
def test_data_that_are_cut_otherwise_are_predicted_in_their_order(answers: Answers, processes: int | str):
    otherwise = answers[processes][0]["otherwise"]
    assert otherwise["loader"]["index"] == otherwise["chunked"]["index"] == list(range(9))
    assert otherwise["chunked"] == otherwise["unchunked"]
    assert otherwise["limited"]["index"] == list(range(min(9, BATCH_SIZE * num_data_of(processes))))


@pytest.mark.parametrize("processes", [1, 3, "fsdp-2"])
def test_of_data_that_each_process_has_for_itself_each_processs_stay_together(answers: Answers, processes: int | str):
    expected = [index for process in range(count_of(processes)) for index in range(7 + process)]
    otherwise = answers[processes][0]["otherwise"]
    assert otherwise["alone"]["index"] == otherwise["alone cut"]["index"] == expected


@pytest.mark.parametrize("processes", LAUNCHES)
def test_every_process_is_told_that_weights_are_not_there(answers: Answers, processes: int | str):
    expected = {"best": "validate(ckpt_path='best')"}
    assert [answer["errors"] for answer in answers[processes]] == [expected] * count_of(processes)
