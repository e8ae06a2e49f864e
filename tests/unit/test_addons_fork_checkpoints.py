"""A checkpoint that is copied to another run: the same state, another name, and nothing shared with the first run."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from accmt.addons.fork import fork_checkpoint
from accmt.checkpoint.manifest import Checkpoint, examine
from accmt.errors import CheckpointCorruptError
from accmt.tracking import read_history
from tests.raising import raises_at
from tests.toys import Linear, make_points, make_trainer

ADAM = {"epochs": 2, "batch_size": 2, "optim": {"type": "AdamW", "lr": 0.1}}


def train(folder: Path, name: str, hps: dict[str, Any] | None = None, **arguments: Any) -> Linear:
    module = Linear()
    often = {"checkpoint_every": "3 steps", "checkpoint_options": {"max_checkpoints": 9}}
    trainer = make_trainer(
        hps or ADAM,
        str(folder / name),
        logging_dir=folder / "logs",
        track_name="toys",
        run_name=name,
        seed=5,
        ledger={"every": 1},
        **{**often, **arguments},
    )
    trainer.fit(module, make_points())
    return module


def weights_of(module: Linear) -> list[torch.Tensor]:
    return list(module.model.state_dict().values())


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Linear]:
    folder = tmp_path_factory.mktemp("parent")
    return folder, train(folder, "parent")


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("name", "can_link"), [("fork", True), ("parent", False)])
def test_a_run_continues_from_the_copy_under_its_own_name(
    parent: tuple[Path, Linear], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, can_link: bool
) -> None:
    folder, module = parent
    if not can_link:

        def refuse(*_: Any) -> None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

        monkeypatch.setattr("os.link", refuse)
    before = content_of(folder)
    source = folder / "checkpoint-parent" / "step-00000003"
    copy = fork_checkpoint(source, tmp_path / f"checkpoint-{name}", run_name=name)
    tensors = "tensors-00001-of-00001.safetensors"
    assert (copy / tensors).samefile(source / tensors) is can_link
    found = examine(copy)
    assert isinstance(found, Checkpoint)
    assert found.info["run_name"] == name
    assert found.info["forked_from"] == {"run_name": "parent", "step": 3, "checkpoint": str(source)}
    fork = train(tmp_path, name, resume=True)
    assert all(map(torch.equal, weights_of(fork), weights_of(module)))  # nothing was changed
    rows = read_history(tmp_path / "logs" / "toys" / name)
    assert not any("rewind" in row for row in rows)  # a new run
    steps = [row["step"] for row in rows if "values" in row]
    assert min(steps) == 4
    assert max(steps) == 8
    changed = train(tmp_path, name, {**ADAM, "epochs": 3}, resume=True)
    assert not torch.equal(weights_of(changed)[0], weights_of(module)[0])
    assert content_of(folder) == before


def test_what_cannot_be_copied_leaves_nothing_behind(parent: tuple[Path, Linear], tmp_path: Path) -> None:
    source = tmp_path / "step-00000003"
    with pytest.raises(FileNotFoundError):
        fork_checkpoint(source, tmp_path / "fork", run_name="fork")
    fork_checkpoint(parent[0] / "checkpoint-parent" / "step-00000003", tmp_path, run_name="parent")
    tensors = source / "tensors-00001-of-00001.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.unlink()  # which is a link to the parent's
    tensors.write_bytes(content)
    with raises_at(CheckpointCorruptError, "step-00000003", "tensors-00001-of-00001.safetensors"):
        fork_checkpoint(source, tmp_path / "fork", run_name="fork")
    (source / "manifest.json").write_text("{")
    with raises_at(CheckpointCorruptError, "step-00000003", "manifest.json", do="accmt check"):
        fork_checkpoint(source, tmp_path / "fork", run_name="fork")
    assert list((tmp_path / "fork").iterdir()) == []
