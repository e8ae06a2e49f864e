"""`accmt get`: the weights of a checkpoint as a model folder, whole or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accmt.checkpoint.contents import StateCollector, write_state
from accmt.checkpoint.store import CheckpointStore
from accmt.cli.main import main
from accmt.saving import load_weights
from tests.checkpoints import cut_in_half, delete, flip, save_with

TENSORS = "tensors-00001-of-00001.safetensors"


def build_model(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[3].weight = model[2].weight
    return model


def save(folder, models):
    """Save a checkpoint of each model, after an update, at steps 1, 2 ..."""
    store = CheckpointStore(folder, max_checkpoints=9)
    for step, model in enumerate(models, start=1):
        optimizer = torch.optim.AdamW(model.parameters())
        sum(parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()
        collected = StateCollector(model, [optimizer]).collect({})
        save_with(store, step, lambda files, collected=collected: write_state(collected, files), {})
    return folder


def get(capsys, *arguments):
    """Run the command; return its exit code and what it said."""
    exit_code = main(["get", *map(str, arguments)])
    captured = capsys.readouterr()
    return exit_code, captured.out + captured.err


@pytest.fixture
def models():
    return [build_model(0), build_model(1)]


@pytest.fixture
def folder(tmp_path, models):
    return save(tmp_path / "checkpoint-net", models)


def same(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_the_weights_load_into_a_new_model_bit_for_bit(folder, models, tmp_path, capsys):
    exit_code, said = get(capsys, folder / "step-00000001", tmp_path / "out")
    loaded = build_model(9)
    load_weights(loaded, tmp_path / "out")
    assert exit_code == 0
    assert same(loaded, models[0])
    assert "model.safetensors from step 1" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert not any(name.startswith(("model.", "optim")) for name in load_file(tmp_path / "out" / "model.safetensors"))


def test_large_weights_are_sharded_and_load_again(folder, models, tmp_path, capsys):
    get(capsys, folder, tmp_path / "out", "--max-shard-size", "64")
    loaded = build_model(9)
    load_weights(loaded, tmp_path / "out")
    assert same(loaded, models[1])
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_weights_are_converted_and_tied_ones_stay_one(folder, models, tmp_path, capsys):
    assert get(capsys, folder, tmp_path / "out", "--dtype", "bfloat16")[0] == 0
    weights, trained = load_file(tmp_path / "out" / "model.safetensors"), models[1].state_dict()
    assert ("2.weight" in weights) != ("3.weight" in weights)
    assert torch.equal(weights["0.weight"], trained["0.weight"].bfloat16())
    assert weights["1.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("damage", [flip, cut_in_half, delete])
@pytest.mark.parametrize("name", [TENSORS, "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_refused_and_nothing_is_written(damage, name, folder, tmp_path, capsys):
    damage(folder / "step-00000002" / name)
    exit_code, said = get(capsys, folder, tmp_path / "out")  # which does not quietly take the older one
    assert (exit_code, (tmp_path / "out").exists()) == (2, False)
    assert name in said


def test_a_folder_with_files_is_only_overwritten_when_told_to(folder, models, tmp_path, capsys):
    output = tmp_path / "out"
    get(capsys, folder / "step-00000001", output)
    (output / "notes.txt").write_text("mine")
    before = (output / "model.safetensors").read_bytes()
    exit_code, said = get(capsys, folder, output)
    assert (exit_code, (output / "model.safetensors").read_bytes()) == (2, before)
    assert "--overwrite" in said
    assert get(capsys, folder, output, "--overwrite")[0] == 0
    loaded = build_model(9)
    load_weights(loaded, output)
    assert same(loaded, models[1])
    assert (output / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("inside", [".", "weights"])
def test_nothing_is_written_into_the_checkpoint(inside, folder, tmp_path, capsys):
    checkpoint = folder / "step-00000002"
    before = sorted(checkpoint.iterdir())
    exit_code, said = get(capsys, checkpoint, checkpoint / inside, "--overwrite")
    assert (exit_code, sorted(checkpoint.iterdir())) == (2, before)
    assert "damage" in said


@pytest.fixture
def bert(tmp_path):
    """Save a small transformers model beside the checkpoint of another with the same configuration."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(vocab_size=20, max_position_embeddings=8, **sizes)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    model = BertForSequenceClassification(config).to(torch.bfloat16)
    save(tmp_path / "checkpoint-bert", [model])
    return model


def test_a_transformers_model_gets_its_config_and_loads_by_from_pretrained(bert, tmp_path, capsys):
    from transformers import AutoModelForSequenceClassification

    exit_code, said = get(capsys, tmp_path / "checkpoint-bert", tmp_path / "out")
    assert (exit_code, "config.json from" in said) == (0, True)
    loaded, notes = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    assert same(loaded, bert)
    assert loaded.dtype == torch.bfloat16


def test_tied_weights_of_a_transformers_model_come_back_tied(tmp_path, capsys):
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    model.save_pretrained(tmp_path / "gpt")
    save(tmp_path / "checkpoint-gpt", [model])
    assert get(capsys, tmp_path / "checkpoint-gpt", tmp_path / "out")[0] == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same(loaded, model)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_bare_leaves_the_config_out(bert, tmp_path, capsys):
    get(capsys, tmp_path / "checkpoint-bert", tmp_path / "out", "--bare")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_config_of_another_model_is_refused(bert, folder, tmp_path, capsys):
    exit_code, said = get(capsys, folder, tmp_path / "out", "--config", tmp_path / "bert")
    assert (exit_code, (tmp_path / "out").exists()) == (2, False)
    assert "BertForSequenceClassification" in said


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 30), ("num_hidden_layers", 0)])
def test_a_config_of_other_sizes_is_refused(key, value, bert, tmp_path, capsys):
    config = tmp_path / "bert" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), key: value}))
    exit_code, said = get(capsys, tmp_path / "checkpoint-bert", tmp_path / "out")
    assert (exit_code, (tmp_path / "out").exists()) == (2, False)
    assert "weights of BertForSequenceClassification, with the same names and shapes" in said


def test_a_checkpoint_of_an_adapter_alone_is_refused(bert, tmp_path, capsys):
    from peft import LoraConfig, get_peft_model

    shutil.rmtree(tmp_path / "checkpoint-bert")
    save(tmp_path / "checkpoint-bert", [get_peft_model(bert, LoraConfig(target_modules=["query"]))])
    exit_code, said = get(capsys, tmp_path / "checkpoint-bert", tmp_path / "out")
    assert (exit_code, Path(tmp_path / "out").exists()) == (2, False)
    assert "an adapter" in said
