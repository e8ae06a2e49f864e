"""Machines that do not see one disk are found before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accmt import processes
from accmt.addons import separate_disks
from accmt.addons.machines import Machine
from accmt.errors import SavingError
from tests.raising import raises_at
from tests.toys import make_trainer

MACHINES = [Machine("here", (0, 1)), Machine("there", (2, 3)), Machine("beyond", (4,))]
SHARED = [0, 0, 0]
URLS = {"model_path": "s3://bucket/model", "checkpoint": "s3://bucket/run", "checkpoint_every": "1 step"}


@pytest.fixture
def on_machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let this be the main process of five on three machines; the list is the first process whose file each sees."""
    seen = list(SHARED)

    def gather(own: Any) -> list[Any]:
        if isinstance(own, int):
            return [own, 0, seen[1], 0, seen[2]]
        return [own, None, Path("theirs"), None, Path("beyond")]

    monkeypatch.setattr(separate_disks, "find_machines", lambda: MACHINES)
    monkeypatch.setattr(separate_disks, "gather_objects", gather)
    monkeypatch.setattr(separate_disks, "_WAIT_S", 0.0)
    yield seen
    processes.separate_disks([])


def find(folder: Path, **settings: Any) -> list[int]:
    """Return which process manages the disk of each."""
    separate_disks.find_disks(make_trainer(**{"model_path": str(folder / "model"), **settings}).settings)
    return list(processes._disk_managers)


def test_a_machine_that_does_not_see_the_folder_is_named(on_machines: list[int], tmp_path: Path) -> None:
    assert find(tmp_path) == []
    on_machines[1] = 2
    with pytest.raises(SavingError) as caught:
        find(tmp_path)
    said = str(caught.value)
    assert said.startswith(f"folder {tmp_path / 'model'}\n  got: there (process 2) does not see what here (process 0)")
    assert "or pass URLs as both" in said
    assert list(tmp_path.iterdir()) == [], "nothing of the check is left"


@pytest.mark.parametrize(
    ("seen", "managers"),
    [([0, 2, 0], [0, 0, 2, 2, 0]), ([0, 2, 4], [0, 0, 2, 2, 4]), ([0, 2, 2], [0, 0, 2, 2, 2]), (SHARED, [])],
)
def test_with_urls_machines_may_have_separate_disks(
    on_machines: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seen: list[int], managers: list[int]
) -> None:
    monkeypatch.chdir(tmp_path)
    on_machines[:] = seen
    assert find(tmp_path, **URLS) == managers
    assert list(tmp_path.iterdir()) == []


def test_a_url_for_checkpoints_alone_is_not_enough(on_machines: list[int], tmp_path: Path) -> None:
    on_machines[1] = 2
    with raises_at(SavingError, f"folder {tmp_path / 'model'}"):
        find(tmp_path, checkpoint="s3://bucket/run", checkpoint_every="1 step")
    with raises_at(SavingError, "/checkpoint-model"):
        find(tmp_path, model_path="s3://bucket/model", checkpoint_every="1 step")


def test_a_machine_that_sees_the_second_one_late_shares_the_first(on_machines: list[int], tmp_path: Path) -> None:
    on_machines[:] = [0, 0, 2]
    assert find(tmp_path) == []


@pytest.mark.usefixtures("on_machines")
def test_the_folder_of_the_checkpoints_is_looked_at_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[Path] = []
    write = separate_disks._write_probe

    def note(folder: Path) -> Path | None:
        written.append(folder)
        return write(folder)

    monkeypatch.setattr(separate_disks, "_write_probe", note)
    find(tmp_path, checkpoint_every="1 steps", checkpoint=str(tmp_path / "kept"))
    assert written == [tmp_path / "model", tmp_path / "kept"]


def test_what_appears_late_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "late"
    monkeypatch.setattr(separate_disks.time, "sleep", lambda _: path.touch())
    assert separate_disks._appears(path, 10.0)


@pytest.mark.usefixtures("on_machines")
def test_a_folder_that_nobody_can_write_to_is_left_to_whoever_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "touch", fail)
    assert find(tmp_path) == []


def test_one_machine_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(separate_disks, "_write_probe", lambda folder: pytest.fail("a probe was written"))
    assert find(tmp_path) == []
