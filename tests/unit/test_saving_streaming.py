"""Weights of a sharded model, written one after the other: the files are those of a save of whole weights."""

from __future__ import annotations

import weakref

import pytest
import torch
from safetensors import safe_open
from torch import nn

from accmt.saving import load_weights, save_weights
from accmt.saving.weights import ShardedState, stream_weights


def build() -> nn.Module:
    """Build a model with tied weights, a buffer, a number and several types."""
    torch.manual_seed(0)
    model = nn.Module()
    model.embedding = nn.Embedding(7, 5)
    model.head = nn.Linear(5, 7, bias=False)
    model.head.weight = model.embedding.weight
    model.norm = nn.BatchNorm1d(5)
    model.half = nn.Linear(3, 5).bfloat16()
    return model


def stream(state: ShardedState, folder, **arguments):
    return state.run_on_main(lambda: stream_weights(state.outlines, state.fetch, folder, **arguments))


@pytest.mark.parametrize("size", ["10GB", 64])
def test_the_files_are_those_of_whole_weights(tmp_path, size):
    model = build()
    saved = stream(ShardedState(model), tmp_path / "streamed", max_shard_size=size)
    expected = save_weights(model.state_dict(), tmp_path / "whole", max_shard_size=size)
    assert saved == expected
    assert len(saved.files) == (1 if size == "10GB" else 5)
    for name in saved.files:
        if name.endswith(".json"):
            assert (tmp_path / "streamed" / name).read_text() == (tmp_path / "whole" / name).read_text()
            continue
        with safe_open(tmp_path / "streamed" / name, "pt") as got, safe_open(tmp_path / "whole" / name, "pt") as whole:
            assert got.metadata() == whole.metadata()
            assert sorted(got.keys()) == sorted(whole.keys())
            assert all(torch.equal(got.get_tensor(key), whole.get_tensor(key)) for key in whole.keys())  # noqa: SIM118
    fresh = build()
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    load_weights(fresh, tmp_path / "streamed")
    assert all(
        torch.equal(*pair) for pair in zip(fresh.state_dict().values(), model.state_dict().values(), strict=True)
    )


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    model, alive, most = build(), [], []
    state = ShardedState(model)

    def fetch(name):
        alive[:] = [reference for reference in alive if reference() is not None]
        tensor = state.fetch(name).clone()
        alive.append(weakref.ref(tensor))
        most.append(len(alive))
        return tensor

    state.run_on_main(lambda: stream_weights(state.outlines, fetch, tmp_path))
    assert max(most) <= 2


def test_a_save_that_fails_leaves_the_old_weights(tmp_path):
    model = build()
    stream(ShardedState(model), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    state, calls = ShardedState(model), []

    def fail(name):
        calls.append(name)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return state.fetch(name)

    with pytest.raises(OSError, match="No space left"):
        state.run_on_main(lambda: stream_weights(state.outlines, fail, tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
