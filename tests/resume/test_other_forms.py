"""Checkpoints whose digests are right, and whose state is not of the structure of this version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accmt import Callback, Trainer
from accmt.checkpoint import manifest as manifests
from accmt.errors import AccmtError, CheckpointError
from tests.toys import Linear, make_points, make_trainer

FOLDER = Path("out/checkpoint-model/step-00000002")


def train(**settings: Any) -> Trainer:
    hps = {"max_steps": settings.pop("max_steps", 3), **settings.pop("hps", {})}
    settings = {
        "checkpoint_every": "1 step",
        "checkpoint_options": {"async_checkpointing": False, "max_checkpoints": 9},
        **settings,
    }
    trainer = make_trainer(hps, failures={"preflight": False}, **settings)
    trainer.fit(Linear(), make_points())
    return trainer


def sign(state: dict[str, Any], manifest: dict[str, Any]) -> None:
    (FOLDER / "state.json").write_text(json.dumps(state))
    entry = manifests.FileEntry.of(FOLDER / "state.json")
    manifest["files"]["state.json"] = {"size": entry.size, "xxh3_64": entry.xxh3_64}
    manifest.pop("manifest_xxh3_64")
    manifest["manifest_xxh3_64"] = manifests._digest(manifests.loads(manifests.dumps(manifest)))
    (FOLDER / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "path",
    [
        "files",
        "model",
        "frozen",
        "optimizers",
        "optimizers.0.param_groups",
        "others",
        "others.seed",
        "others.hps",
        "others.data",
        "others.parts",
        "others.parts.state.global_step",
        "others.lessons",
    ],
)
def test_each_is_an_error_that_names_the_checkpoint(path):
    train(max_steps=2)
    state, manifest = (json.loads((FOLDER / f"{name}.json").read_text()) for name in ("state", "manifest"))
    *parts, last = path.split(".")
    inner = state
    for part in parts:
        inner = inner[int(part) if part.isdigit() else part]
    for change in ("deleted", None, "a string"):
        if change == "deleted":
            del inner[last]
        else:
            inner[last] = change
        sign(state, manifest)
        with pytest.raises(AccmtError, match="checkpoint") as caught:
            train(resume=str(FOLDER))
        assert "do: " in str(caught.value)


def test_an_error_of_a_users_own_state_stays_what_it_is():
    class Failing(Callback):
        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            raise KeyError("mine")

    train(max_steps=2, callbacks=Failing())
    with pytest.raises(KeyError, match="mine") as caught:
        train(resume=True, callbacks=Failing())
    assert not isinstance(caught.value, CheckpointError)
