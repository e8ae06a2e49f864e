import json

import pytest
import torch
from torch import nn

from accmt.errors import WeightsError
from accmt.saving.load_weights import load_weights
from accmt.saving.weights import save_weights
from tests.raising import raises_at


def build(width=4):
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))


def save(folder, model=None, **arguments):
    return save_weights((model or build()).state_dict(), folder, **arguments)


@pytest.mark.parametrize(
    ("files", "got"),
    [
        (None, "no such folder"),
        ([], "an empty folder"),
        (["manifest.json", "optimizer.safetensors"], "a folder with manifest.json, optimizer.safetensors"),
        ([f"{number}.txt" for number in range(9)], "7.txt and 1 more"),
    ],
)
def test_folder_without_weights_is_an_error_that_says_what_is_there(tmp_path, files, got):
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name in files:
            (folder / name).touch()
    with raises_at(WeightsError, str(folder), got, expected="model.safetensors"):
        load_weights(build(), folder)


def test_path_of_a_file_is_refused(tmp_path):
    save(tmp_path)
    with raises_at(WeightsError, "model.safetensors", "a file"):
        load_weights(build(), tmp_path / "model.safetensors")


def test_every_misfit_stands_in_one_message_and_the_model_is_untouched(tmp_path):
    save_weights({"0.weight": torch.ones(5, 4), "0.bias": torch.ones(4), "head": torch.ones(1)}, tmp_path)
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(WeightsError) as caught:
        load_weights(model, tmp_path)
    message = str(caught.value)
    assert "missing: 1.weight, 1.bias" in message
    assert "unexpected: head" in message
    assert "shapes: 0.weight [5, 4] for [4, 4] in the model" in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_not_strict_loads_what_both_sides_have(tmp_path):
    save_weights({"0.weight": torch.ones(4, 4), "head": torch.ones(1)}, tmp_path)
    model = build()
    bias = model[0].bias.detach().clone()
    load_weights(model, tmp_path, strict=False)
    assert torch.equal(model[0].weight, torch.ones(4, 4))
    assert torch.equal(model[0].bias, bias)


def test_not_strict_refuses_a_folder_with_no_name_in_common(tmp_path):
    save_weights({"head": torch.ones(1)}, tmp_path)
    with raises_at(WeightsError, str(tmp_path), "unexpected: head"):
        load_weights(build(), tmp_path, strict=False)


@pytest.mark.parametrize("safe", [True, False])
def test_missing_shard_is_named(tmp_path, safe):
    shard = save(tmp_path, max_shard_size=50, safe_serialization=safe).files[1]
    (tmp_path / shard).unlink()
    with raises_at(WeightsError, "index.json", shard):
        load_weights(build(), tmp_path)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("keep", [0, 100, -1])
def test_file_that_was_cut_short_is_named(tmp_path, safe, keep):
    (name,) = save(tmp_path, safe_serialization=safe).files
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:keep])
    with raises_at(WeightsError, str(tmp_path / name)):
        load_weights(build(), tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}'])
def test_damaged_index_is_named(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with raises_at(WeightsError, "model.safetensors.index.json"):
        load_weights(build(), tmp_path)


def test_bin_file_runs_no_code(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (exec, ("raise SystemExit('code from a weight file ran')",))

    torch.save({"0.weight": Harmful()}, tmp_path / "pytorch_model.bin")
    with raises_at(WeightsError, "pytorch_model.bin"):
        load_weights(build(), tmp_path)


def test_bin_file_with_other_things_than_weights_is_refused(tmp_path):
    torch.save({"model": build().state_dict(), "epoch": 3}, tmp_path / "pytorch_model.bin")
    with raises_at(WeightsError, "pytorch_model.bin"):
        load_weights(build(), tmp_path)


def test_weights_take_the_dtype_of_the_model(tmp_path):
    source = build().to(torch.bfloat16)
    save(tmp_path, source)
    model = build()
    load_weights(model, str(tmp_path))
    assert model[0].weight.dtype == torch.float32
    assert torch.equal(model[0].weight, source[0].weight.float())


@pytest.mark.parametrize(("dtype", "is_said"), [(torch.bfloat16, True), (torch.float64, False), (torch.float32, False)])
def test_weights_that_are_rounded_are_said(tmp_path, caplog, dtype, is_said):
    caplog.set_level("INFO", "accmt")
    save(tmp_path)
    load_weights(build().to(dtype), tmp_path)
    said = f"4 of 4 weights in {tmp_path} are float32 and are rounded to the model's bfloat16"
    assert (said in caplog.text) is is_said


def test_weights_that_the_model_ties_may_be_missing_under_one_name(tmp_path):
    tied = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    tied["head"].weight = tied["embedding"].weight
    weight = torch.randn(5, 4)
    for name in tied.state_dict():
        save_weights({name: weight}, tmp_path)
        load_weights(tied, tmp_path)
        assert torch.equal(tied["head"].weight, weight)


def test_first_found_of_several_formats_is_the_one_transformers_reads(tmp_path):
    save_weights({"weight": torch.full((2, 2), 1.0), "bias": torch.zeros(2)}, tmp_path)
    torch.save({"weight": torch.full((2, 2), 2.0), "bias": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {}}))
    model = nn.Linear(2, 2)
    load_weights(model, tmp_path)
    assert torch.equal(model.weight, torch.full((2, 2), 1.0))


@pytest.mark.parametrize("inner", ["", "step-00000004"])
def test_a_checkpoint_is_no_model_folder_and_the_message_says_how_to_make_one(tmp_path, inner):
    (tmp_path / inner).mkdir(exist_ok=True)
    (tmp_path / inner / "manifest.json").touch()
    with raises_at(WeightsError, str(tmp_path), do=f"accmt get {tmp_path} OUT"):
        load_weights(nn.Linear(1, 1), tmp_path)
