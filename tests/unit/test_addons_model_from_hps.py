"""A model that the hyper-parameters describe."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from accmt import AcceleratorModule, HyperParameters, Trainer
from accmt.addons import reading_in_parts
from accmt.addons.model_from_hps import load_tokenizer
from accmt.cli.main import main
from accmt.engine.meta_device import accelerator_to_build_for, building_for
from accmt.errors import (
    AccmtError,
    ArgumentError,
    HyperParameterError,
    UnknownArgumentError,
    WeightsError,
)
from tests.raising import raises_at
from tests.tables import each

HPS = {"epochs": 1, "batch_size": 4, "optim": {"type": "AdamW", "lr": 1e-3}}


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertForSequenceClassification(BertConfig(vocab_size=50, **sizes)).save_pretrained("bert")
    LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).save_pretrained("llama")


def build(**model):
    return AcceleratorModule.from_hps(
        {**HPS, "model": {"path": "./llama", "type": "AutoModelForCausalLM", **model}}
    ).model


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_arguments_reach_who_takes_them():
    assert type(AcceleratorModule.from_hps({**HPS, "model": "./llama"}).model).__name__ == "LlamaModel"
    model = build(dtype="bfloat16", attn_implementation="eager", use_cache=False)
    assert (model.dtype, model.config._attn_implementation, model.config.use_cache) == (torch.bfloat16, "eager", False)
    labelled = {"path": "./bert", "type": "AutoModelForSequenceClassification", "num_labels": 5}
    model = AcceleratorModule.from_hps({**HPS, "model": {**labelled, "ignore_mismatched_sizes": True}}).model
    assert model.config.num_labels == 5


def test_parts_are_frozen_by_name():
    assert not {name for name in trained(build(freeze=["embed", r"layers\.0\."])) if "embed" in name or ".0." in name}
    assert any("layers.1." in name for name in trained(build(freeze="embed")))


def test_a_tied_weight_is_frozen_by_all_its_names():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=True, **sizes)).save_pretrained("tied")
    with raises_at(HyperParameterError, "hps_config model.freeze") as raised:
        build(path="./tied", freeze=["lm_head"])
    assert "do: write `freeze: [lm_head, model.embed_tokens]`" in str(raised.value)
    with raises_at(HyperParameterError, "hps_config model.freeze"):
        build(path="./tied", freeze="embed")
    assert not {name for name in trained(build(path="./tied", freeze=["embed", "lm_head"])) if "embed" in name}


def test_an_adapter_is_lora_or_any_of_peft():
    build(lora={"targets": ["q_proj"], "init_lora_weights": "pissa_niter_4", "layer_replication": [[0, 2], [1, 2]]})
    model = build(lora={"r": 4, "alpha": 8, "dropout": 0.1, "targets": ["q_proj"]})
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout, config.task_type) == (4, 8, 0.1, "CAUSAL_LM")
    assert all("lora" in name for name in trained(model))
    model = build(adapter={"type": "IA3", "target_modules": ["k_proj"], "feedforward_modules": []})
    assert type(model.peft_config["default"]).__name__ == "IA3Config"


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_model_that_gets_an_adapter_is_read_whole(monkeypatch, has_adapter):
    sharding = SimpleNamespace(is_fsdp2=True)
    seen = []
    monkeypatch.setattr(reading_in_parts, "read_in_parts", lambda *_: seen.append(accelerator_to_build_for()))
    with building_for(sharding):
        build(**({"lora": {"r": 2, "targets": ["q_proj"]}} if has_adapter else {}))
    assert seen == ([] if has_adapter else [sharding])


def test_a_run_needs_no_other_code(tmp_path):
    model = {"path": "./llama", "type": "AutoModelForCausalLM", "lora": {"r": 2, "targets": ["q_proj"]}}
    Path("hps.json").write_text(json.dumps({"hps": {**HPS, "model": model}}))
    rows = {"input_ids": [[i % 50, 3, (i * 7) % 50] for i in range(8)]}
    data = Dataset.from_dict({**rows, "labels": rows["input_ids"]}).with_format("torch")
    Trainer("hps.json", "out/m", verbose=False).fit("hps.json", data, data)
    loaded = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained("llama"), "out/m")
    assert any(parameter.abs().sum() > 0 for name, parameter in loaded.named_parameters() if "lora_B" in name)
    hps = HyperParameters.from_config("hps.json")
    assert HyperParameters.from_config(hps.to_dict()) == hps
    assert HyperParameters.from_config("out/m/hps.yaml").section("model") == hps.section("model")


def test_params_shows_the_groups_of_the_model_in_the_section(capsys):
    Path("hps.json").write_text(json.dumps({**HPS, "model": {"path": "./llama", "lora": {"targets": ["q_proj"]}}}))
    assert main(["params", "hps.json"]) == 0
    assert capsys.readouterr().out.split("\n")[1].split()[:2] == ["all", "AdamW"]
    Path("hps.json").write_text(json.dumps(HPS))
    assert main(["params", "hps.json"]) == 2
    assert "do: add --model out/base" in capsys.readouterr().err


@each(
    ("model", "place", "message"),
    [
        ({"paht": "x"}, "model", "do: write `path` instead of `paht`"),
        ({"path": "./llama", "freeze": ["a("]}, "model.freeze", "expected: a regular expression"),
        (
            {"path": "./llama", "gradient_checkpointing": True},
            "model.gradient_checkpointing",
            "do: write Trainer(gradient_checkpointing=True)",
        ),
        ({"path": "./llama", "quantization": "nf5"}, "model.quantization", "do: write `nf4`"),
        ({"path": "./llama", "lora": {}, "adapter": "IA3"}, "model.lora", "expected: one adapter"),
        (
            {"path": "./llama", "lora": {"alpha": 8, "lora_alpha": 16}},
            "model.lora.lora_alpha",
            "its short form `alpha`",
        ),
        ({"path": "./llama", "dtype": "bf16"}, "model.dtype", "do: write `dtype: bfloat16`"),
        ({"path": "./llama", "kernels": {"rope": True}}, "model.kernels", "expected: a name, or a mapping with `type`"),
    ],
)
def test_a_wrong_form_is_found_when_the_file_is_read(model, place, message):
    with pytest.raises(HyperParameterError) as raised:
        HyperParameters.from_config({**HPS, "model": model})
    assert str(raised.value).startswith(f"hps_config {place}\n")  # one fault, and not several of one key
    assert message in str(raised.value)


@each(
    ("model", "place", "message"),
    [
        ({"load_in_4bit": True}, "model.load_in_4bit", "do: write `quantization: nf4`"),
        ({"freeze": ["q_prj"]}, "model.freeze", "similar names: model.layers.0.self_attn.q_proj.weight"),
        ({"lora": {"rank": 8}}, "model.lora.rank", "do: write `r`"),
        ({"lora": {"r": -1}}, "model.lora", "`r` should be a positive integer value"),
        ({"lora": {"targets": ["q_proj", "v_prj"]}}, "model.lora.targets", "got: 'v_prj', which matches no layer"),
        ({"lora": {"targets": "q_proj"}}, "model.lora.targets", "a string is a regular expression"),
        ({"lora": {"modules_to_save": ["lm_haed"]}}, "model.lora.modules_to_save", "do: write `lm_head`"),
        ({"attn_implementatoin": "sdpa"}, "model.attn_implementatoin", "do: write `attn_implementation`"),
        ({"lora": {"r": "many"}}, "model.lora.r", "got: 'many' (str)\n  expected: int (LoraConfig's signature)"),
        ({"lora": {"use_dora": "yes"}}, "model.lora.use_dora", "expected: bool"),
        ({"lora": {"layer_replication": [[0, 1, 2]]}}, "model.lora.layer_replication", "list[tuple[int, int]]"),
        (
            {"lora": {"init_lora_weights": "eva"}},
            "model.lora.init_lora_weights",
            "eva, which PEFT computes from data",
        ),
        (
            {"lora": {"targets": ["q_proj"], "trainable_token_indices": [999]}},
            "model.lora",
            "index 999 is out",
        ),
        ({"adapter": {"type": "C3A"}}, "model.adapter", "expected: arguments that C3AConfig and the model accept"),
        ({"type": None, "lora": {"task_type": "CAUSAL_LM"}}, "model.lora", "do: write `type: AutoModelForCausalLM`"),
    ],
)
def test_what_a_library_refuses_has_its_place(model, place, message):
    with pytest.raises(HyperParameterError) as raised:
        build(**model)
    assert str(raised.value).startswith(f"hps_config {place}\n")
    assert message in str(raised.value)


def test_all_wrong_arguments_are_said_at_once():
    with raises_at(HyperParameterError, "hps_config model.lora.use_dora") as raised:
        build(lora={"rank": 8, "alpha": "high", "use_dora": "yes", "dropuot": 0.1})
    assert "model.lora.alpha\n  got: 'high' (str)" in str(raised.value)
    with raises_at(HyperParameterError, "hps_config model.lora.targets"):
        build(lora={"targets": ["q_prj", "v_proj", "k_prj"]})


@pytest.mark.parametrize("targets", [["q_proj", "layers.1.mlp.up_proj"], "all-linear", r".*\.[qv]_proj"])
def test_parts_are_named_as_peft_finds_them(targets):
    assert any("lora" in name for name in trained(build(lora={"targets": targets, "modules_to_save": ["head"]})))


def test_arguments_of_the_model_are_not_keywords_of_fit():
    hps = {**HPS, "model": {"path": "./llama", "type": "AutoModelForCausalLM"}}
    with raises_at(UnknownArgumentError, "fit", "num_labels", do="`model`"):
        Trainer(hps, "out/m").fit(hps, [{"input_ids": [1, 2]}], num_labels=3)


def test_an_adapter_around_an_adapter_is_refused():
    build(lora={"r": 2}).save_pretrained("adapter")
    with raises_at(HyperParameterError, "hps_config model.lora"):
        build(path="adapter", lora={"r": 4})
    assert trained(build(path="adapter"))


def test_a_folder_and_a_class_that_do_not_exist_have_their_place():
    with raises_at(FileNotFoundError, "hps_config model.path: ./lama", "no such folder"):
        build(path="./lama")
    with raises_at(FileNotFoundError, "model.path: ./lama", do="llama?"):
        load_tokenizer(HyperParameters.from_config({**HPS, "model": "./lama"}))
    Path("hps.json").write_text("{}")
    with raises_at(FileNotFoundError, "./hps.json", do="AcceleratorModule.from_hps('hps.json')"):
        AcceleratorModule.from_hf("./hps.json")
    with raises_at(AccmtError, "hps_config model.type"):
        build(type="AutoModelForCasualLM")
    build(lora={"r": 2}).save_pretrained("adapter")
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    Path("adapter/adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "./gone"}))
    with raises_at(FileNotFoundError, "the adapter in adapter, from its adapter_config.json: ./gone"):
        build(path="adapter")


def test_flags_reach_the_model_that_fit_builds_from_the_same_file():
    rows = {"input_ids": [[index, 3, 7] for index in range(4)]}
    data = Dataset.from_dict({**rows, "labels": rows["input_ids"]}).with_format("torch")
    hps = {**HPS, "model": {"path": "./llama", "type": "AutoModelForCausalLM", "lora": {"r": 2}}}
    Path("hps.json").write_text(json.dumps({"hps": hps}))
    parser = Trainer.add_argparse_args(argparse.ArgumentParser())
    args = parser.parse_args(["--hps_config", "./hps.json", "--model_path", "out/m", "--hps.model.lora.r=4"])
    for source in ("hps.json", None):
        trainer = Trainer.from_argparse_args(args, verbose=False)
        trainer.fit(source or trainer.hps, data)
        assert json.loads(Path("out/m/adapter_config.json").read_text())["r"] == 4
        assert HyperParameters.from_config("out/m/hps.yaml").section("model").adapter["r"] == 4
    Path("other.json").write_text(json.dumps({"hps": hps}))
    with raises_at(ArgumentError, "fit", "other.json", do="trainer.fit(trainer.hps, data)"):
        Trainer.from_argparse_args(args, verbose=False).fit("other.json", data)
    with raises_at(ArgumentError, "fit", do="AcceleratorModule.from_hps(trainer.hps)"):
        Trainer.from_argparse_args(args, verbose=False).fit(AcceleratorModule.from_hps("hps.json"), data)
    Trainer(HPS, "out/m", verbose=False).fit(hps, data)
    assert json.loads(Path("out/m/adapter_config.json").read_text())["r"] == 2


def test_hyper_parameters_without_a_model_build_none():
    with raises_at(HyperParameterError, "hps_config model"):
        AcceleratorModule.from_hps(HPS)


def test_an_adapter_of_another_base_is_said(caplog):
    model = {"path": "./llama", "type": "AutoModelForCausalLM", "lora": {"r": 2, "targets": ["q_proj"]}}
    rows = {"input_ids": [[index, 3, 7] for index in range(4)]}
    data = Dataset.from_dict({**rows, "labels": rows["input_ids"]}).with_format("torch")
    Trainer(HPS, "out/adapter", verbose=False).fit(AcceleratorModule.from_hps({**HPS, "model": model}), data)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    for name, width in (("alike", 16), ("wider", 32)):
        LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=width, **sizes)).save_pretrained(name)
    AcceleratorModule.from_hps({**HPS, "model": {**model, "path": "llama"}}).load_weights("out/adapter")
    assert "was trained with" not in caplog.text
    AcceleratorModule.from_hps({**HPS, "model": {**model, "path": "./alike"}}).load_weights("out/adapter")
    assert "was trained with ./llama, but is loaded into ./alike" in caplog.text
    with raises_at(WeightsError, "weights in out/adapter", "lora_A.weight [2, 16] for [2, 32]"):
        AcceleratorModule.from_hps({**HPS, "model": {**model, "path": "./wider"}}).load_weights("out/adapter")
    with raises_at(HyperParameterError, "hps_config model"):
        AcceleratorModule.from_hps({**HPS, "model": "out/adapter"})
