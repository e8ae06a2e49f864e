"""A save that fails or dies at each of its operations in turn, from each kind of saved model to each other."""

import contextlib
import os

import pytest
import safetensors.torch
import torch
from torch import nn

from accmt.saving.load_weights import load_weights
from accmt.saving.weights import save_adapter, save_weights
from tests.pairs import pairs

OPERATIONS = [
    (os, "replace"),
    (os, "unlink"),
    (os, "rmdir"),
    (os, "fsync"),
    (safetensors.torch, "save_file"),
    (torch, "save"),
]
KINDS = {
    "safetensors file": {"safe_serialization": True},
    "safetensors shards": {"safe_serialization": True, "max_shard_size": 200},
    "other safetensors shards": {"safe_serialization": True, "max_shard_size": 150},
    "bin file": {"safe_serialization": False},
    "bin shards": {"safe_serialization": False, "max_shard_size": 200},
    "adapter": {"is_adapter": True, "safe_serialization": True},
    "adapter bin": {"is_adapter": True, "safe_serialization": False},
}
FOREIGN = {
    "config.json": "{}",
    "model-00001-of-00002.safetensors": "not ours",
    "my_model.bin": "not ours",
    ".tmp-x": "",
}


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # for real, the thousand saves here take minutes


class InjectedError(OSError):
    """The failure that is injected."""


class FailingOperations:
    """Lets `allowed` operations of the file system through, then fails one (an error) or all that follow (a kill)."""

    def __init__(self, monkeypatch, allowed, *, kill):
        self.done = 0
        self.allowed = allowed
        self.kill = kill
        self.failed = None
        for module, name in OPERATIONS:
            monkeypatch.setattr(module, name, self.guard(name, getattr(module, name)))

    def guard(self, name, operation):
        def guarded(*args, **kwargs):
            self.done += 1
            if self.done == self.allowed + 1 or (self.kill and self.done > self.allowed):
                self.failed = self.failed or name
                if name.startswith("save"):
                    args[1].write_bytes(b"half a file")
                raise InjectedError("injected")
            return operation(*args, **kwargs)

        return guarded


def write_adapter_config(folder):
    (folder / "adapter_config.json").write_text("{}")


def save(model, folder, *, is_adapter=False, **arguments):
    if is_adapter:
        return save_adapter(model.state_dict(), folder, write_others=write_adapter_config, **arguments)
    return save_weights(model.state_dict(), folder, **arguments)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def build(value):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def value_in(folder):
    """Load the folder as any reader would and return the one value that all weights have."""
    model = build(-1.0)
    load_weights(model, folder)
    values = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
    assert len(values) == 1, "a mixture of two saves"
    return values.pop()


def save_until_it_survives(folder, new, old, *, kill):
    """Interrupt the save from `old` to `new` after 0, 1, 2 ... operations; yield which one failed."""
    for allowed in range(200):
        save(build(1.0), folder, **old)
        with pytest.MonkeyPatch.context() as monkeypatch:
            operations = FailingOperations(monkeypatch, allowed, kill=kill)
            with contextlib.suppress(InjectedError):
                save(build(2.0), folder, **new)
        if operations.failed is None:
            return
        yield operations.failed
    raise AssertionError("the save never ended")


@pytest.mark.parametrize(("old", "new", "kill"), pairs(KINDS, KINDS, [False, True]))
def test_interrupted_save_leaves_the_old_or_the_new_weights(tmp_path, old, new, kill):
    for name, content in FOREIGN.items():
        (tmp_path / name).write_text(content)
    outcomes = []
    for failed in save_until_it_survives(tmp_path, KINDS[new], KINDS[old], kill=kill):
        outcomes.append(value_in(tmp_path))
        if not kill and failed in ("replace", "fsync", "save", "save_file"):
            assert not (tmp_path / ".tmp-weights").exists()
    assert outcomes == sorted(outcomes), "the new weights were there and then gone"
    assert set(outcomes) == {1.0, 2.0}
    assert value_in(tmp_path) == 2.0
    assert {name: (tmp_path / name).read_text() for name in FOREIGN} == FOREIGN


@pytest.mark.parametrize("new", ["bin file", "bin shards"])
def test_weights_that_an_earlier_save_left_unread_never_come_to_light(tmp_path, new):
    outcomes = []
    for allowed in range(30):
        folder = tmp_path / str(allowed)
        save(build(1.0), folder)
        current = (folder / "model.safetensors").read_bytes()
        save(build(0.0), folder, max_shard_size=200)
        (folder / "model.safetensors").write_bytes(current)  # a loader reads this one, and not the shards
        with pytest.MonkeyPatch.context() as monkeypatch, contextlib.suppress(InjectedError):
            FailingOperations(monkeypatch, allowed, kill=True)
            save(build(2.0), folder, **KINDS[new])
        outcomes.append(value_in(folder))
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1.0, 2.0}


@pytest.mark.parametrize("new", KINDS)
def test_save_after_a_killed_one_leaves_only_its_own_files(tmp_path, new):
    for _ in save_until_it_survives(tmp_path, KINDS[new], KINDS["safetensors shards"], kill=True):
        saved = save(build(3.0), tmp_path, **KINDS[new])
        assert names_in(tmp_path) == sorted(saved.files)
        assert value_in(tmp_path) == 3.0


def test_same_weights_saved_twice_survive_an_interruption(tmp_path):
    save(build(2.0), tmp_path, **KINDS["bin shards"])
    for allowed in range(15):
        with pytest.MonkeyPatch.context() as monkeypatch:
            FailingOperations(monkeypatch, allowed, kill=True)
            with pytest.raises(InjectedError):
                save(build(2.0), tmp_path, **KINDS["bin shards"])
        assert value_in(tmp_path) == 2.0
