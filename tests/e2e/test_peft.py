"""LoRA through PEFT: the folder and the checkpoints hold the adapter alone, and continuing is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from accmt import AcceleratorModule, Callback
from accmt.errors import CheckpointError, WeightsError
from accmt.huggingface import load_model_weights, save_model
from tests.e2e.test_transformers import make_data
from tests.raising import raises_at
from tests.toys import make_trainer

KIND = "AutoModelForSequenceClassification"
TARGETS = ["query", "value"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tiny BERT with dropout in a folder."""
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def build(base: Path, *adapters: str, **changes: Any) -> AcceleratorModule:
    """Make a module of the model with LoRA around it; adapters that are not active are added."""
    module = AcceleratorModule.from_hf(base, KIND)
    config = {"r": 2, "target_modules": TARGETS, "task_type": "SEQ_CLS", **changes}
    first, *others = adapters or ("default",)
    torch.manual_seed(1)
    module.model = get_peft_model(module.model, LoraConfig(**config), adapter_name=first)
    for name in others:
        module.model.add_adapter(name, LoraConfig(**config))
    return module


def outputs(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=make_data(3)["input_ids"][:4]).logits
    return logits


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def train(module: AcceleratorModule, **settings: Any) -> Any:
    hps = {"batch_size": 4, "epochs": 2, "optim": {"type": "AdamW", "lr": 0.05}}
    trainer = make_trainer(hps, **settings)
    trainer.fit(module, make_data(3), make_data(3))
    return trainer


def test_the_best_model_is_a_folder_with_the_adapter_alone(base: Path):
    trainer = train(build(base), model_saving="best_valid_loss")
    folder = Path("out/model")
    assert names_in(folder) == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "README.md",
        "hps.yaml",
        "status.json",
        "trainer_config.json",
    }
    saved = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    assert {name.split(".")[-2] for name in saved} == {"lora_A", "lora_B", "classifier"}
    assert json.loads((folder / "status.json").read_text())["best"].keys() == {"best_valid_loss"}
    trainer.save_model("out/last")
    expected = outputs(trainer.run.module.model)
    plain = AutoModelForSequenceClassification.from_pretrained(base)
    assert not torch.equal(outputs(plain), expected)
    assert torch.equal(outputs(PeftModel.from_pretrained(plain, "out/last")), expected)
    assert torch.equal(
        outputs(AutoPeftModelForSequenceClassification.from_pretrained("out/last", num_labels=3)), expected
    )
    fresh = build(base)
    fresh.load_weights("out/last")
    assert torch.equal(outputs(fresh.model), expected)


