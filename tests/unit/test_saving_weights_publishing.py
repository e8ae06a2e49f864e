import os
from pathlib import Path

import pytest

from accmt.saving.weights import list_files, publish, remove_leftovers


def fill(folder, files):
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


@pytest.fixture
def staged(tmp_path):
    (tmp_path / "model" / ".tmp-weights").mkdir(parents=True)
    return tmp_path / "model" / ".tmp-weights"


def test_files_are_durable_before_they_are_visible_and_the_one_that_loaders_start_from_comes_last(staged, monkeypatch):
    """A name that outlives a power cut must not stand for an empty file."""
    fill(staged, ["a.json", "model.safetensors", "z/b.txt"])
    calls, replace = [], type(staged).replace
    name_of = lambda descriptor: Path(f"/proc/self/fd/{descriptor}").readlink().name  # noqa: E731
    move = lambda path, target: calls.append(f"move {path.name}") or replace(path, target)  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append(name_of(descriptor)))
    monkeypatch.setattr(type(staged), "replace", move)
    publish(staged, staged.parent, "model.safetensors")
    assert calls[:3] == ["a.json", "model.safetensors", "b.txt"]
    assert calls[3:5] == ["move a.json", "move b.txt"]
    last = calls.index("move model.safetensors")
    assert set(calls[5:last]) == {"model", "z"}
    assert calls[last + 1] == "model"


def test_everything_that_another_loader_would_start_from_goes(staged):
    folder = staged.parent
    old = ["adapter_config.json", "adapter_model.bin", "adapter_model.safetensors", "pytorch_model.bin"]
    fill(folder, [*old, "model.safetensors.index.json", "pytorch_model.bin.index.json", "mine.bin"])
    fill(staged, ["model.safetensors"])
    publish(staged, folder, "model.safetensors")
    assert list_files(folder) == ["mine.bin", "model.safetensors"]


def test_an_adapter_leaves_no_whole_model_and_no_weights_in_another_form(staged):
    folder = staged.parent
    fill(folder, ["adapter_model.safetensors", "model.safetensors", "config.json"])
    fill(staged, ["adapter_config.json", "adapter_model.bin"])
    publish(staged, folder, "adapter_config.json")
    assert list_files(folder) == ["adapter_config.json", "adapter_model.bin", "config.json"]


def test_leftovers_are_what_was_written_before_and_not_again(tmp_path):
    fill(tmp_path, ["config.json", "tokenizer/vocab.txt", "kept.json", "mine.txt"])
    remove_leftovers(tmp_path, ["config.json", "tokenizer/vocab.txt", "kept.json", "gone.json"], ["kept.json"])
    assert list_files(tmp_path) == ["kept.json", "mine.txt"]


def test_leftovers_outside_the_folder_are_not_touched(tmp_path):
    fill(tmp_path, ["outside.txt", "model/inside.txt"])
    remove_leftovers(tmp_path / "model", ["../outside.txt", str(tmp_path / "outside.txt"), "a/../../outside.txt"], [])
    assert list_files(tmp_path) == ["model/inside.txt", "outside.txt"]


def test_all_files_have_the_permissions_of_new_ones(staged):
    fill(staged, ["a.json", "model.safetensors"])
    (staged / "model.safetensors").chmod(0o600)
    publish(staged, staged.parent, "model.safetensors")
    assert len({(staged.parent / name).stat().st_mode for name in list_files(staged.parent)}) == 1
