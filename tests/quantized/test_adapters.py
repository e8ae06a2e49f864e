"""Adapters around quantized weights train and resume, or are refused before the first step.

`make quantized` runs it, with bitsandbytes and torchao.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accmt import AcceleratorModule
from accmt.addons.quantized_layers import try_quantized_layers
from accmt.engine.quantized import reject_sharding_quantized_weights
from accmt.errors import ModuleContractError
from tests.quantized import test_matrix as matrix
from tests.quantized.test_matrix import OPTIMIZERS, fit, trained_weights
from tests.resume.unbroken import InterruptAt

pytestmark = matrix.pytestmark
base = matrix.base

ROTATION = {"type": "OFT", "oft_block_size": 8, "target_modules": ["q_proj"]}
DORA = {"use_dora": True, "targets": ["q_proj"]}
REFLECTIONS = {"type": "HRA", "target_modules": ["q_proj"]}


def make(base: Path, quantization: Any, **model: Any) -> AcceleratorModule:
    torch.manual_seed(3)
    section = {"path": str(base), "type": "AutoModelForCausalLM", "quantization": quantization, **model}
    return AcceleratorModule.from_hps({"epochs": 1, "batch_size": 1, "optim": "SGD", "model": section})


@pytest.mark.parametrize("adapter", ["IA3", "Vera", ROTATION], ids=["IA3", "VeRA", "OFT"])
@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_adapters_that_peft_has_for_such_weights_resume_with_equal_bits(
    base: Path, quantization: str, adapter: Any
) -> None:
    before, whole, resumed = (make(base, quantization, adapter=adapter) for _ in range(3))
    fit("out/whole", whole, OPTIMIZERS["AdamW"])
    fit("out/parts", make(base, quantization, adapter=adapter), OPTIMIZERS["AdamW"], InterruptAt(7))
    fit("out/parts", resumed, OPTIMIZERS["AdamW"], resume=True)
    first, expected, found = map(trained_weights, (before, whole, resumed))
    assert any(not torch.equal(weight, first[name]) for name, weight in expected.items())
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())


@pytest.mark.parametrize(
    ("quantization", "model", "message"),
    [
        ("int8", {"lora": DORA}, r"lora around weights of Int8Params, which fail: AttributeError"),
        ("nf4", {"lora": DORA}, r"lora around weights of Params4bit, which are replaced in each forward"),
        ("nf4", {"adapter": {"type": "LoHa", "target_modules": ["q_proj"]}}, r"loha .* which fail: RuntimeError"),
        ("int8", {"adapter": REFLECTIONS}, r"hra around weights of Int8Params, whose codes it uses as values"),
        (
            "torchao:Int8DynamicActivationInt8WeightConfig",
            {"lora": {"targets": "all-linear"}},
            r"weights of Int8Tensor, through which no gradient passes\n  expected: .* with unquantized activations",
        ),
    ],
    ids=["DoRA-int8", "DoRA-nf4", "LoHa-nf4", "HRA-int8", "LoRA-torchao dynamic"],
)
def test_what_cannot_be_right_is_refused_before_the_first_step(
    base: Path, quantization: str, model: dict[str, Any], message: str
) -> None:
    module = make(base, quantization, **model)
    with pytest.raises(ModuleContractError, match=message):
        fit("out/m", module, OPTIMIZERS["AdamW"])
    assert module.state.global_step == 0


@pytest.mark.parametrize("quantization", ["int8", "nf4", "torchao:Int8WeightOnlyConfig"])
def test_only_weights_of_4_bits_are_sharded(base: Path, quantization: str) -> None:
    model = make(base, quantization, lora={"targets": ["q_proj"]}).model
    if quantization == "nf4":
        reject_sharding_quantized_weights(model)
        return
    with pytest.raises(ModuleContractError, match=r"weights of Int8\w+, which FSDP2 cannot shard"):
        reject_sharding_quantized_weights(model)


def test_the_trial_of_quantized_layers_leaves_random_numbers_and_modes_alone(base: Path) -> None:
    module = make(base, "nf4", lora={"dropout": 0.5, "targets": ["q_proj"]})
    modes, generator = [part.training for part in module.model.modules()], torch.get_rng_state()
    try_quantized_layers(module.model)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [part.training for part in module.model.modules()] == modes
    assert all(weight.grad is None for weight in module.model.parameters())
