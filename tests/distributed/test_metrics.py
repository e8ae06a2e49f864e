"""Metrics over several processes: the values of one process, whatever the number of samples."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed.scripts.metrics import LENGTHS
from tests.distributed.scripts.sample_indices import BAD, SAMPLES
from tests.launching import SCRIPTS, launch

SEVERAL = (3,)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Return what each process answered, by the number of processes."""
    answers = {}
    for processes in (1, *SEVERAL):
        path = tmp_path_factory.mktemp("metrics") / "result.json"
        launch(SCRIPTS / "metrics.py", str(path), processes=processes, result=path)
        answers[processes] = json.loads(path.read_text())
    return answers


@pytest.mark.parametrize("processes", SEVERAL)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_value_is_that_of_one_process(answers, processes, length):
    expected = answers[1][0]["values"][str(length)]
    assert len(expected) == 35
    for answer in answers[processes]:
        assert answer["values"][str(length)] == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize("processes", [1, *SEVERAL])
@pytest.mark.parametrize("kind", ["tensors", "arrays", "dicts", "lists_of_dicts", "strings"])
def test_a_metric_sees_the_samples_in_the_order_of_the_data(answers, processes, kind):
    for length in LENGTHS:
        expected = sum((place + 1) * place for place in range(length))
        assert answers[processes][0]["values"][str(length)][f"order_of_{kind}"] == expected


@pytest.mark.parametrize("processes", [1, *SEVERAL])
def test_a_second_evaluation_begins_anew(answers, processes):
    for answer in answers[processes]:
        assert answer["again"] == pytest.approx(answer["values"][str(LENGTHS[-1])], rel=1e-12)


@pytest.mark.parametrize("processes", SEVERAL)
def test_a_metric_that_fails_on_the_main_process_fails_on_all(answers, processes):
    assert [answer["failing"] for answer in answers[processes]] == ["computed by process 0"] * processes


@pytest.mark.parametrize("processes", [1, *SEVERAL])
def test_a_metric_that_no_process_has_anything_for_is_an_error_on_all(answers, processes):
    assert all("no predictions; validation_step returned []" in answer["nothing"] for answer in answers[processes])


@pytest.mark.parametrize("processes", SEVERAL)
def test_a_state_that_is_averaged_without_regard_to_samples_is_refused(answers, processes):
    assert answers[1][0]["averaged"] == "no error"
    assert all("'total' is averaged over processes" in answer["averaged"] for answer in answers[processes])


@pytest.mark.parametrize("processes", SEVERAL)
def test_what_is_gathered_goes_to_the_main_process_only(answers, processes):
    main, *others = [answer["gathered"] for answer in answers[processes]]
    assert main == [list(range(3 * process)) for process in range(processes)]
    assert others == [[]] * (processes - 1)


@pytest.mark.parametrize("processes", [1, *SEVERAL])
def test_every_size_of_chunks_gives_the_same_bits(answers, processes):
    for answer in answers[processes]:
        assert [json.dumps(values) for values in answer["chunked"]] == [json.dumps(answer["again"])] * 3


@pytest.mark.parametrize("kind", ["ErrorOfProcess", "ErrorOfBatch"])
@pytest.mark.parametrize("processes", SEVERAL)
def test_values_of_uneven_processes_weigh_their_samples(answers, processes, kind):
    ranks = range(1, processes)
    mean = sum(rank**3 for rank in ranks) / sum(rank**2 for rank in ranks)
    expected = {"mean": mean, "sum": sum(ranks), "max": processes - 1, "min": 1}
    for answer in answers[processes]:
        for reduction, value in expected.items():
            assert answer["uneven"][f"{kind}_{reduction}"] == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("processes", SEVERAL)
def test_a_metric_that_fails_on_one_process_fails_on_all(answers, processes):
    found = [answer["failing_on_one"] for answer in answers[processes]]
    assert found == [f"computed by process {processes - 1}"] * processes


def test_a_step_knows_the_place_of_each_sample_in_the_data(tmp_path) -> None:
    path = tmp_path / "result.json"
    launch(SCRIPTS / "sample_indices.py", str(path), str(tmp_path), processes=3, result=path)
    answers = json.loads(path.read_text())
    assert answers.pop("stream") == "none"
    indices = set(range(SAMPLES))
    for name, (right, total, are_right) in answers.items():
        expected = indices - set(BAD) if name.startswith("bad") else indices
        assert (right, total, are_right) == (len(expected), sum(expected), True), name
