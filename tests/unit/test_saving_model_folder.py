"""The model of another run is kept beside the folder that a run saves to, whole, and once."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from accmt.saving import RUN_KEY, keep_previous, load_weights, read_status, save_weights, write_status
from tests.faults.injection import SimulatedKill, injected, simulated_kill_at

MODEL, PREVIOUS = Path("out/m"), Path("out/m.previous")


def save(value: float, run_id: str, folder: Path = MODEL, *more: str) -> Path | None:
    """Save a model of one value as a run does, and return where the one before it is kept."""
    kept = keep_previous(folder, run_id)
    saved = save_weights({"weight": torch.full((1, 2), float(value))}, folder)
    write_status(folder, {RUN_KEY: run_id, "files": [*saved.files, *more]})
    return kept


def value_in(folder: Path) -> float:
    model = nn.Linear(2, 1, bias=False)
    load_weights(model, folder)
    return model.weight.mean().item()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_model_of_another_run_is_kept_and_that_of_the_own_run_replaced():
    assert save(1, "a") is None
    assert save(2, "a") is None
    assert not PREVIOUS.exists()
    assert save(3, "b") == PREVIOUS.absolute()
    assert save(4, "b") is None
    assert (value_in(MODEL), value_in(PREVIOUS)) == (4, 2)
    assert names_in(MODEL) == ["model.safetensors", "status.json"]
    assert names_in(PREVIOUS) == ["model.safetensors", "replaced_by.json", "status.json"]


def test_weights_that_are_a_link_are_kept_themselves():
    save(1, "a", MODEL / "best")
    (MODEL / "model.safetensors").symlink_to("best/model.safetensors")
    assert save(2, "b") == PREVIOUS.absolute()
    assert value_in(PREVIOUS) == 1


def test_an_index_that_cannot_be_read_is_kept_as_it_is():
    MODEL.mkdir(parents=True)
    (MODEL / "model.safetensors.index.json").write_text("{")
    keep_previous(MODEL, "b")
    assert (PREVIOUS / "model.safetensors.index.json").read_text() == "{"


def test_keeping_changes_nothing_in_the_folder_and_takes_no_room():
    save(1, "a")
    before = {path.name: path.stat().st_ino for path in MODEL.iterdir()}
    keep_previous(MODEL, "b")
    assert {path.name: path.stat().st_ino for path in MODEL.iterdir()} == before
    assert before["model.safetensors"] == (PREVIOUS / "model.safetensors").stat().st_ino


def test_where_files_cannot_be_linked_they_are_copied(monkeypatch):
    def refuse(*paths):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    save(1, "a")
    save(2, "b")
    assert (value_in(MODEL), value_in(PREVIOUS)) == (2, 1)


def test_where_nothing_can_be_put_beside_the_folder_it_is_kept_inside(folders_are_disks):
    for number, run_id in enumerate("abc"):
        save(number, run_id)
    assert [value_in(MODEL / name) for name in (".", "previous", "previous-2")] == [2, 0, 1]
    assert names_in(Path("out")) == ["m"]


def test_a_folder_of_that_name_that_was_not_made_here_stays():
    save(0, "of the user", PREVIOUS)
    for number, run_id in enumerate("abc", start=1):
        save(number, run_id)
    ends = ("", ".previous", ".previous-2", ".previous-3")
    assert [value_in(Path(f"out/m{end}")) for end in ends] == [3, 0, 1, 2]


def test_what_the_status_lists_is_kept_and_other_models_in_the_folder_are_not():
    (MODEL / "templates").mkdir(parents=True)
    (MODEL / "templates" / "chat").write_text("of the model")
    save(1, "a", MODEL, "templates/chat", "/etc/hosts", "../secret", "gone")
    save(2, "a", MODEL / "last")
    Path("out/secret").touch()
    save(3, "b")
    assert names_in(PREVIOUS) == ["model.safetensors", "replaced_by.json", "status.json", "templates"]
    assert (PREVIOUS / "templates" / "chat").read_text() == "of the model"
    assert save(4, "b", MODEL / "last") == (MODEL / "last.previous").absolute()


@pytest.mark.parametrize("status", ["[]", "{", '{"files": 3, "run_id": 1}', '{"files": [3]}'])
def test_a_pretrained_model_with_the_status_of_somebody_else_is_kept(status):
    save(1, "a")
    (MODEL / "status.json").write_text(status)
    assert save(2, "b") == PREVIOUS.absolute()
    assert value_in(PREVIOUS) == 1


def test_a_link_to_a_folder_keeps_it_beside_what_it_leads_to():
    save(1, "a", Path("disk/m"))
    Path("link").symlink_to("disk/m")
    assert save(2, "b", Path("link")) == Path("disk/m.previous").absolute()


def test_a_kill_at_any_moment_leaves_both_models_and_the_run_that_goes_on_keeps_the_same_one():
    for point in itertools.count():
        folder = Path(f"out/{point}")
        previous = folder.with_name(f"{point}.previous")
        save(1, "a", folder)
        with contextlib.suppress(SimulatedKill), injected(simulated_kill_at(point)) as operations:
            save(2, "b", folder)
        found = value_in(folder)
        assert found == 1 or (found, value_in(previous)) == (2, 1)
        save(3, "b", folder)
        assert (value_in(folder), value_in(previous)) == (3, 1)
        assert names_in(folder) == ["model.safetensors", "status.json"]
        assert not folder.with_name(f"{point}.previous-2").exists()
        if len(operations.trace) <= point:
            break
    assert point > 20


def test_status_that_json_cannot_hold_leaves_the_old_one(tmp_path):
    write_status(tmp_path, {"epoch": 1})
    with pytest.raises(TypeError, match="object"):
        write_status(tmp_path, {"epoch": object()})
    assert read_status(tmp_path)["epoch"] == 1
    assert names_in(tmp_path) == ["status.json"]
