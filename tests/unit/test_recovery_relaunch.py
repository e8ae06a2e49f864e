"""A run that its launcher starts again continues from its newest checkpoint, and no other run does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accmt.run import restart
from accmt.run.restart import describe_launch, is_relaunched
from tests.toys import Linear, make_points, make_trainer

LAUNCHER, OWN = os.getppid(), os.getpid()


class Launches:
    """Lets this process be any process that any launcher has started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._names: dict[int, str] = {}
        monkeypatch.setattr(restart, "_name_process", lambda number: self._names[number])
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")

    def begin(self, process: str, launcher: str) -> None:
        self._names = {OWN: process, LAUNCHER: launcher}


@pytest.fixture
def launches() -> Iterator[Launches]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Launches(monkeypatch)


def steps_of(folder: Path, max_steps: int, **settings: Any) -> list[int]:
    """Train; return the steps that were made."""
    seen: list[int] = []

    class Noting(Linear):
        def on_update_end(self) -> None:
            seen.append(self.state.global_step)

    hps = {"max_steps": max_steps, "epochs": 9}
    trainer = make_trainer(hps, str(folder / "model"), checkpoint_every="2 steps", **settings)
    trainer.fit(Noting(), make_points(32))
    return seen


@pytest.mark.parametrize("resume", [False, None, "auto", True])
def test_a_process_of_the_same_launcher_continues_whatever_resume_says(
    resume: Any, launches: Launches, tmp_path: Path
) -> None:
    launches.begin("first", "launcher")
    assert steps_of(tmp_path, 4) == [1, 2, 3, 4]
    launches.begin("second", "launcher")
    assert steps_of(tmp_path, 6, resume=resume) == [5, 6]
    launches.begin("third", "launcher")
    assert steps_of(tmp_path, 7, resume=resume) == [7]


def test_another_launcher_and_the_same_process_begin_a_new_run(launches: Launches, tmp_path: Path) -> None:
    launches.begin("first", "launcher")
    steps_of(tmp_path, 4)
    assert steps_of(tmp_path, 3) == [1, 2, 3], "a second fit of one program"
    launches.begin("first of the next", "the next launcher")
    assert steps_of(tmp_path, 3) == [1, 2, 3]


def test_a_checkpoint_to_begin_with_is_begun_with_once(launches: Launches, tmp_path: Path) -> None:
    launches.begin("first", "launcher")
    steps_of(tmp_path / "a", 4)
    origin = tmp_path / "a" / "checkpoint-model"
    launches.begin("second", "another launcher")
    assert steps_of(tmp_path / "b", 8, resume=str(origin)) == [5, 6, 7, 8]
    launches.begin("third", "another launcher")
    assert steps_of(tmp_path / "b", 9, resume=str(origin)) == [9]


def test_one_of_several_launchers_is_enough(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launches.begin("first", "launcher")
    monkeypatch.setattr(restart, "gather_objects", lambda own: [own, ("other", "gone")])
    assert describe_launch() == {"process": "first", "launchers": ["gone", "launcher"]}
    steps_of(tmp_path, 4)
    launches.begin("on another machine", "new")
    monkeypatch.setattr(restart, "gather_objects", lambda own: [own, ("second", "launcher")])
    assert steps_of(tmp_path, 5) == [5]


def test_what_is_lost_with_another_machine_comes_from_the_store(launches: Launches, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    launches.begin("first", "launcher")
    steps_of(tmp_path, 4, checkpoint=url)
    for file in (tmp_path / "checkpoint-model" / "step-00000004").glob("*.safetensors"):
        file.unlink()  # it was on the disk of the other machine
    launches.begin("second", "launcher")
    assert steps_of(tmp_path, 6, checkpoint=url) == [5, 6]


def test_without_a_launcher_that_starts_again_nothing_is_looked_for(tmp_path: Path) -> None:
    assert describe_launch() is None
    steps_of(tmp_path, 4)
    assert not is_relaunched(make_trainer(model_path=str(tmp_path / "model"), checkpoint_every="2 steps").settings)
    assert steps_of(tmp_path, 3) == [1, 2, 3]


def test_processes_are_told_apart_also_where_numbers_repeat() -> None:
    assert restart._name_process(OWN) != restart._name_process(LAUNCHER)
    assert restart._name_process(OWN).count("-") >= 2
