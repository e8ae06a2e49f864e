"""Machines that do not see one disk are found before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accmt.errors import SavingError
from accmt.failures.board import Machine
from accmt.setup import same_on_processes
from tests.toys import make_trainer

MACHINES = [Machine("here", 0), Machine("there", 2)]


@pytest.fixture
def on_two_machines(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let the process be one of four on two machines; the list says what the others see of what it writes."""
    others = [True, True, True]
    monkeypatch.setattr(same_on_processes, "num_processes", lambda: 4)
    monkeypatch.setattr(same_on_processes, "find_machines", lambda: MACHINES)
    monkeypatch.setattr(same_on_processes, "gather_objects", lambda own: [own, *others])
    monkeypatch.setattr(same_on_processes, "_WAIT_S", 0.0)
    return others


def check(folder: Path, **settings: Any) -> None:
    same_on_processes.require_shared_disk(make_trainer(model_path=str(folder / "model"), **settings).settings)


@pytest.mark.feature("L108")
def test_a_machine_that_does_not_see_the_folder_is_named(on_two_machines: list[bool], tmp_path: Path) -> None:
    check(tmp_path)
    on_two_machines[1] = False
    with pytest.raises(SavingError) as caught:
        check(tmp_path)
    said = str(caught.value)
    assert said.startswith(f"folder {tmp_path / 'model'}\n  got: there (process 2) does not see what here (process 0)")
    assert list(tmp_path.iterdir()) == [], "nothing of the check is left"


@pytest.mark.usefixtures("on_two_machines")
def test_the_folder_of_the_checkpoints_is_looked_at_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[Path] = []
    write = same_on_processes._write_probe

    def note(folder: Path) -> Path | None:
        written.append(folder)
        return write(folder)

    monkeypatch.setattr(same_on_processes, "_write_probe", note)
    check(tmp_path)
    check(tmp_path, checkpoint_every="1 steps", checkpoint=str(tmp_path / "kept"))
    assert written == [tmp_path / "model", tmp_path / "model", tmp_path / "kept"]


@pytest.mark.usefixtures("on_two_machines")
def test_this_machine_may_be_the_one_that_sees_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(same_on_processes, "run_on_main_process", lambda action: tmp_path / "on another disk")
    with pytest.raises(SavingError, match=r"here \(process 0\) does not see"):
        check(tmp_path)


def test_what_appears_late_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "late"
    monkeypatch.setattr(same_on_processes.time, "sleep", lambda _: path.touch())
    assert same_on_processes._appears(path)


@pytest.mark.usefixtures("on_two_machines")
def test_a_folder_that_nobody_can_write_to_is_left_to_whoever_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "touch", fail)
    check(tmp_path)


def test_one_machine_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(same_on_processes, "num_processes", lambda: 2)
    monkeypatch.setattr(same_on_processes, "_write_probe", lambda folder: pytest.fail("a probe was written"))
    check(tmp_path)
