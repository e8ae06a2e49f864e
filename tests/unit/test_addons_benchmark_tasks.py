"""`evaluation: {tasks: ...}` as far as it needs no harness; `make tasks` has the rest."""

from __future__ import annotations

from typing import Any

import pytest

from accmt import Trainer
from accmt.addons.benchmark_tasks import read_tasks
from accmt.errors import HyperParameterError
from tests.raising import raises_at

HPS = {"epochs": 1, "batch_size": 2, "optim": {"type": "SGD", "lr": 0.1}}


@pytest.mark.parametrize(
    ("value", "names", "options"),
    [
        ("hellaswag", ("hellaswag",), {}),
        (["a", "b", "a"], ("a", "b"), {}),
        ({"names": "a", "limit": 0.5, "num_fewshot": 0}, ("a",), {"limit": 0.5, "num_fewshot": 0}),
        ({"names": ["a"], "path": "tasks", "batch_size": 8, "max_length": None}, ("a",), {"batch_size": 8}),
    ],
)
def test_tasks_are_names_with_arguments_of_the_harness(value: Any, names: tuple[str, ...], options: Any) -> None:
    section, faults = read_tasks(value)
    assert faults == []
    assert section is not None
    assert (section.names, section.options, section.every) == (names, options, 1)


@pytest.mark.parametrize(("every", "number"), [("end", None), ("5 evals", 5), (3, 3), ("eval", 1), (None, 1)])
def test_how_often_tasks_run_is_a_number_of_evaluations_or_the_end(every: Any, number: int | None) -> None:
    section, faults = read_tasks({"names": "a", "every": every})
    assert faults == []
    assert section is not None
    assert section.every == number


@pytest.mark.parametrize(
    ("tasks", "key", "got"),
    [
        (3, "", "3 (int)"),
        ({"path": "tasks"}, "", "no `names`"),
        ({"names": ["a"], "limt": 3}, ".limt", "limt = 3"),
        ({"names": ["a"], "limit": 0}, ".limit", "0 (int)"),
        ({"names": ["a"], "batch_size": 0}, ".batch_size", "0 (int)"),
        ({"names": ["a"], "every": "2 epochs"}, ".every", "'2 epochs'"),
        ({"names": ["a"], "path": 3}, ".path", "3 (int)"),
    ],
)
def test_mistakes_in_the_section(tasks: Any, key: str, got: str) -> None:
    with raises_at(HyperParameterError, f"hps_config evaluation.tasks{key}", got):
        Trainer({**HPS, "evaluation": {"tasks": tasks}}, "model")
