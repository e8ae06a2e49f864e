"""The recipes for QLoRA, as they stand in the docs, on tiny models; and resumed, and loaded by PEFT."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM
from transformers import LlamaConfig, LlamaForCausalLM

from accmt import AcceleratorModule
from accmt.errors import HyperParameterError
from tests.e2e.markdown import ROOT, read_blocks
from tests.launching import run_script

BLOCKS = [block for block in read_blocks(ROOT / "docs" / "fine-tuning.md") if "qlora.yaml" in block.text]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained("base")
    tokens = torch.randint(0, 64, (40, 12)).tolist()
    Dataset.from_dict({"input_ids": tokens, "labels": tokens}).save_to_disk("data")
    yaml, _ = BLOCKS
    Path(yaml.file_name).write_text(yaml.text)
    return tmp_path


def test_the_recipe_runs_and_peft_loads_what_it_saves(folder):
    yaml, python = BLOCKS
    assert len(yaml.text.splitlines()) + len(python.text.splitlines()) < 30
    exec(python.text, {})  # noqa: S102
    model = AutoPeftModelForCausalLM.from_pretrained("out/qlora")
    assert any(weight.abs().sum() > 0 for name, weight in model.named_parameters() if "lora_B" in name)


def test_each_quantization_is_built_by_its_library(folder):
    def build(**model):
        hps = {"epochs": 1, "batch_size": 1, "optim": "SGD"}
        return AcceleratorModule.from_hps(
            {**hps, "model": {"path": "./base", "type": "AutoModelForCausalLM", **model}}
        ).model

    assert type(build(quantization="nf4").model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    assert type(build(quantization="int8").model.layers[0].mlp.up_proj).__name__ == "Linear8bitLt"
    weight = build(quantization="torchao:Int8WeightOnlyConfig").model.layers[0].mlp.up_proj.weight
    assert "torchao" in type(weight).__module__
    with pytest.raises(HyperParameterError, match=r"model.quantization\n  got: Int8WeightOnlyConfg"):
        build(quantization="torchao:Int8WeightOnlyConfg")
    with pytest.raises(HyperParameterError, match=r"model.quantization.bnb_4bit_quant_tpye"):
        build(quantization={"type": "nf4", "bnb_4bit_quant_tpye": "fp4"})


def test_the_example_trains_an_adapter_on_weights_of_4_bits(tmp_path):
    script = ROOT / "examples" / "finetune_with_lora.py"
    run = run_script(script, "--nf4", "--output", tmp_path / "lora", "--limit", "8")
    assert run.returncode == 0, run.stderr
    assert "of 17,408,650 parameters trained" in run.stderr  # packed: 22.7 M unpacked
    assert (tmp_path / "lora" / "adapter_model.safetensors").is_file()