def test_from_hf_builds_the_model_and_its_adapter_from_the_folder_and_trains_on(base: Path):
    first = train(build(base), model_saving="always")
    module = AcceleratorModule.from_hf("out/model", KIND)
    assert torch.equal(outputs(module.model), outputs(first.run.module.model))
    before = {name: weight.clone() for name, weight in module.model.named_parameters()}
    train(module, model_saving="always", model_path="out/second")
    changed = {name for name, weight in module.model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed
    assert all("lora_" in name or "classifier" in name for name in changed)


def checkpointed_names(folder: Path) -> set[str]:
    (newest,) = sorted(Path(folder).glob("step-*"))[-1:]
    return {name for file in newest.glob("*.safetensors") for name in safetensors.torch.load_file(file)}


class Interrupt(Callback):
    """Ends the run after some updates."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_update_end(self) -> None:
        if self.state.global_step == self.step:
            raise KeyboardInterrupt


def test_a_run_that_continues_is_exact_and_its_checkpoints_hold_no_frozen_weight(base: Path):
    whole = train(build(base), checkpoint_every=None)
    settings = {"checkpoint_every": "1 step", "checkpoint": "ck"}
    with pytest.raises(KeyboardInterrupt):
        train(build(base), callbacks=Interrupt(4), **settings)
    names = checkpointed_names(Path("ck"))
    weights = {name for name in names if name.startswith("model.")}
    assert weights
    assert all("lora_" in name or "modules_to_save" in name or "position_ids" in name for name in weights), weights
    size = sum(file.stat().st_size for file in sorted(Path("ck").glob("step-*"))[-1].glob("*.safetensors"))
    assert size < 0.5 * (base / "model.safetensors").stat().st_size
    continued = build(base)
    for parameter in continued.model.parameters():
        parameter.data += parameter.requires_grad  # what the checkpoint has to give back
    train(continued, resume=True, **settings)
    expected = whole.run.module.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in continued.model.state_dict().items())


def test_a_checkpoint_is_refused_by_a_model_around_which_it_was_not_trained(base: Path):
    settings = {"checkpoint_every": "1 step", "checkpoint": "ck"}
    train(build(base), **settings)
    other = build(base)
    other.model.get_base_model().bert.encoder.layer[1].output.dense.weight.data[0, 0] += 1e-3
    with raises_at(CheckpointError, "the frozen weights", "1 of ", "layer.1.output.dense.weight"):
        train(other, resume=True, **settings)


def test_adapters_that_are_not_active_are_checkpointed_and_saved_too(base: Path):
    module = build(base, "default", "other")
    settings = {"checkpoint_every": "1 step", "checkpoint": "ck"}
    with pytest.raises(KeyboardInterrupt):
        train(module, model_saving="always", callbacks=Interrupt(4), **settings)
    assert any(".other." in name for name in checkpointed_names(Path("ck")))
    assert names_in(Path("out/model/other")) == {"adapter_config.json", "adapter_model.safetensors"}
    torch.manual_seed(7)
    fresh = build(base, "default", "other")
    fresh.model.base_model.model.bert.encoder.layer[0].attention.self.query.lora_A["other"].weight.data.zero_()
    fresh.load_weights("out/model")
    fresh.model.set_adapter("other")
    module.model.set_adapter("other")
    assert torch.equal(outputs(fresh.model), outputs(module.model))


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
@pytest.mark.parametrize("adapters", [("default",), ("mine",), ("default", "other")], ids="+".join)
@pytest.mark.parametrize(
    "changes",
    [{}, {"task_type": None, "modules_to_save": ["classifier"]}, {"target_modules": ["word_embeddings"]}],
    ids=["task", "no-task", "embeddings"],
)
def test_every_kind_of_adapter_comes_back_bit_for_bit(base: Path, changes: dict[str, Any], adapters, safe: bool):
    changes = {"init_lora_weights": False, **changes}
    model, fresh = build(base, *adapters, **changes).model, build(base, *adapters, **changes).model
    for name, weight in fresh.named_parameters():
        weight.data += 1.0 if "lora" in name or "modules_to_save" in name else 0.0
    saved = save_model(model, model.state_dict(), Path("model"), safe_serialization=safe)
    assert not torch.equal(outputs(fresh), outputs(model))
    load_model_weights(fresh, Path("model"))
    assert torch.equal(outputs(fresh), outputs(model))
    found = PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(base), "model")
    assert torch.equal(outputs(found), outputs(model))
    assert ("adapter_model.safetensors" in saved.files) == safe
    assert ("adapter_model.bin" in saved.files) == (not safe)


def test_a_compiled_layer_leaves_no_trace_in_an_adapter(base: Path):
    def compile_layer(model: Any) -> Any:
        layers = model.base_model.model.bert.encoder.layer
        layers[0] = torch.compile(layers[0], backend="eager")
        return model

    config = {"init_lora_weights": False}
    compiled, plain = compile_layer(build(base, **config).model), build(base, **config).model
    for source, target in [(compiled, plain), (plain, compiled)]:
        for weight in source.parameters():
            weight.data += 0.1 * weight.requires_grad
        save_model(source, source.state_dict(), Path("model"))
        assert not any("_orig_mod" in name for name in safetensors.torch.load_file("model/adapter_model.safetensors"))
        load_model_weights(target, Path("model"))
        assert torch.equal(outputs(target), outputs(source))


def test_trained_modules_in_a_compiled_layer_are_found_under_plain_names(base: Path):
    model = build(base, init_lora_weights=False, task_type=None, modules_to_save=["dense"]).model
    plain = model.state_dict()
    layers = model.base_model.model.bert.encoder.layer
    layers[0] = torch.compile(layers[0], backend="eager")
    save_model(model, plain, Path("model"))  # as what gathers shards names them
    saved = safetensors.torch.load_file("model/adapter_model.safetensors")
    assert "base_model.model.bert.encoder.layer.0.output.dense.weight" in saved
    fresh = build(base, init_lora_weights=False, task_type=None, modules_to_save=["dense"]).model
    load_model_weights(fresh, Path("model"))
    assert torch.equal(outputs(fresh), outputs(model))


def test_an_adapter_of_another_size_is_refused_with_both_shapes(base: Path):
    model = build(base).model
    save_model(model, model.state_dict(), Path("model"))
    with raises_at(WeightsError, "weights in model", "lora_A.weight [2, 16] for [4, 16]"):
        build(base, r=4).load_weights("model")


def test_adapters_of_other_layers_are_refused_by_name(base: Path):
    model = build(base).model
    save_model(model, model.state_dict(), Path("model"))
    with raises_at(WeightsError, "weights in model", "key.lora_A.weight", "; unexpected: ", "query.lora_A.weight"):
        build(base, target_modules=["key"]).load_weights("model")


def test_a_whole_model_and_an_adapter_are_not_taken_for_each_other(base: Path):
    model = build(base).model
    save_model(model, model.state_dict(), Path("adapter"))
    with raises_at(WeightsError, f"weights in {base}", "whole model", do="get_peft_model"):
        build(base).load_weights(base)
    with raises_at(WeightsError, "weights in adapter", "an adapter", do="PeftModel.from_pretrained"):
        AcceleratorModule.from_hf(base, KIND).load_weights("adapter")


def test_an_adapter_whose_weights_are_missing_is_refused(base: Path):
    model = build(base).model
    save_model(model, model.state_dict(), Path("model"))
    Path("model/adapter_model.safetensors").unlink()
    with raises_at(WeightsError, "model/adapter_config.json", "adapter_model.safetensors"):
        build(base).load_weights("model")


def test_an_adapter_inside_a_transformers_model_is_refused_before_training(base: Path):
    module = AcceleratorModule.from_hf(base, KIND)
    module.model.add_adapter(LoraConfig(r=2, target_modules=TARGETS))
    with raises_at(TypeError, "self.model", do="get_peft_model"):
        train(module)


def test_a_resized_embedding_is_saved_beside_the_adapter(base: Path):
    module = AcceleratorModule.from_hf(base, KIND)
    module.model.resize_token_embeddings(60)
    module.model = get_peft_model(module.model, LoraConfig(r=2, target_modules=TARGETS, task_type="SEQ_CLS"))
    save_model(module.model, module.model.state_dict(), Path("model"))
    saved = safetensors.torch.load_file("model/adapter_model.safetensors")
    (embedding,) = [tensor for name, tensor in saved.items() if "word_embeddings" in name]
    assert embedding.shape == (60, 16)
